"""Traffic of a real store that records, and what the store found: to be compared with what the doctor predicts."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvtide import Store, Tenant, config
from kvtide.config import Config
from kvtide.doctor.advice import Advice, AdviceRequest, Change, advise
from kvtide.store.node_statistics import NodeStatistics, Status, reported_settings
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt
from tests.node.serving import eventually

__all__ = ["BLOCK", "PREFILL", "Asked", "Recorded", "changed", "replayed", "settings", "users"]

BLOCK = PLAIN.geometry["full"].footprint
PREFILL = 1000.0
"""Tokens per second."""


class Asked(NamedTuple):
    """A request: its prompt as numbers of blocks, and whose it is."""

    blocks: list[int]
    tenant: Tenant | None = None


def users(count: int, requests: int, seed: int = 1, tenants: Sequence[Tenant | None] = (None,)) -> list[Asked]:
    """Users who come back at random, each time with a block more, and begin anew after twelve."""
    chance, lengths = random.Random(seed), dict.fromkeys(range(count), 1)
    found = []
    for _ in range(requests):
        user = chance.randrange(count)
        lengths[user] = 2 if lengths[user] >= 12 else lengths[user] + 1
        blocks = [1000 + 100 * user + i for i in range(lengths[user])]
        found.append(Asked(blocks, tenants[user % len(tenants)]))
    return found


def settings(dram: str = "1MiB", **more: Any) -> dict[str, Any]:
    """DRAM of that size, of which ``memory`` has further settings; and other sections."""
    return {"dram": {"budget": dram, "segment": "1MiB", "policy": "lru", **more.pop("memory", {})}, **more}


@dataclass
class Recorded:
    """A run of requests through a store in this process. A second passes between two requests."""

    given: Mapping[str, Any]
    asked: Sequence[Asked]
    file: Path | None = None
    """Where it records."""
    ttl: float | None = None
    second_touch: bool = False
    """Whether only blocks are stored that were asked for before."""
    found: list[int] = field(default_factory=list)
    """Blocks found, by request."""

    def open(self) -> Store:
        self.clock = FakeClock()
        record = {"record": {"path": str(self.file)}} if self.file is not None else {}
        self.config: Config = config.read(os.devnull, {}, {}, **{**self.given, **record})
        return Store(self.config, clock=self.clock)

    def drive(self, store: Store) -> None:
        sessions: dict[str, Any] = {}
        known = set[tuple[str, int]]()
        for blocks, tenant in self.asked:
            name = tenant.name if tenant else ""
            if name not in sessions:
                sessions[name] = store.session(MODEL, tenant) if tenant else store.session(MODEL)
            session, tokens = sessions[name], prompt(*blocks)
            self.clock.advance(1.0)
            with session.match(tokens, prefill=PREFILL) as match:
                found = session.load(match).wait(60).tokens // SIZE
                count = sum((name, block) in known for block in blocks) if self.second_touch else len(blocks)
                known.update((name, block) for block in blocks)
                if found < count:
                    whole = tokens[: count * SIZE]
                    session.store(whole, data(PLAIN, whole)[found:], start=found, ttl=self.ttl)
            assert store.flush(60).complete
            self.found.append(found)

    def hit_rate(self) -> float:
        """The share of the blocks found, over the last 60 % of the requests."""
        start = int(0.4 * len(self.asked))
        return sum(self.found[start:]) / sum(len(one.blocks) for one in self.asked[start:])

    def status(self, store: Store) -> Status:
        """As a node with this store reports it, once all is recorded."""
        if (recorder := store.recorder) is not None:
            eventually(lambda: recorder.statistics().requests == len(self.asked))
        node = NodeStatistics(1, "node.sock", 1.0, settings=reported_settings(self.config))
        return Status(store.statistics(), node)

    def advice(self, **wanted: Any) -> Advice:
        """Run it, and ask the doctor while the store is open and its file grows."""
        with self.open() as store:
            self.drive(store)
            return advise(self.status(store), AdviceRequest(**{"seconds": 1000.0, **wanted}))


def changed(run: Recorded, change: Change, folder: Path) -> Recorded:
    """The same requests, with what a change sets. A tier on disk is at ``folder``."""
    given = {section: dict(values) for section, values in run.given.items()}
    ttl, second_touch = run.ttl, run.second_touch
    if "path" in given.get("nvme", {}):
        given["nvme"]["path"] = str(folder)
    for name, _, value in change.settings:
        section, _, setting = name.partition(".")
        if name == "ttl":
            ttl = None if value == "none" else float(value.removesuffix("s"))
        elif name == "engine.store":
            second_touch = value == "second-touch"
        else:
            given.setdefault(section, {})[setting] = str(folder) if name == "nvme.path" else value
    return Recorded(given, run.asked, ttl=ttl, second_touch=second_touch)


def replayed(run: Recorded) -> float:
    """Run it, and return its hit rate."""
    with run.open() as store:
        run.drive(store)
    return run.hit_rate()
