"""What each node of a cluster has measured of each other one, as lines that fit into a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["MatrixCell", "matrix_lines"]

_NOT_MEASURED, _ITSELF = "-", "."
_CELL = 4
"""Letters of the widest value."""
_LONGEST = 99.0
"""Seconds of a round trip above which no number is shown."""


class MatrixCell(NamedTuple):
    """What one node has measured of another. 0: it has not."""

    reader: int
    """Its number as a member; 0: the node that was asked, which is no member now."""
    source: int
    bytes_per_second: float
    round_trip: float


def matrix_lines(numbers: Sequence[int], cells: Iterable[MatrixCell], width: int) -> list[str]:
    """A matrix of speeds and one of round trips, for the members with these numbers. If there are more columns than
    fit, each matrix is in several parts, without the readers that have measured nothing there."""
    known = [cell for cell in cells if cell.bytes_per_second or cell.round_trip]
    measured = {cell.reader for cell in known}
    readers = [*([0] if 0 in measured else []), *numbers]
    lines: list[str] = []
    for title, values in (
        ("bytes/s", {(one.reader, one.source): _speed(one.bytes_per_second) for one in known}),
        ("ms of a round trip", {(one.reader, one.source): _milliseconds(one.round_trip) for one in known}),
    ):
        lines += [*_matrix(title, readers, numbers, values, width), ""]
    if silent := [number for number in numbers if number not in measured]:
        lines.append(f"nothing is known from {_joined(silent)}: nothing measured yet, or an older version")
    return lines if silent else lines[:-1]


def _matrix(
    title: str, readers: Sequence[int], sources: Sequence[int], values: Mapping[tuple[int, int], str], width: int
) -> list[str]:
    """``values`` by reader and source."""
    label = max(4, *(len(_name(number)) for number in readers))
    cell = 1 + max(_CELL, *(len(str(number)) for number in sources))
    fitting = max(1, (width - label) // cell)
    lines = []
    for start in range(0, len(sources), fitting):
        some = sources[start : start + fitting]
        lines.append(f"{title}: each row is a reader, each column whom it reads from")
        lines.append(" " * label + "".join(f"{number:>{cell}}" for number in some))
        for reader in readers:
            if len(sources) <= fitting or any((reader, source) in values for source in some):
                row = [_ITSELF if reader == one else values.get((reader, one), _NOT_MEASURED) for one in some]
                lines.append(f"{_name(reader):>{label}}" + "".join(f"{value:>{cell}}" for value in row))
    return lines


def _name(number: int) -> str:
    return str(number) if number else "here"


def _speed(rate: float) -> str:
    """Bytes per second in at most four letters, in powers of 1024: ``850M``, ``1.2G``."""
    if not rate:
        return _NOT_MEASURED
    for unit in ("B", "K", "M", "G", "T"):
        if rate < 999.5:
            return f"{rate:.1f}{unit}" if rate < 9.95 and unit != "B" else f"{rate:.0f}{unit}"
        rate /= 1024
    return "fast"


def _milliseconds(seconds: float) -> str:
    if not seconds:
        return _NOT_MEASURED
    if seconds > _LONGEST:
        return "long"
    value = 1000 * seconds
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _joined(numbers: Sequence[int]) -> str:
    """Numbers of members, with a range for those one after another: ``1, 4 to 9``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in parts)
