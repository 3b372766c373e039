"""The byte order inside an atom: one head's tokens of one page, packed for an engine's attention kernel.

``plain`` is ``[token][dim]``. vLLM's attention for CPUs packs by instruction set, and packs keys differently from
values: ``amx`` for x86 with matrix tiles, ``bfmmla`` for ARM with matrix instructions, both for bfloat16; ``vec`` for
everything else. Each known packing is a reshape and a permutation, so any can be converted to any other. A packing not
listed here is opaque: only engines with the same packing can read it.
"""

from __future__ import annotations

import math

import torch

__all__ = ["fits", "known", "names", "pack", "unpack"]

# For K and for V: the shape of a packed atom in terms of n tokens and d dims, and the permutation that turns it into
# [token][dim]. A number stands for itself; "n16" is n / 16.
_PACKINGS: dict[str, tuple[tuple[tuple[str, ...], tuple[int, ...]], tuple[tuple[str, ...], tuple[int, ...]]]] = {
    "plain": ((("n", "d"), (0, 1)), (("n", "d"), (0, 1))),
    "vec": ((("d", "n"), (1, 0)), (("n", "d"), (0, 1))),
    "amx": ((("n16", "d2", "16", "2"), (0, 2, 1, 3)), (("d16", "n2", "16", "2"), (1, 3, 0, 2))),
    "bfmmla": ((("n8", "d4", "8", "4"), (0, 2, 1, 3)), (("d8", "n4", "8", "4"), (1, 3, 0, 2))),
}

_BFLOAT16 = ("amx", "bfmmla")


def known(*names: str) -> bool:
    """Whether these packings can be converted into each other."""
    return all(name in _PACKINGS for name in names)


def names(dtype: str = "bfloat16") -> list[str]:
    """The known packings that engines use for this dtype."""
    return [name for name in _PACKINGS if dtype == "bfloat16" or name not in _BFLOAT16]


def fits(name: str, tokens: int, dim: int) -> bool:
    """Whether atoms of ``tokens`` and ``dim`` are possible in this packing."""
    return all(math.prod(_form(name, value, tokens, dim)[0]) == tokens * dim for value in (False, True))


def _form(name: str, value: bool, tokens: int, dim: int) -> tuple[list[int], tuple[int, ...]]:
    sizes, order = _PACKINGS[name][value]
    full = {"n": tokens, "d": dim}
    shape = [int(s) if s.isdecimal() else full[s[0]] // int(s[1:] or 1) for s in sizes]
    return shape, order


def unpack(atoms: torch.Tensor, name: str, value: bool) -> torch.Tensor:
    """Convert packed atoms ``[..., token, dim]`` to plain ones. ``value``: whether they belong to V."""
    *lead, tokens, dim = atoms.shape
    shape, order = _form(name, value, tokens, dim)
    n = len(lead)
    parts = atoms.reshape(*lead, *shape).permute(*range(n), *(n + i for i in order))
    return parts.reshape(*lead, tokens, dim)


def pack(atoms: torch.Tensor, name: str, value: bool) -> torch.Tensor:
    """Convert plain atoms ``[..., token, dim]`` to packed ones, in a tensor of the same shape."""
    *lead, tokens, dim = atoms.shape
    shape, order = _form(name, value, tokens, dim)
    n = len(lead)
    back = sorted(range(len(order)), key=order.__getitem__)
    parts = atoms.reshape(*lead, *(shape[i] for i in order)).permute(*range(n), *(n + i for i in back))
    return parts.reshape(*lead, tokens, dim).contiguous()
