"""Who a block is: golden vectors of the format, and that names depend on nothing but model, tenant, tokens and extras.

A golden vector that changes means that every store out there has become worthless. Change ``golden_keys.json`` only
together with the version of the format: ``python -m tests.index.test_keys`` prints it anew.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtide import Chain, Extra, Group, Kind, Layout, Model, Tenant
from kvtide.errors import LayoutError
from kvtide.index import keys as module
from kvtide.index.keys import DEFAULT_TENANT, Namer

GOLDEN = Path(__file__).with_name("golden_keys.json")

FULL = Group("full", Kind.FULL, 2, 4, 64, "bfloat16")
LAYOUTS = {
    "full": Layout((FULL,), 32),
    "full, 256 tokens": Layout((FULL,)),
    "mla": Layout((Group("latent", Kind.MLA, 3, 1, 576, "float16"),), 32),
    "window": Layout((FULL, Group("near", Kind.WINDOW, 2, 4, 64, "bfloat16", window=100)), 32),
    "state": Layout((FULL, Group("mamba", Kind.STATE, 2, 8, 4096, "float32")), 32),
    "draft": Layout((FULL, Group("eagle", Kind.DRAFT, 1, 4, 64, "bfloat16")), 32),
    "packed": Layout((replace(FULL, packing="amx-bf16", page=32),), 32),
}
PLAIN = Model(LAYOUTS["full"], "given:golden@1")
RICH = Model(
    LAYOUTS["full"],
    "given:golden@1",
    config={"rope": {"theta": 1e6, "scaling": None}, "layers": 2, "tied": True, "names": ["a", b"b"]},
    scales=b"\x00\x01",
    adapter="poet",
    fidelity="fp8",
)
SECOND = Tenant("second", bytes(range(32)))
TOKENS = [(i * 2654435761) % 151_936 for i in range(100)]
IMAGE = bytes(range(200, 216))


def model_of(kind: str) -> Model:
    return Model(LAYOUTS[kind], "given:golden@1")


CHAINS: dict[str, tuple[Model, Tenant, list[Extra]]] = {
    "no extras": (PLAIN, DEFAULT_TENANT, []),
    "lora": (PLAIN, DEFAULT_TENANT, [Extra("lora", "poet")]),
    "image in two blocks": (PLAIN, DEFAULT_TENANT, [Extra("image", IMAGE, 20, 50)]),
    "salt": (PLAIN, DEFAULT_TENANT, [Extra("salt", 7, 0, 1)]),
    "everything": (
        PLAIN,
        DEFAULT_TENANT,
        [Extra("salt", b"s", 0, 1), Extra("image", IMAGE, 20, 50), Extra("image", IMAGE, 50, 80), Extra("lora", "x")],
    ),
    "second tenant": (PLAIN, SECOND, []),
    "config, scales, adapter, fidelity": (RICH, DEFAULT_TENANT, []),
    **{f"group: {kind}": (model_of(kind), DEFAULT_TENANT, []) for kind in ("mla", "window", "state", "draft")},
}


def vectors() -> dict[str, Any]:
    """Everything that the format fixes, as hex."""
    return {
        "layouts": {name: layout.digest.hex() for name, layout in LAYOUTS.items()},
        "tenants": {t.name: t.tag.hex() for t in (DEFAULT_TENANT, SECOND)},
        "namespaces": {name: model.namespace(tenant).hex() for name, (model, tenant, _) in CHAINS.items()},
        "keys": {
            name: {
                g.name: [k.hex() for k in model.namer(tenant).chain(TOKENS, extras).keys(g.suffix)]
                for g in model.layout.groups
            }
            for name, (model, tenant, extras) in CHAINS.items()
        },
    }


# -- the format, written a second time from its description -------------------------------------------------


def framed(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<I", len(body)) + body


def canonical(value: object) -> bytes:
    if value is None or value is True or value is False:
        return {None: b"n", True: b"T", False: b"F"}[value]
    if isinstance(value, int):
        return framed(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return framed(b"s", value.encode("utf-8"))
    if isinstance(value, bytes):
        return framed(b"b", value)
    if isinstance(value, dict):
        return framed(b"m", b"".join(canonical(k) + canonical(value[k]) for k in sorted(value)))
    assert isinstance(value, list)
    return framed(b"l", b"".join(canonical(v) for v in value))


def derived(context: str, material: bytes, length: int = 32) -> bytes:
    return blake3(material, derive_key_context=context).digest(length)


def other_layout(layout: Layout) -> bytes:
    groups = [
        [g.name, g.kind.value, g.layers, g.heads, g.head_dim, g.dtype, g.window, g.page, g.packing]
        for g in layout.groups
    ]
    return derived("kvtide 1 layout", canonical([1, layout.block_tokens, groups]), 16)


def other_namespace(model: Model, tenant: Tenant) -> bytes:
    body = {
        "layout": other_layout(model.layout),
        "weights": model.weights,
        "config": model.config,
        "scales": model.scales,
        "adapter": model.adapter,
        "fidelity": model.fidelity,
        "tenant": derived("kvtide 1 tenant", tenant.secret, 16),
    }
    return derived("kvtide 1 namespace", canonical(body))


def other_keys(model: Model, tenant: Tenant, tokens: list[int], extras: list[Extra], suffix: str) -> list[bytes]:
    key = derived("kvtide 1 name", tenant.secret + other_namespace(model, tenant))
    size, parent, found = model.layout.block_tokens, bytes(32), []
    for first in range(0, len(tokens) - len(tokens) % size, size):
        mine = tokens[first : first + size]
        touching = sorted(
            canonical(e.kind) + canonical(e.value) + struct.pack("<qq", e.start - first, e.stop - first)
            for e in extras
            if e.start < first + size and first < e.stop
        )
        parent = blake3(parent + struct.pack(f"<I{size}I", size, *mine) + b"".join(touching), key=key).digest()
        found.append(parent + suffix.encode())
    return found


def test_names_are_those_of_the_golden_vectors() -> None:
    assert vectors() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CHAINS)
def test_a_second_implementation_of_the_description_agrees(name: str) -> None:
    model, tenant, extras = CHAINS[name]
    golden = json.loads(GOLDEN.read_text())
    assert other_namespace(model, tenant).hex() == golden["namespaces"][name]
    for group in model.layout.groups:
        keys = other_keys(model, tenant, TOKENS, extras, group.name)
        assert [k.hex() for k in keys] == golden["keys"][name][group.name]
        assert len(keys) == 3  # 100 tokens: the last 4 are no full block


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_implementation_of_the_layout_digest_agrees(name: str) -> None:
    assert other_layout(LAYOUTS[name]).hex() == json.loads(GOLDEN.read_text())["layouts"][name]


def test_no_two_golden_chains_share_a_key() -> None:
    golden = json.loads(GOLDEN.read_text())["keys"]
    keys = [key for groups in golden.values() for chain in groups.values() for key in chain]
    # The image begins in the first block and the LoRA touches every one, so that nothing here is shared.
    assert len(set(keys)) == len(keys)
    assert len(set(json.loads(GOLDEN.read_text())["layouts"].values())) == len(LAYOUTS)


def test_names_do_not_depend_on_the_process() -> None:
    for seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.index.test_keys"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert json.loads(done.stdout) == json.loads(GOLDEN.read_text())


# -- what names depend on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, weights="given:golden@2"),
        replace(PLAIN, adapter="poet"),
        replace(PLAIN, fidelity="fp8"),
        replace(PLAIN, scales=b"\x01"),
        replace(PLAIN, config={"rope": 1e6}),
        replace(PLAIN, layout=LAYOUTS["packed"]),
    ],
    ids=["weights", "adapter", "fidelity", "scales", "config", "packing"],
)
def test_another_model_has_no_name_in_common(other: Model) -> None:
    one, two = (m.namer().chain(TOKENS).digests for m in (PLAIN, other))
    assert not set(one) & set(two)


def test_another_tenant_has_no_name_in_common_though_its_name_does_not_count() -> None:
    mine, same, other = (
        PLAIN.namer(t).chain(TOKENS).digests
        for t in (SECOND, Tenant("renamed", SECOND.secret), Tenant("second", bytes(32)))
    )
    assert mine == same
    assert not set(mine) & set(other)


def test_a_short_secret_is_refused_and_a_secret_is_never_shown() -> None:
    with pytest.raises(LayoutError, match="31 bytes can be guessed"):
        Tenant("x", bytes(31))
    assert "secret" not in repr(Tenant("x", b"secret" * 6))
    assert "secret" not in repr(PLAIN.namer(Tenant("x", b"secret" * 6)))


def test_weights_must_be_named() -> None:
    with pytest.raises(LayoutError, match="weights identity"):
        Model(LAYOUTS["full"], "")


def test_a_layout_that_loses_is_never_called_exact() -> None:
    lossy = Layout((replace(FULL, packing="r4"),), 32)
    with pytest.raises(LayoutError, match="'full' is packed as 'r4', which is lossy"):
        Model(lossy, "given:golden@1")
    assert Model(lossy, "given:golden@1", fidelity="r4").namespace() != PLAIN.namespace()


def test_namers_of_equal_models_are_equal() -> None:
    assert PLAIN.namer() == replace(PLAIN).namer()
    assert hash(PLAIN.namer()) == hash(replace(PLAIN).namer())
    assert PLAIN.namer() != PLAIN.namer(SECOND)
    assert PLAIN.namer() != "something else"


def digests(*extras: Extra, tokens: list[int] = TOKENS) -> list[bytes]:
    return PLAIN.namer().chain(tokens, extras).digests


def test_an_extra_counts_from_its_first_block_on() -> None:
    plain, image = digests(), digests(Extra("image", IMAGE, 40, 50))
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert image[2] != plain[2], "the chain carries it on"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Extra("x", "v", 3), Extra("x", "v", 5)),
        (Extra("x", "v", 3), Extra("x", "v", 3, 7)),
        (Extra("x", "v", 3, 7), Extra("x", "v", 3, 9)),
        (Extra("x", "v", 3, 7), Extra("x", "v", 4, 7)),
        (Extra("x", "v", 3, 7), Extra("y", "v", 3, 7)),
        (Extra("x", "1", 3, 7), Extra("x", 1, 3, 7)),
        (Extra("x", "1", 3, 7), Extra("x", b"1", 3, 7)),
        (Extra("xv", "", 3, 7), Extra("x", "v", 3, 7)),
    ],
    ids=["start", "endless", "stop", "start of an image", "kind", "str or int", "str or bytes", "border"],
)
def test_extras_that_differ_within_one_block_differ(one: Extra, two: Extra) -> None:
    assert digests(one)[0] != digests(two)[0]


def test_the_order_in_which_extras_are_given_does_not_count() -> None:
    one, two = Extra("image", IMAGE, 3, 9), Extra("lora", "x")
    assert digests(one, two) == digests(two, one)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Extra("image", b"", 5, 5), "covers no token: 5 to 5"),
        (lambda: Extra("image", b"", -1, 5), "covers no token: -1 to 5"),
        (lambda: Extra("image", b"", 0, 2**63), "covers no token"),
        (lambda: Extra("image", 1.5), "bytes, str or int, not float"),  # type: ignore[arg-type]
        (lambda: Extra("image", np.zeros(3)), "not ndarray"),  # type: ignore[arg-type]
        (lambda: Extra("image", "\ud800"), "cannot be encoded as UTF-8"),
    ],
)
def test_an_extra_that_cannot_be_is_refused_when_it_is_made(make: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        make()


# -- growing by turns ---------------------------------------------------------------------------------------

TOKEN = st.integers(0, 2**32 - 1)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[int], list[Extra], list[int], list[int]]:
    """Tokens, extras, where to split, and in which turn each extra is told (as late as may be, or earlier)."""
    tokens = draw(st.lists(TOKEN, max_size=80))
    extras = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, 90))
        stop = draw(st.one_of(st.just(module.FOREVER), st.integers(start + 1, 100)))
        extras.append(Extra(draw(st.sampled_from(["lora", "image"])), draw(st.binary(max_size=3)), start, stop))
    splits = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    return tokens, extras, splits, [draw(st.integers(0, 6)) for _ in extras]


@given(conversations())
def test_a_chain_grown_by_turns_is_the_chain_at_once(case: tuple[list[int], list[Extra], list[int], list[int]]) -> None:
    tokens, extras, splits, early = case
    namer = Namer(bytes(32), 8)
    grown = namer.chain()
    borders = [0, *splits, len(tokens)]
    told: set[int] = set()
    for turn, (start, stop) in enumerate(pairwise(borders)):
        # An extra must be told before the block that it starts in is named.
        now = [i for i, e in enumerate(extras) if i not in told and (e.start // 8 < stop // 8 or turn >= early[i])]
        told.update(now)
        grown.extend(tokens[start:stop], [extras[i] for i in now])
    rest = [e for i, e in enumerate(extras) if i not in told]
    grown.extend([], [e for e in rest if e.start >= grown.blocks * 8])
    once = namer.chain(tokens, extras)
    assert grown.digests == once.digests
    assert grown.keys(b"g") == once.keys(b"g") == [d + b"g" for d in once.digests]
    assert (grown.tokens, grown.blocks) == (len(tokens), len(tokens) // 8)
    for block in range(once.blocks):
        assert np.frombuffer(grown.tokens_of(block), "<u4").tolist() == tokens[block * 8 : block * 8 + 8]
        assert grown.parent(block) == (once.digests[block - 1] if block else bytes(32))


class CountingHasher:
    """BLAKE3 that says how many bytes went in."""

    hashed = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._real = blake3(*args, **kwargs)

    def reset(self) -> None:
        self._real.reset()

    def update(self, data: bytes) -> None:
        CountingHasher.hashed += len(data)
        self._real.update(data)

    def digest(self) -> bytes:
        return self._real.digest()


def test_a_turn_costs_only_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Namer(bytes(32), 16).chain(range(16 * 1000 + 10))
    keys = chain.keys(b"full")
    known = list(keys)
    monkeypatch.setattr(module, "blake3", CountingHasher)
    CountingHasher.hashed = 0
    chain.extend(range(38))  # with the 10 left over: three blocks
    assert CountingHasher.hashed == 3 * (32 + 4 + 16 * 4)
    chain.extend(range(5))
    assert CountingHasher.hashed == 3 * (32 + 4 + 16 * 4), "a part of a block has no name yet"
    assert chain.keys(b"full")[:1000] == known
    assert all(a is b for a, b in zip(chain.keys(b"full"), known, strict=False)), "known keys are not made again"


def test_a_late_extra_is_refused_and_the_chain_stays_as_it_was() -> None:
    chain = PLAIN.namer().chain(TOKENS[:40])
    with pytest.raises(LayoutError, match="starts at token 31, but 32 tokens are named already"):
        chain.extend(TOKENS[40:], [Extra("image", IMAGE, 33, 40), Extra("image", IMAGE, 31, 40)])
    chain.extend(TOKENS[40:])
    assert chain.digests == digests()


def test_tokens_that_are_refused_leave_the_chain_as_it_was() -> None:
    chain = PLAIN.namer().chain(TOKENS[:40])
    with pytest.raises(LayoutError):
        chain.extend([1, -1], [Extra("lora", "x", 50)])
    chain.extend(TOKENS[40:], [Extra("lora", "x", 50)])
    assert chain.digests == digests(Extra("lora", "x", 50))


# -- forms of tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint64),
        np.array(TOKENS, ">u4"),
        np.repeat(np.array(TOKENS, np.uint32), 2)[::2],
        array("I", TOKENS),
        array("q", TOKENS),
        memoryview(array("I", TOKENS)),
        memoryview(np.repeat(np.array(TOKENS, np.uint32), 2))[::2],  # type: ignore[arg-type]
        [np.int64(t) for t in TOKENS],
        (t for t in TOKENS),
    ],
    ids=["tuple", "u4", "i8", "u8", "big", "strided", "array I", "array q", "buffer", "strided buffer", "np", "iter"],
)
def test_every_form_of_the_same_tokens_has_the_same_names(tokens: Any) -> None:
    assert PLAIN.namer().chain(tokens).digests == digests()


def test_ids_of_all_32_bits_are_told_apart() -> None:
    high = [2**32 - 1] * 32
    assert digests(tokens=high) == PLAIN.namer().chain(np.array(high, np.uint32)).digests
    assert digests(tokens=high) != digests(tokens=[2**31 - 1] * 32)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([-1], "between 0 and 2"),
        ([2**32], "between 0 and 2"),
        ([1.5], "must be integers"),
        (["a"], "must be integers"),
        ("abc", "must be integers"),
        (None, "must be integers"),
        ([[1, 2]], "must be integers"),
        (b"abc", "ambiguous: give memoryview"),
        (bytearray(8), "ambiguous: give memoryview"),
        (memoryview(b"abcd"), "one row of uint32, not format 'B'"),
        (memoryview(bytes(16)).cast("I", (2, 2)), r"one row of uint32, not format 'I' \(2, 2\)"),
        (np.array([-1]), "between 0 and 2"),
        (np.array([2**32]), "between 0 and 2"),
        (np.array([1.0]), "one row of integers, not float64"),
        (np.array([[1]]), r"one row of integers, not int64 \(1, 1\)"),
        (np.array([True]), "one row of integers, not bool"),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        PLAIN.namer().chain(tokens)


def test_blocks_that_others_have_named_have_the_keys_of_prompts_of_their_own() -> None:
    namer, names = Model(LAYOUTS["full"], "w").namer(), [b"one", b"two", b"three"]
    alone = [namer.chain([0] * 32, [Extra("kind", name)]) for name in names]
    together = namer.apart("kind", names)
    assert together.keys(b"full") == [key for chain in alone for key in chain.keys(b"full")]
    assert [together.tokens_of(i) for i in range(3)] == [chain.tokens_of(0) for chain in alone]
    assert namer.apart("kind", names[::-1]).digests == together.digests[::-1]
    with pytest.raises(LayoutError, match="one block twice"):
        namer.apart("kind", [b"one", b"one"])


def test_a_chain_says_how_long_it_is() -> None:
    assert repr(PLAIN.namer().chain(TOKENS)) == "<Chain 3 blocks + 4 tokens>"
    assert repr(Chain(PLAIN.namer())) == "<Chain 0 blocks + 0 tokens>"


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
