"""Size, speed and error of the lossy forms and the lossless codec on the KV of a real model.

Bytes and speed are compared with bfloat16, which most engines keep. The error is that of the model's output: the model
reads the beginning of a text, its KV is encoded and decoded, and then it reads on. Its probabilities for every next
token are compared with those over the KV as computed, in float32; so the line for bfloat16 shows what engines lose
anyway. Speed is that of one thread, by its CPU time: on a shared machine wall time says little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvtide.benchmarks.reader import Reading, readings
from kvtide.benchmarks.record import BenchRecord, Contestant, Sample, compare, figure, timed
from kvtide.benchmarks.settings import Settings
from kvtide.block import BLOCK_TOKENS, BlockKey, Layout
from kvtide.engines.paged.lossy import FORMS, Form
from kvtide.tiers.format import codec as lossless
from kvtide.tiers.format.record import Header
from kvtide.tiers.format.scratch import Scratch

__all__ = ["codec"]


def codec(settings: Settings) -> Iterator[BenchRecord]:
    """Bytes, error and speed of every form."""
    settings.progress("the model reads")
    texts = list(readings(*((2048, 128) if settings.quick else (4096, 512))))
    yield from _errors(settings, texts)
    keys, values = (_blocks(part) for part in (texts[0].keys, texts[0].values))
    yield from _lossy(settings, keys.bfloat16(), values.bfloat16())
    for dtype in (torch.bfloat16, torch.float32):
        yield from _lossless(settings, torch.stack([keys, values], 2).to(dtype))


def _blocks(part: Tensor) -> Tensor:
    """``[layer, head, token, dim]`` as ``[block, layer, head, token, dim]``."""
    layers, heads, tokens, dim = part.shape
    return part.view(layers, heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, dim).movedim(2, 0).contiguous()


def _layout(layers: int, heads: int, dim: int, dtype: str = "bfloat16", packing: str = "plain") -> Layout:
    return Layout.attention(layers=layers, heads=heads, head_dim=dim, dtype=dtype, packing=packing)


# -- lossy forms --------------------------------------------------------------------------------------------


def _room(form: Form, keys: Tensor) -> Tensor:
    """Memory for the encoded form of keys ``[..., layer, head, token, dim]`` and their values."""
    *lead, layers, heads, tokens, dim = keys.shape
    group = _layout(layers, heads, dim, packing=form.name).groups[0]
    return torch.empty(*lead, layers, heads, group.head_bytes(tokens), dtype=torch.uint8)


def _through(form: Form, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """KV after encoding and decoding."""
    stored, back = _room(form, keys), (torch.empty_like(keys), torch.empty_like(values))
    form.encode(keys, values, stored)
    form.decode(stored, *back)
    return back


def _errors(settings: Settings, texts: Sequence[Reading]) -> Iterator[BenchRecord]:
    for name, form in {"bf16": None, **FORMS}.items():
        found = []
        for text in texts:
            settings.progress(f"{name}: the model reads on, {text.name}")
            pair = text.keys.bfloat16(), text.values.bfloat16()
            found.append(text.error(*(_through(form, *pair) if form else pair)))
        divergences, agreements = zip(*found, strict=True)
        yield _error(settings, f"codec-{name}-divergence", "nats/token", texts, divergences, "lower")
        yield _error(settings, f"codec-{name}-agreement", "%", texts, agreements, "higher")


def _error(
    settings: Settings,
    name: str,
    unit: str,
    texts: Sequence[Reading],
    values: Sequence[float],
    better: Literal["higher", "lower"],
) -> BenchRecord:
    note = ", ".join(f"{text.name} {value:.3g}" for text, value in zip(texts, values, strict=True))
    return figure(name, unit, values, better=better, command=settings.command, note=note)


def _lossy(settings: Settings, keys: Tensor, values: Tensor) -> Iterator[BenchRecord]:
    nbytes, tokens = 2 * keys.nbytes, keys.shape[0] * BLOCK_TOKENS
    stored = {name: _room(form, keys) for name, form in FORMS.items()}
    back = torch.empty_like(keys), torch.empty_like(values)

    def contestant(form: Form) -> Contestant:
        def encode() -> None:
            for pair in zip(keys, values, stored[form.name], strict=True):
                form.encode(*pair)

        def decode() -> None:
            for pair in zip(stored[form.name], *back, strict=True):
                form.decode(*pair)

        return lambda: {"encode": timed(encode, nbytes=nbytes), "decode": timed(decode, nbytes=nbytes)}

    def copy() -> None:
        for target, source in zip(back, (keys, values), strict=True):
            target.copy_(source)

    contestants = {name: contestant(form) for name, form in FORMS.items()}
    contestants["copy"] = lambda: {"copy": timed(copy, nbytes=nbytes)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = compare(contestants, settings.rounds(5, 3), settings.progress)
    torch.set_num_threads(threads)
    limit = [1 / s.cpu_per_gb for s in rounds["copy"]["copy"]]
    for name in FORMS:
        yield _size(settings, name, stored[name].nbytes / tokens, nbytes / tokens)
        for task in ("encode", "decode"):
            yield figure(
                f"codec-{name}-{task}",
                "GB/CPU s",
                [1 / s.cpu_per_gb for s in rounds[name][task]],
                better="higher",
                limit=limit,
                command=settings.command,
                note="of bfloat16, beside a copy",
            )


def _size(settings: Settings, name: str, ours: float, raw: float, dtype: str = "bfloat16") -> BenchRecord:
    return figure(
        f"codec-{name}-bytes",
        "bytes/token",
        [ours],
        better="lower",
        against=f"smaller than {dtype}",
        reference=[raw],
        command=settings.command,
    )


# -- the lossless codec -------------------------------------------------------------------------------------


def _lossless(settings: Settings, kv: Tensor) -> Iterator[BenchRecord]:
    """``kv``: ``[block, layer, K|V, head, token, dim]``. As a tier does it: with checksums, in one thread."""
    blocks, layers, _, heads, tokens, dim = kv.shape
    dtype = str(kv.dtype).removeprefix("torch.")
    geometry = _layout(layers, heads, dim, dtype).geometry["full"]
    spans = [memoryview(block) for block in kv.view(torch.uint8).reshape(blocks, -1).numpy()]
    coder, scratch, target = lossless.Zstd(), Scratch(), Scratch().get(geometry.footprint)
    stored: list[tuple[bytes, Header]] = []

    def encode() -> None:
        for span in spans:
            payload, table, number = lossless.encode(span, geometry, kv.itemsize, 0, coder, scratch)
            key, none = BlockKey(bytes(32) + b"full"), bytes(32)
            stored.append(
                (bytes(payload), Header(key, none, none, none[:16], none[:16], 1, 0, tokens, number, 0, table))
            )

    def decode() -> None:
        for payload, header in stored:
            sections = range(geometry.sections)
            lossless.decode(header, sections, memoryview(payload), target, geometry, kv.itemsize, coder)

    def contestant() -> Mapping[str, Sample]:
        stored.clear()
        return {"encode": timed(encode, nbytes=kv.nbytes), "decode": timed(decode, nbytes=kv.nbytes)}

    name = f"zstd-{dtype}"
    rounds = compare({name: contestant}, settings.rounds(3, 2), settings.progress)[name]
    assert bytes(target[: geometry.nbytes]) == bytes(spans[-1]), "a wrong byte"
    each = blocks * tokens
    yield _size(settings, name, sum(len(payload) for payload, _ in stored) / each, kv.nbytes / each, dtype)
    for task, samples in rounds.items():
        yield figure(
            f"codec-{name}-{task}",
            "GB/CPU s",
            [1 / s.cpu_per_gb for s in samples],
            better="higher",
            command=settings.command,
            note=f"of {dtype}" + (", with checksums" if task == "encode" else ""),
        )
