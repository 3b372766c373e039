"""Which changes of a running node's settings would bring most, from replays of its own recorded traffic.

Today's settings are replayed first, of as many requests as leave time for at least three candidates; then the
candidates, one of each kind before a second one of any, as long as there is time. What is shown is only what stands out
of the noise, the best of each kind, three at most, and all of them together. If nothing does, the reason is said.
"""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtide import config as configuration
from kvtide.doctor import host
from kvtide.doctor.candidates import Candidate, ChangeKind, HostSpace, Today, candidates, config_of, today_of
from kvtide.doctor.disk import filesystem
from kvtide.doctor.gains import LEAST_SHARE, Gain, Traffic
from kvtide.errors import ConfigError, TraceError
from kvtide.formatting import size
from kvtide.plan.prefill import Prefill, PrefillCost, cost_of
from kvtide.replay.lru_curve import lru_curve
from kvtide.replay.outcome import Outcome, outcome
from kvtide.replay.run import slot_of
from kvtide.replay.speeds import measure
from kvtide.replay.trace import Trace, chains, read
from kvtide.store.node_statistics import Status

__all__ = ["Advice", "AdviceRequest", "AdviceResult", "Change", "Progress", "advise"]

LEAST_REQUESTS = 200
"""Requests that a recording must have."""
_MOST_BLOCKS = 300_000
"""Blocks of the requests that are replayed, the last ones of the recording."""
_WARM = 0.4
"""The part of the requests that only fill the tiers."""
_SHOWN = 3
_FIRST = 0.1
"""The part of the time left that the first replay may take; if it takes longer, fewer requests are replayed. A
candidate with another tier takes twice as long, and all changes together are replayed too."""
_APART = 0.1
"""A difference between the hit rates that the node measured and that the replay finds from which it is reported."""
_DAY = 86400.0

Progress = Callable[[str], Callable[[int], None]]


class AdviceResult(enum.Enum):
    CHANGES = "changes"
    NOTHING = "nothing"
    """No candidate brings anything that stands out of the noise."""
    NOT_RECORDED = "not recorded"
    TOO_FEW = "too few requests"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change, with what it brings and costs."""

    kind: ChangeKind
    settings: list[tuple[str, str, str]]
    """Name, value today, and value to set."""
    points: float
    """Of 100 tokens that engines lacked, how many more are found."""
    points_error: float
    """One standard error."""
    seconds_per_hour: float | None
    """Seconds of prefill saved in an hour; None if the cost of computing is not known."""
    seconds_error: float | None
    memory: int
    """More bytes of memory."""
    disk: int
    written_per_day: float
    """More bytes written to the disk in a day; negative: fewer."""
    matters: bool
    note: str = ""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    result: AdviceResult
    reason: str
    """Why there are no changes; empty if there are."""
    do: str = ""
    """What to do about that."""
    recording: str = ""
    requests: int = 0
    """Requests that were replayed; the first of them only fill the tiers."""
    seconds: float = 0.0
    """How long the counted requests took to arrive."""
    tokens: int = 0
    """Tokens of the counted requests that engines lacked."""
    hit_rate: float | None = None
    """The share of them that today's settings find."""
    unlimited: float | None = None
    """The share that a cache finds from which nothing is ever evicted."""
    prefill: PrefillCost | None = None
    read_speed: float | None = None
    changes: list[Change] = []
    """The best, at most three, one of each kind."""
    together: Change | None = None
    """All of them at once."""
    tried: list[Change] = []
    """Every change that was replayed."""
    not_tried: list[str] = []
    """Settings that were not tried, because the time was up."""
    notes: list[str] = []
    """What limits how sure this is."""


@dataclass(frozen=True, kw_only=True)
class AdviceRequest:
    """What the caller asks for."""

    record: Path | None = None
    """The recording; None: the file that the node writes."""
    here: bool = True
    """Whether the node is on this host."""
    prefill: Prefill = 0.0
    """The cost of computing; 0: what the node's engines say."""
    disk: Path | None = None
    """A folder on the disk that a tier is to use; None: where the node has one."""
    seconds: float = 60.0
    """How long to work, about."""
    how: str = "kvtide node --record FILE"
    """The command that records at this node."""


@dataclass
class _Case:
    """All that the replays share."""

    trace: Trace
    today: Today
    traffic: Traffic
    before: Outcome
    took: float
    """Seconds for one replay."""
    disk: str
    """How the speed of a disk is known that the node does not have yet."""
    notes: list[str] = field(default_factory=list)


def advise(status: Status, wanted: AdviceRequest, progress: Progress = lambda _: lambda _: None) -> Advice:
    """Replay a node's recorded traffic with changed settings. Raises ConfigError or TraceError."""
    if not status.node.settings:
        raise ConfigError(
            f"the node {status.node.path or 'there'} does not say which settings it uses: ask as its administrator (a "
            "user with the role admin, or with a token or certificate), and upgrade a node of an older version"
        )
    recorder = status.store.recorder
    if wanted.record is None and recorder is None:
        return Advice(
            result=AdviceResult.NOT_RECORDED,
            reason="no requests are recorded at this node, so nothing can be computed for its traffic",
            do=f"record for an hour or a day: restart it with {wanted.how} (or set record.path), and ask again",
        )
    path = _file(status, wanted)
    end = time.monotonic() + wanted.seconds
    trace, notes = _read(path, status, wanted, progress)
    about = {"recording": str(path), "requests": len(trace.blocks)}
    if (found := _too_few(trace, path)) is not None:
        return msgspec.structs.replace(found, notes=notes, **about)
    case = _begin(trace, status, wanted, end, progress)
    case.notes[:0] = notes
    changes, left = _try(case, status, wanted, end, progress)
    return msgspec.structs.replace(_judge(case, status, changes, left, progress), recording=str(path))


def _file(status: Status, wanted: AdviceRequest) -> Path:
    if wanted.record is not None:
        return wanted.record
    assert status.store.recorder is not None
    path = status.store.recorder.path
    if not path:
        raise ConfigError("this node does not say where its recording is: give it with --record FILE")
    if not wanted.here:
        raise ConfigError(f"the recording is {path} on the node's host: copy it here, and give it with --record FILE")
    return Path(path)


def _read(path: Path, status: Status, wanted: AdviceRequest, progress: Progress) -> tuple[Trace, list[str]]:
    reader = read(path, progress("reading"), None, growing=True, most=_MOST_BLOCKS)
    try:
        trace = chains(reader)
    except TraceError:
        if not path.is_file() or path.stat().st_size:
            raise
        trace = chains([])  # a node creates the file when it starts, and writes the header with the first requests
    trace = trace._replace(block_tokens=reader.block_tokens, block_bytes=reader.block_bytes)
    if trace.blocks and (trace.block_bytes is None or trace.block_tokens is None):
        raise TraceError(f"{path} is not a recording of kvtide: it does not say how many bytes and tokens a block has")
    notes = []
    if reader.passed_over:
        total = reader.passed_over + len(trace.blocks)
        notes.append(f"only the last {len(trace.blocks):,} of {total:,} requests are replayed, to end in time")
    recorder = status.store.recorder
    if recorder is not None and wanted.record is None:
        if lost := sum(recorder.dropped.values()):
            share = lost / (lost + recorder.requests)
            notes.append(f"{lost:,} requests ({share:.0%}) are not in the recording; hits on their blocks are not seen")
        if not recorder.active:
            notes.append("the recording has ended, so later traffic is not in it")
    return trace, notes


def _too_few(trace: Trace, path: Path) -> Advice | None:
    count = len(trace.blocks)
    if count >= LEAST_REQUESTS:
        return None
    return Advice(
        result=AdviceResult.TOO_FEW,
        reason=f"{path} has {count:,} requests with a full block; from fewer than {LEAST_REQUESTS:,} nothing reliable "
        "can be said",
        do="let the node record longer, an hour or a day of usual traffic, and ask again",
    )


def _begin(trace: Trace, status: Status, wanted: AdviceRequest, end: float, progress: Progress) -> _Case:
    """Replay today's settings; of fewer requests, if that takes too long."""
    assert trace.block_bytes is not None
    today = today_of(status.node.settings, status.store, slot_of(trace.block_bytes))
    notes: list[str] = []
    nothing, name = Candidate(ChangeKind.DRAM_SIZE), "today's settings"
    advance = progress(name)
    reached = [0]

    def noted(number: int) -> None:
        reached[0] = number
        advance(number)

    began = time.monotonic()
    before = _replayed(trace, today, nothing, noted, began + _FIRST * max(0.0, end - began))
    if before is None:
        count = min(len(trace.blocks), max(LEAST_REQUESTS, reached[0]))
        notes.append(f"only the last {count:,} of {len(trace.blocks):,} requests are replayed, to end in time")
        trace = trace.part(len(trace.blocks) - count)
        began = time.monotonic()
        before = _replayed(trace, today, nothing, progress(name), None)
        assert before is not None
    cost = cost_of(wanted.prefill)
    if cost is None and status.store.recorder is not None:
        cost = status.store.recorder.prefill
    if cost is None:
        cost = cost_of(today.config.plan.prefill_tokens_per_second)
    assert trace.block_bytes is not None
    traffic = Traffic(trace, int(len(trace.blocks) * _WARM), trace.block_bytes, cost, _read_speed(status, wanted))
    took = time.monotonic() - began
    folder = _new_disk(status, wanted)
    how = "the time of reading from that disk is not deducted: measure it with --disk FOLDER"
    if folder is not None and traffic.read_speed is not None:
        how = f"on a disk that reads {size(traffic.read_speed)} a second, as that of {folder}"
        how += "" if wanted.disk is not None else " (--disk FOLDER measures another)"
    return _Case(trace, today, traffic, before, took, how, notes)


def _read_speed(status: Status, wanted: AdviceRequest) -> float | None:
    """Bytes per second of the colder tier, today's or a new one's."""
    lane = status.store.lanes.get("nvme")
    if lane is not None and (lane.read_speed.measured or lane.read_speed.remembered):
        return lane.read_speed.bytes_per_second
    folder = _new_disk(status, wanted)
    return None if folder is None else measure(folder).disk_read


def _new_disk(status: Status, wanted: AdviceRequest) -> Path | None:
    """A folder on the disk of a tier: where it is, where the caller says, or the temporary folder if that is on a
    disk."""
    if not wanted.here:
        return wanted.disk
    today = Path(str(status.node.settings.get("nvme.path", "")))
    if wanted.disk is not None or today.parts:
        return wanted.disk or (today if os.access(today, os.W_OK | os.X_OK) else None)
    temporary = Path(tempfile.gettempdir())
    return None if filesystem(temporary) in ("tmpfs", "ramfs") else temporary


def _replayed(
    trace: Trace, today: Today, change: Candidate, advance: Callable[[int], None], end: float | None
) -> Outcome | None:
    """None if it was not done at ``end``."""
    assert trace.block_bytes is not None

    def goes_on(number: int) -> bool:
        advance(number)
        return end is None or bool(number % 16) or time.monotonic() < end

    changed = config_of({**today.settings, **change.settings})
    conditions = today.conditions._replace(**change.conditions)
    start = int(len(trace.blocks) * _WARM)
    return outcome(trace, changed, trace.block_bytes, start, conditions, today.tags, goes_on)


def _try(
    case: _Case, status: Status, wanted: AdviceRequest, end: float, progress: Progress
) -> tuple[list[tuple[Candidate, Change]], list[Candidate]]:
    """Replay the candidates, as long as there is time. Returns also those for which there was none."""
    curve = lru_curve(case.trace, case.traffic.start, progress("sizes"))
    space = _space(status, wanted)
    every = candidates(case.today, curve, space, status.store)
    hopeful = _hopeful(case)
    wanted_changes = _one_of_each_kind_first([one for one in every if one.kind in hopeful])
    tried: list[tuple[Candidate, Change]] = []
    for number, candidate in enumerate(wanted_changes):
        if time.monotonic() >= end:
            return tried, wanted_changes[number:]
        found = _judged(case, candidate, end + case.took, progress)
        if found is None:
            return tried, wanted_changes[number:]
        tried.append((candidate, found))
    return tried, []


def _one_of_each_kind_first(every: list[Candidate]) -> list[Candidate]:
    """In the same order otherwise: if the time is short, different ideas tell more than several sizes of one tier."""
    seen = Counter[ChangeKind]()
    turns = []
    for candidate in every:
        turns.append(seen[candidate.kind])
        seen[candidate.kind] += 1
    return [candidate for _, candidate in sorted(zip(turns, every, strict=True), key=lambda pair: pair[0])]


def _hopeful(case: _Case) -> set[ChangeKind]:
    """The kinds of changes that can bring something at all."""
    kinds = set(ChangeKind)
    if case.traffic.unlimited - case.traffic.hit_rate(case.before) < LEAST_SHARE:
        return {ChangeKind.DRAM_SIZE} if case.today.config.nvme.path else set()  # what is found may be found sooner
    if not case.before.evicted:
        kinds -= {ChangeKind.DRAM_SIZE, ChangeKind.NVME_SIZE, ChangeKind.DRAM_POLICY, ChangeKind.NVME_POLICY}
        kinds -= {ChangeKind.NVME_STORE, ChangeKind.WRITE_BUDGET, ChangeKind.QUEUE}
    return kinds


def _judged(case: _Case, candidate: Candidate, end: float | None, progress: Progress) -> Change | None:
    """What a candidate brings; None if the time is up."""
    named = _names(case.today, candidate)
    name = ", ".join(f"{setting} = {to}" for setting, _, to in named)
    after = _replayed(case.trace, case.today, candidate, progress(name), end)
    if after is None:
        return None
    gain: Gain = case.traffic.gain(case.before, after)
    note = candidate.note
    if "nvme.path" in candidate.settings:
        note = "; ".join(filter(None, (note, case.disk)))
    return Change(
        kind=candidate.kind,
        settings=named,
        points=gain.points,
        points_error=gain.points_error,
        seconds_per_hour=gain.seconds_per_hour,
        seconds_error=gain.seconds_error,
        memory=candidate.memory,
        disk=candidate.disk,
        written_per_day=gain.written_per_day,
        matters=gain.matters,
        note=note,
    )


def _names(today: Today, candidate: Candidate) -> list[tuple[str, str, str]]:
    """Name, value today and value to set, of all settings that a candidate changes."""
    before, after = (_texts({**today.settings, **changed}) for changed in ({}, candidate.settings))
    if "nvme.path" in candidate.settings:  # the other settings of a tier that is turned off mean nothing
        before = {name: "" if name.startswith("nvme.") else text for name, text in before.items()}
    found = [(name, before[name], after[name]) for name in candidate.settings]
    return [*found, candidate.named] if candidate.named is not None else found


def _texts(settings: Mapping[str, configuration.Value]) -> dict[str, str]:
    known = configuration.explain(os.devnull, {})
    names = {setting.name for setting in known}
    overrides = {name: value for name, value in settings.items() if name in names}
    return {setting.name: setting.text for setting in configuration.explain(os.devnull, {}, overrides)}


def _space(status: Status, wanted: AdviceRequest) -> HostSpace:
    if not wanted.here:
        return HostSpace()
    tiers = status.store.tiers
    settings = status.node.settings
    dram = int(settings.get("dram.budget", 0)) - tiers["dram"].bytes_taken if "dram" in tiers else 0
    memory = max(0, host.available()[0] - max(0, dram))  # what the node may still take of its budget is not free
    folder = _new_disk(status, wanted)
    if folder is None or not folder.is_dir():
        return HostSpace(memory)
    free = shutil.disk_usage(folder).free
    if "nvme" in tiers:
        free -= max(0, int(settings.get("nvme.budget", 0)) - tiers["nvme"].bytes_taken)
    return HostSpace(memory, max(0, free))


def _judge(
    case: _Case,
    status: Status,
    tried: list[tuple[Candidate, Change]],
    left: list[Candidate],
    progress: Progress,
) -> Advice:
    ranked = sorted(tried, key=lambda one: -_worth(one[1]))
    best: dict[ChangeKind, tuple[Candidate, Change]] = {}
    for candidate, change in ranked:
        if change.matters:
            best.setdefault(change.kind, (candidate, change))
    shown = list(best.values())[:_SHOWN]
    traffic = case.traffic
    hit_rate = traffic.hit_rate(case.before)
    together = _together(case, [candidate for candidate, _ in shown], progress) if len(shown) > 1 else None
    reason, do = ("", "")
    if not shown and left:
        reason = f"none of the {len(tried)} changes for which there was time brings anything"
        do = "give more time: --time 10min"
    elif not shown:
        reason, do = _nothing(case, status, hit_rate)
    return Advice(
        result=AdviceResult.CHANGES if shown else AdviceResult.NOTHING,
        reason=reason,
        do=do,
        requests=len(case.trace.blocks),
        seconds=traffic.seconds,
        tokens=traffic.asked,
        hit_rate=hit_rate,
        unlimited=traffic.unlimited,
        prefill=traffic.cost,
        read_speed=traffic.read_speed,
        changes=[change for _, change in shown],
        together=together,
        tried=[change for _, change in tried],
        not_tried=[", ".join(f"{name} = {to}" for name, _, to in _names(case.today, one)) for one in left],
        notes=[*case.notes, *_doubts(case, status, hit_rate)],
    )


def _worth(change: Change) -> float:
    return change.points if change.seconds_per_hour is None else change.seconds_per_hour


def _together(case: _Case, chosen: list[Candidate], progress: Progress) -> Change | None:
    settings = {name: value for one in chosen for name, value in one.settings.items()}
    conditions = {name: value for one in chosen for name, value in one.conditions.items()}
    memory, disk = sum(one.memory for one in chosen), sum(one.disk for one in chosen)
    both = Candidate(chosen[0].kind, settings, conditions, memory=memory, disk=disk)
    try:
        return _judged(case, both, None, progress)
    except ConfigError:  # each is possible, and all together are not
        return None


def _nothing(case: _Case, status: Status, hit_rate: float) -> tuple[str, str]:
    """Why no change brings anything, and what to do."""
    left = 100 * (case.traffic.unlimited - hit_rate)
    if not case.before.evicted and any(tier.bytes_used > 0.9 * tier.budget for tier in status.store.tiers.values()):
        return (
            "the tiers of this node are full, but the recording is too short to fill them, so that nothing left them "
            "in the replay",
            "let the node record longer, and ask again",
        )
    if left < 100 * LEAST_SHARE:
        return (
            f"today's settings find {hit_rate:.1%} of the tokens, and the best possible cache {left:.1f} points more: "
            "the others are new",
            "",
        )
    return (
        f"today's settings find {hit_rate:.1%} of the tokens and a cache without limits {left:.1f} points more, but no "
        "change that was tried brings a part of it that stands out of the noise",
        "",
    )


def _doubts(case: _Case, status: Status, hit_rate: float) -> Iterator[str]:
    traffic, tokens = case.traffic, status.store.planner.tokens
    if traffic.cost is None:
        yield "how fast the engines compute is not known: give --prefill-tokens-per-second for the time that is saved"
    if case.today.config.nvme.path and traffic.read_speed is None:
        yield "the disk's speed was not measured yet, so that the time of reading is not deducted"
    asked = sum(tokens.values())
    measured = 1 - tokens.get("missed", 0) / asked if asked else hit_rate
    if abs(measured - hit_rate) > _APART:
        yield (
            f"the node itself has found {measured:.0%} of the tokens since its start, the replay finds {hit_rate:.0%} "
            "of later ones: pins, priorities, storage of several hosts and other models are not replayed"
        )
    for name in (name for name in ("files", "objects", "valkey", "mooncake") if name in status.store.tiers):
        yield (
            f"shared storage is not tried: no change of {name}.budget or {name}.store is replayed, because what other "
            "hosts store there and what it evicts for them is not in this node's recording"
        )
        if (found := tokens.get(name, 0)) and asked:
            yield f"{found / asked:.0%} of the tokens came from {name}, which is not replayed: gains may be smaller"
    if case.today.conditions.second_touch:
        yield "engines store only what is used again, as far as the node can see: so it is replayed"
