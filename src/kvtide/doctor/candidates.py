"""Changes of a node's settings that are worth trying on its recorded traffic: few, and each within what the host has.

Which ones there are follows from the settings in force and from what the node has counted: a larger tier, a first
disk, other policies, a write budget that is lifted, a queue that loses nothing, a longer life of blocks, more for a
tenant with a limit. What each brings is not judged here.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvtide import config as configuration
from kvtide.config import Config, MiB, Value
from kvtide.counts import TierCount
from kvtide.errors import ConfigError
from kvtide.formatting import size
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.replay.lru_curve import LruCurve
from kvtide.replay.simulation import Conditions
from kvtide.store.reserved_shares import divide
from kvtide.store.statistics import Statistics
from kvtide.units import format_size, parse_shares

__all__ = ["Candidate", "ChangeKind", "HostSpace", "Today", "candidates", "config_of", "today_of"]

_BEND = 0.9
"""The curve bends where so much of what a larger tier can find at all is found."""
_MORE = 1.1
"""A size that is less than this times today's is no change."""
_SPARE = 0.9
"""The part of free memory, or of free disk space, that a larger tier may take."""
_LOST = 0.01
"""The share of writes lost from which a queue is too small."""
_FEW = 0.6
"""If fewer blocks are stored than this share of those that were missed, engines store only what is used again: each of
these is missed twice at least."""
_LEAST_DISK = 16 * MiB
_TENANTS = 3
"""Tenants with a limit that are looked at, those with the most bytes first."""
_LONGER = 4
"""How many times as long, or as large, a candidate is."""


class ChangeKind(enum.Enum):
    DRAM_SIZE = "dram size"
    NVME_SIZE = "nvme size"
    NVME_STORE = "nvme store"
    DRAM_POLICY = "dram policy"
    NVME_POLICY = "nvme policy"
    WRITE_BUDGET = "write budget"
    QUEUE = "queue"
    ENGINE_STORE = "engine store"
    EXPIRY = "expiry"
    QUOTA = "quota"
    RESERVED = "reserved share"


@dataclass(frozen=True)
class HostSpace:
    """What the node's host has left; None: not known, because it is another host."""

    memory: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Today:
    """The settings in force, and what else decides what is kept."""

    settings: Mapping[str, Value]
    config: Config
    conditions: Conditions
    tags: Mapping[str, bytes]
    """The tags of tenants with quotas or reserved shares, by their names in the recording."""
    slot: int
    """Bytes of a tier's budget that a block takes."""


@dataclass(frozen=True)
class Candidate:
    kind: ChangeKind
    settings: Mapping[str, Value] = field(default_factory=dict)
    """The settings that change, by dotted name."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``Conditions`` that change."""
    named: tuple[str, str, str] | None = None
    """Name, value before and value after, if it is no setting of the node."""
    memory: int = 0
    """More bytes of DRAM."""
    disk: int = 0
    note: str = ""


def config_of(settings: Mapping[str, Value]) -> Config:
    """The configuration with these settings alone. Raises ConfigError."""
    known = {setting.name for setting in configuration.explain(os.devnull, {})}
    return configuration.read(os.devnull, {}, {name: value for name, value in settings.items() if name in known})


def today_of(reported: Mapping[str, Value], store: Statistics, slot: int) -> Today:
    """What a node's status says. Raises ConfigError if this kvtide does not understand it."""
    # Shared storage is not replayed; of it only whether there is any is reported.
    settings = {name: value for name, value in reported.items() if name.partition(".")[0] in ("dram", "nvme", "plan")}
    tags = {tenant.recorded_as: bytes.fromhex(tag) for tag, tenant in store.tenants.items()}
    return Today(settings, config_of(settings), _conditions(store), tags, slot)


def _conditions(store: Statistics) -> Conditions:
    counts, planned = store.counts, store.planner.blocks
    lost = counts.get(TierCount.STORE_QUEUE_FULL.of("nvme"), 0)
    offered = lost + counts.get(TierCount.BLOCKS_WRITTEN.of("nvme"), 0)
    missed, stored = planned.get("missed", 0), counts.get("blocks stored", 0)
    return Conditions(
        ttl=store.recorder.ttl if store.recorder is not None else None,
        refused=lost / offered if offered and lost / offered >= _LOST else 0.0,
        second_touch=bool(missed and stored < _FEW * missed),
    )


def candidates(today: Today, curve: LruCurve, space: HostSpace, store: Statistics) -> Iterator[Candidate]:
    """The changes to try, those that usually bring most first."""
    every = (
        _dram(today, curve, space),
        _nvme(today, curve, space),
        _policies(today),
        _losses(today),
        _tenants(today, store),
    )
    yield from (one for one in chain.from_iterable(every) if _possible(today, one.settings))


def _rounded(nbytes: float) -> int:
    """A size that is easy to read and not smaller: a multiple of a sixteenth of it."""
    step = max(MiB, 1 << max(0, int(nbytes).bit_length() - 4))
    return -(-int(nbytes) // step) * step


def _sizes(today: Today, now: int, curve: LruCurve, most: int | None) -> Iterator[tuple[int, str]]:
    """Larger sizes of a tier with ``now`` bytes: twice as large, and where the curve bends; at most ``most`` bytes."""
    bend = _rounded(curve.bend(now // today.slot, _BEND) * today.slot)
    wanted = {2 * now: "", bend: "where larger sizes bring little more"}
    if most is not None and bend > most and 2 * now > most:
        least = most // MiB * MiB
        wanted[least] = f"all that this host has left; the curve becomes flat at {size(bend)}"
    elif most is not None and bend > most:
        wanted[2 * now] = f"the curve becomes flat at {size(bend)}, and this host has {size(most)} for it"
    for nbytes, note in sorted(wanted.items()):
        if nbytes >= _MORE * now and (most is None or nbytes <= most):
            yield nbytes, note


def _most(now: int, free: int | None) -> int | None:
    return None if free is None else now + int(_SPARE * max(0, free))


def _dram(today: Today, curve: LruCurve, space: HostSpace) -> Iterator[Candidate]:
    now = today.config.dram.budget
    for nbytes, note in _sizes(today, now, curve, _most(now, space.memory)):
        yield Candidate(ChangeKind.DRAM_SIZE, {"dram.budget": nbytes}, memory=nbytes - now, note=note)


def _nvme(today: Today, curve: LruCurve, space: HostSpace) -> Iterator[Candidate]:
    nvme, dram = today.config.nvme, today.config.dram.budget
    if nvme.path:
        for nbytes, note in _sizes(today, nvme.budget, curve, _most(nvme.budget, space.disk)):
            yield Candidate(ChangeKind.NVME_SIZE, {"nvme.budget": nbytes}, disk=nbytes - nvme.budget, note=note)
        for store in ("ghost", "through", "eviction", "second-touch"):
            if store != nvme.store:
                yield Candidate(ChangeKind.NVME_STORE, {"nvme.store": store})
        return
    wanted = _rounded(max(_LEAST_DISK, _LONGER * dram, curve.bend(dram // today.slot, _BEND) * today.slot))
    most = None if space.disk is None else int(_SPARE * space.disk) // MiB * MiB
    nbytes = wanted if most is None else min(wanted, most)
    if nbytes >= _MORE * dram:
        less = f"{size(wanted)} would be better, and the disk has less free" if nbytes < wanted else ""
        settings: dict[str, Value] = {"nvme.path": NEW_FOLDER, "nvme.budget": nbytes}
        yield Candidate(ChangeKind.NVME_SIZE, settings, disk=nbytes, note=less)


NEW_FOLDER = "a folder on a disk"
"""The path of a tier that does not exist yet."""


def _policies(today: Today) -> Iterator[Candidate]:
    for kind, tier in ((ChangeKind.DRAM_POLICY, today.config.dram), (ChangeKind.NVME_POLICY, today.config.nvme)):
        if kind is ChangeKind.DRAM_POLICY or today.config.nvme.path:
            for policy in ("auto", "lru", "reuse"):
                if policy != tier.policy:
                    yield Candidate(kind, {f"{kind.value.partition(' ')[0]}.policy": policy})


def _losses(today: Today) -> Iterator[Candidate]:
    """Limits by which blocks are lost that were stored, or not stored at all."""
    nvme, conditions = today.config.nvme, today.conditions
    if nvme.path and (nvme.write_limit or nvme.drive_writes_per_day):
        limits: dict[str, Value] = {"nvme.write_limit": 0, "nvme.drive_writes_per_day": 0.0}
        changed = {name: none for name, none in limits.items() if today.settings.get(name)}
        yield Candidate(ChangeKind.WRITE_BUDGET, changed)
    if nvme.path and conditions.refused:
        yield Candidate(
            ChangeKind.QUEUE,
            {"nvme.queue": _LONGER * nvme.queue},
            {"refused": 0.0},
            memory=(_LONGER - 1) * nvme.queue,
            note=f"if the disk keeps up on average: {conditions.refused:.1%} of the writes were lost so far",
        )
    now, other = ("second-touch", "through") if conditions.second_touch else ("through", "second-touch")
    yield Candidate(
        ChangeKind.ENGINE_STORE,
        conditions={"second_touch": not conditions.second_touch},
        named=("engine.store", now, other),
        note="a setting of the engines, not of the node",
    )
    if (ttl := conditions.ttl) is not None:
        for longer in (_LONGER * ttl, None):
            text = "none" if longer is None else f"{longer:g}s"
            yield Candidate(
                ChangeKind.EXPIRY,
                conditions={"ttl": longer},
                named=("ttl", f"{ttl:g}s", text),
                note="given by the callers that store blocks, not a setting of the node",
            )


def _tenants(today: Today, store: Statistics) -> Iterator[Candidate]:
    """More for a tenant with a limit: twice its quota, twice its reserved share, in all tiers where it has one."""
    limited = sorted(store.tenants, key=lambda tag: -sum(store.tenants[tag].bytes_used.values()))[:_TENANTS]
    for kind, name in ((ChangeKind.QUOTA, "quotas"), (ChangeKind.RESERVED, "reserved")):
        for tag in limited:
            changed: dict[str, Value] = {}
            for tier, section in (("dram", today.config.dram), ("nvme", today.config.nvme)):
                shares = parse_shares(getattr(section, name), section.budget)
                own = next((key for key in shares if _is(key, tag)), None)
                if own is not None:
                    shares[own] = min(2 * shares[own], section.budget)
                    changed[f"{tier}.{name}"] = " ".join(
                        f"{key}:{format_size(n).replace(' ', '')}" for key, n in shares.items()
                    )
            if changed:
                yield Candidate(kind, changed, note=f"more for tenant {tag}; the others then have less")


def _is(name: str, tag: str) -> bool:
    return (DEFAULT_TENANT.tag.hex() if name == "default" else name.lower()) == tag


def _possible(today: Today, changed: Mapping[str, Value]) -> bool:
    """Whether a store can be opened with these settings."""
    try:
        divide(config_of({**today.settings, **changed}))
    except ConfigError:
        return False
    return True
