"""Records of benchmark figures: what was measured, compared with what, where and by which command.

Speed is given as a ratio within one run, because machines are shared and noisy: contestants take turns, round by round,
and the ratio is the median of the rounds' ratios.

A round that did not do what it measures, for example moved no bytes, is not a fast one: the figure is then recorded as
not exercised, which misses its target whatever its value, and its reason says what was not done.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["BenchRecord", "Contestant", "Rounds", "Sample", "compare", "figure", "machine"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one contestant at one task."""

    seconds: float
    cpu_seconds: float
    nbytes: int = 0

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_seconds / (self.nbytes / 1e9) if self.nbytes else math.inf


Contestant = Callable[[], Mapping[str, Sample]]
"""Runs one round and returns a sample for each task ("store", "load", ...)."""

Rounds = dict[str, dict[str, list[Sample]]]
"""Samples by contestant and task."""


class BenchRecord(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A figure as it is kept in ``bench/results``."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    ours: float
    spread: tuple[float, float]
    """Lowest and highest of all rounds."""
    peers: dict[str, float] = {}
    limit: float | None = None
    """The hardware's value in the same run."""
    ratio: float | None = None
    """kvtide's value relative to ``against``, such that more is better whatever ``better`` is."""
    against: str = ""
    bar: float | None = None
    """The target for ``ratio`` (or, without a ratio, for ``ours``)."""
    met: bool | None = None
    exercised: bool = True
    """False if a round did not do what is measured, for example moved no bytes. Then ``met`` is False."""
    reason: str = ""
    """Why the target is missed, where the measurement itself knows it; always if nothing was exercised."""
    rounds: int
    command: str
    machine: str
    note: str = ""

    def __post_init__(self) -> None:
        if not self.exercised and (self.met is not False or not self.reason):
            raise ValueError(f"{self.name} was not exercised: met must be false, and reason must say what was not done")

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (folder / f"{self.name}.json").write_bytes(text + b"\n")


def machine() -> str:
    """A description of this machine in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = platform.release().split("-")[0]
    return (
        f"{os.cpu_count()} cores {platform.machine()}, {memory:.0f} GiB, Linux {kernel}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def timed(work: Callable[..., object], *arguments: object, nbytes: int = 0) -> Sample:
    """A sample of ``work``: wall time, and CPU time of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work(*arguments)
    return Sample(time.perf_counter() - wall, time.process_time() - cpu, nbytes)


def compare(
    contestants: Mapping[str, Contestant], rounds: int, progress: Callable[[str], None], warm_up: int = 1
) -> Rounds:
    """Run the contestants in turns. The first ``warm_up`` rounds do not count."""
    samples: Rounds = {name: {} for name in contestants}
    for i in range(rounds + warm_up):
        for name, contestant in contestants.items():
            progress(f"{name}, {'warm-up' if i < warm_up else f'round {i - warm_up + 1} of {rounds}'}")
            for task, sample in contestant().items():
                if i >= warm_up:
                    samples[name].setdefault(task, []).append(sample)
    return samples


def figure(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    command: str,
    better: Literal["higher", "lower"],
    peers: Mapping[str, Sequence[float]] | None = None,
    limit: Sequence[float] | None = None,
    against: str = "",
    reference: Sequence[float] | None = None,
    bar: float | None = None,
    note: str = "",
    moved: Sequence[int] | None = None,
    least: int = 1,
    verb: Literal["moved", "loaded"] = "moved",
) -> BenchRecord:
    """A record from rounds. ``reference`` has the values, round by round, that ``ratio`` is relative to; ``bar`` is the
    target.

    Without a reference the target is for the figure itself. ``moved`` has the bytes that each round moved, if the
    values do not say it; a round that moved fewer than ``least`` did not do what is measured. ``verb`` names in the
    reason what it should have done.
    """
    median = statistics.median(values)
    ratio = None
    if reference is not None:
        pairs = list(zip(values, reference, strict=True))
        ratio = statistics.median(v / r if better == "higher" else r / v for v, r in pairs)
    met = None
    if bar is not None:
        reached = ratio if ratio is not None else median
        met = reached >= bar if ratio is not None or better == "higher" else reached <= bar
    if moved is None:  # a speed of zero, or an infinite cost of a byte, is that of no bytes
        moved = [1 if math.isfinite(v) and (v > 0 or not unit.endswith("B/s")) else 0 for v in values]
    reason = ""
    if idle := [i for i, nbytes in enumerate(moved, 1) if nbytes < least]:
        met = False
        rounds = ", ".join(map(str, idle))
        what = "nothing" if not any(moved[i - 1] for i in idle) else f"less than {least / 1e9:.2f} GB"
        reason = f"{what} was {verb} in round {rounds} of {len(values)}"
        note = f"not measured: {reason}" + (f"; {note}" if note else "")
        values = [v if math.isfinite(v) else 0.0 for v in values]  # JSON has no infinity
        median = statistics.median(values)
    return BenchRecord(
        name=name,
        unit=unit,
        better=better,
        ours=_short(median),
        spread=(_short(min(values)), _short(max(values))),
        peers={k: _short(statistics.median(v)) for k, v in (peers or {}).items()},
        limit=None if limit is None else _short(statistics.median(limit)),
        ratio=None if ratio is None else _short(ratio),
        against=against,
        bar=bar,
        met=met,
        exercised=not idle,
        reason=reason,
        rounds=len(values),
        command=command,
        machine=machine(),
        note=note,
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
