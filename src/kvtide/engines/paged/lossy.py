"""Lossy forms: KV in a half or a quarter of its bytes, everywhere below the engine, in exchange for an error.

The engine's vectors are encoded on store, on the device where they are (on a GPU before the bus), and decoded on load.
So bus, DRAM, disk and network all carry the small form. A form is a *packing* of the layout and a *fidelity* of the
model: a lossy block has another name than an exact one, and neither is ever returned for the other. ``block.LOSSY`` has
the sizes; this file defines the codes. ``docs/compression.md`` has the measured costs and errors of each form.

All forms work the same way. A vector is split into *runs* of 64 numbers. A run stores its greatest magnitude as a
bfloat16 number, its *scale*, and each number as a code for its ratio to that:

- ``fp8``: a float8_e4m3fn each. Small numbers keep the same relative precision as large ones.
- ``k8v4``: one of 256 even steps for keys, of 16 for values. Attention is more sensitive to keys: an error there moves
  weight to other tokens, while one in a value is averaged out.
- ``r4``: one of 16 steps for both.

With only 16 steps, the run is rotated first. A few channels of real KV are many times larger than the others and would
leave them no steps. So signs are flipped by a fixed pattern, and then a Hadamard transform spreads every channel over
the whole run. The inverse rotation spreads the error likewise. (Measured on values of SmolLM2, rotation reduces the
divergence of the model's output to a half or a third. Runs of 32, or a minimum and a maximum for each run, take a
sixteenth more bytes and gain less than that; subtracting the mean of each channel makes it worse, probably because then
tokens with small values, which often get much attention, get large errors.)

The steps do not include zero: for b bits they are the odd multiples of 1/(2**b - 1), from -1 to 1, so that all 2**b
codes are used and both ends are exact. Therefore encoding decoded numbers again changes nothing (with 16 steps almost
nothing): blocks that are stored and loaded many times do not degrade.

A run with a NaN or an infinity is decoded as NaNs: such KV is broken, and this must be visible. A run whose numbers are
all below the smallest normal bfloat16 (1e-38) becomes zeros. Any bytes can be decoded. The sums in decoding are exact,
so that it gives the same result on every device; encoding may differ between devices by a step where a number lies
between two.

A head's part of a section is ``[token][key codes]``, ``[token][key scales]``, and then the same for values: so pages of
any size can be read from it. 4-bit codes are stored in pairs: the first half of a run in the low halves of its bytes,
the second half in the high ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from kvtide.block import LOSSY, run_of

__all__ = ["FORMS", "Form"]

_FLOAT8, _MOST = torch.float8_e4m3fn, 448.0
_SMALLEST = torch.finfo(torch.bfloat16).tiny


@functools.cache
def _turn(run: int, device: torch.device) -> Tensor:
    """The sign flips and the transform as one matrix: ``x @ turn`` rotates a run, ``y @ turn.T / run`` rotates it back.

    The signs are part of the format, so they come from a hash and not from a generator that may change.
    """
    transform = torch.ones(1, 1)
    while len(transform) < run:
        transform = torch.cat([torch.cat([transform, transform], 1), torch.cat([transform, -transform], 1)])
    bits = int.from_bytes(blake3(b"", derive_key_context="kvtide 1 signs").digest(run // 8), "little")
    signs = torch.tensor([1.0 - 2.0 * (bits >> i & 1) for i in range(run)])
    return (signs[:, None] * transform).to(device)


@dataclass(frozen=True)
class _Coder:
    """How a form encodes keys, or values: vectors ``[..., token, dim]`` as codes ``[..., token, run, byte]`` and scales
    ``[..., token, run, 1]``."""

    bits: int
    floats: bool
    """Whether codes are float8 numbers; otherwise they are step numbers."""

    @property
    def _half(self) -> float:
        """Half the number of gaps between steps."""
        return ((1 << self.bits) - 1) / 2

    def encode(self, vectors: Tensor, codes: Tensor, scales: Tensor) -> None:
        runs = vectors.float().unflatten(-1, (codes.shape[-2], -1))
        if self.bits == 4:
            runs = runs @ _turn(runs.shape[-1], runs.device)
        scale = runs.abs().amax(-1, keepdim=True).bfloat16()
        scale = torch.where(scale < _SMALLEST, 0, torch.where(scale.isinf(), torch.nan, scale))
        scales.copy_(scale)
        shares = (runs / torch.where(scale == 0, 1, scale).float()).nan_to_num_(0.0)
        if self.floats:
            codes.copy_(shares.mul_(_MOST).to(_FLOAT8).view(torch.uint8))
            return
        steps = shares.add_(1).mul_(self._half).round_().to(torch.uint8)
        if self.bits == 4:
            low, high = steps.chunk(2, -1)
            steps = low | high << 4
        codes.copy_(steps)

    def decode(self, codes: Tensor, scales: Tensor, vectors: Tensor) -> None:
        if self.floats:
            shares, whole = codes.view(_FLOAT8).float(), _MOST
        else:
            steps = torch.cat([codes & 15, codes >> 4], -1) if self.bits == 4 else codes
            shares, whole = steps.float().sub_(self._half), self._half
        if self.bits == 4:  # sums of halves of small integers: all exact
            run = shares.shape[-1]
            shares, whole = shares @ _turn(run, shares.device).T, whole * run
        # Not a division by a constant, which a GPU turns into a multiplication with different rounding.
        numbers = shares.mul_(scales.float() * (1 / whole)).flatten(-2)
        if vectors.dtype is torch.float16:  # a scale that was rounded up must not become infinite
            most = torch.finfo(torch.float16).max
            numbers = numbers.clamp_(-most, most)
        vectors.copy_(numbers)


@dataclass(frozen=True)
class Form:
    """A lossy packing: how a head's keys and values are encoded and decoded."""

    name: str
    coders: tuple[_Coder, ...]
    """For keys, and for values."""

    def encode(self, keys: Tensor, values: Tensor, heads: Tensor, at: int = 0) -> None:
        """Encode keys and values ``[..., token, dim]`` into the bytes of heads ``[..., byte]``, there from token ``at``
        on."""
        for coder, vectors, codes, scales in self._fields(keys, values, heads, at):
            coder.encode(vectors, codes, scales)

    def decode(self, heads: Tensor, keys: Tensor, values: Tensor, at: int = 0) -> None:
        """Decode keys and values ``[..., token, dim]`` from the bytes of heads ``[..., byte]``, there from token ``at``
        on."""
        for coder, vectors, codes, scales in self._fields(keys, values, heads, at):
            coder.decode(codes, scales, vectors)

    def _fields(
        self, keys: Tensor, values: Tensor, heads: Tensor, at: int
    ) -> Iterator[tuple[_Coder, Tensor, Tensor, Tensor]]:
        """For keys, then values: the coder, the vectors, and views of their codes and scales."""
        count, dim = keys.shape[-2:]
        runs = dim // run_of(dim)
        sizes = [size for coder in self.coders for size in (dim * coder.bits // 8, 2 * runs)]
        tokens = heads.shape[-1] // sum(sizes)
        parts = [part[..., at : at + count, :] for part in _cut(heads, tokens, sizes)]
        for coder, vectors, codes, scales in zip(self.coders, (keys, values), parts[::2], parts[1::2], strict=True):
            yield coder, vectors, codes.unflatten(-1, (runs, -1)), scales.view(torch.bfloat16).unsqueeze(-1)


def _cut(heads: Tensor, tokens: int, sizes: list[int]) -> Iterator[Tensor]:
    """Split ``[..., byte]`` into consecutive parts with the given bytes per token: each ``[..., token, byte]``."""
    for part, size in zip(heads.split([tokens * size for size in sizes], -1), sizes, strict=True):
        yield part.unflatten(-1, (tokens, size))


def _form(name: str, *, floats: bool = False) -> Form:
    return Form(name, tuple(_Coder(bits, floats) for bits in LOSSY[name]))


FORMS = {form.name: form for form in (_form("fp8", floats=True), _form("k8v4"), _form("r4"))}
"""All lossy packings by name."""
