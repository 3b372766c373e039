"""Blocks for tests: their bytes follow from their key, so any reader can verify one by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.block import ALIGN, BlockKey, Geometry, Layout, Span, padded
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.tiers.base import Identity

__all__ = ["Bytes", "aligned", "content", "fill", "floats", "holds", "identity", "keys"]

Bytes = npt.NDArray[np.uint8]


def content(key: bytes, nbytes: int) -> Bytes:
    """The bytes of the block of that key: different for each key, and incompressible."""
    return np.frombuffer(blake3(key, derive_key_context="kvtide testing content").digest(nbytes), np.uint8)


def floats(key: bytes, nbytes: int) -> Bytes:
    """Like ``content``, but bfloat16 numbers such as KV holds: a codec can compress them."""
    seed = int.from_bytes(blake3(key, derive_key_context="kvtide testing floats").digest(16), "little")
    numbers = np.random.Generator(np.random.Philox(seed)).standard_normal(-(-nbytes // 2), np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[:nbytes]


def identity(
    layout: Layout,
    group: str | None = None,
    *,
    weights: str = "testing",
    tenant: Tenant = DEFAULT_TENANT,
) -> Identity:
    """The identity shared by the blocks of one group (by default the first)."""
    found = layout.groups[0] if group is None else layout.group(group)
    return Identity(
        Model(layout, weights).namespace(tenant),
        tenant.tag,
        layout.digest,
        found.suffix,
        layout.block_tokens,
        layout.geometry[found.name],
        found.itemsize,
    )


def keys(count: int, group: bytes = b"full", *, start: int = 0) -> list[BlockKey]:
    """Unique keys, for the numbers from ``start`` on."""
    context = "kvtide testing key"
    numbers = (n.to_bytes(8, "little") for n in range(start, start + count))
    return [BlockKey(blake3(n, derive_key_context=context).digest() + group) for n in numbers]


def aligned(nbytes: int) -> Span:
    """Uninitialised memory that begins at a page boundary, as tiers require."""
    raw = np.empty(padded(nbytes) + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return memoryview(raw)[start : start + nbytes]  # type: ignore[arg-type]


def _sections(span: Span, geometry: Geometry) -> Bytes:
    return np.frombuffer(span, np.uint8).reshape(-1, geometry.stride)[:, : geometry.section]


def fill(span: Span, geometry: Geometry, data: Bytes) -> None:
    """Copy ``data``, a block without padding, into ``span``, section by section."""
    _sections(span, geometry)[:] = data.reshape(geometry.sections, geometry.section)


def holds(span: Span, geometry: Geometry, data: Bytes, sections: range | None = None) -> bool:
    """Whether ``span`` has ``data``, or those sections of it, byte for byte; padding is ignored."""
    wanted = data.reshape(geometry.sections, geometry.section)
    if sections is not None:
        wanted = wanted[sections.start : sections.stop]
    return np.array_equal(_sections(span, geometry), wanted)
