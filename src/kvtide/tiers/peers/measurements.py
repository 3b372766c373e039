"""What a node has measured of the others, in the few bytes that it enters beside its membership.

Whoever can write to the directory can enter anything there. So what is read is bounded, and what makes no sense counts
as not measured: it is for people to look at, and nothing is decided by it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

__all__ = ["LONGEST_ROW", "Measurement", "pack_measurements", "unpack_measurements"]

_VERSION = 1
_CELL = struct.Struct(">Qff")
"""Epoch of the other member, bytes per second, seconds of a round trip; 0: not measured."""
_MOST = 63
"""Members that a row may name."""
LONGEST_ROW = 1 + _MOST * _CELL.size
"""Bytes of the longest row."""
_LARGEST = 1e30
"""Of a number, so that it fits into a float of 4 bytes."""


class Measurement(NamedTuple):
    """What was measured of one other node. 0: it was not."""

    bytes_per_second: float
    round_trip: float
    """Seconds."""


def pack_measurements(row: Mapping[int, Measurement]) -> bytes:
    """A row, by the epochs of the members that were measured. Of more than ``_MOST``, the first ones."""
    measured = ((epoch, one) for epoch, one in row.items() if any(one))
    cells = [_CELL.pack(epoch, *map(_sane, one)) for epoch, one in islice(measured, _MOST)]
    return bytes([_VERSION]) + b"".join(cells)


def unpack_measurements(data: bytes) -> dict[int, Measurement]:
    """The row; nothing of one that is not whole, too long, or of another version."""
    if data[:1] != bytes([_VERSION]) or len(data) > LONGEST_ROW or (len(data) - 1) % _CELL.size:
        return {}
    cells = ((epoch, Measurement(_sane(rate), _sane(trip))) for epoch, rate, trip in _CELL.iter_unpack(data[1:]))
    return {epoch: one for epoch, one in cells if any(one)}


def _sane(value: float) -> float:
    return value if math.isfinite(value) and 0 < value < _LARGEST else 0.0
