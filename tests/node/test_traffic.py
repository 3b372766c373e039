"""Eight client processes do a bit of everything beside one that misbehaves: no error, no leak, nobody starves."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from kvtide.node.client.client import Client
from tests.crash_worker import MIB
from tests.node import host
from tests.node.crowd import Crowd
from tests.node.hostile_client import TRICKS
from tests.node.serving import Process, eventually
from tests.node.traffic_worker import CLIENTS

SETTINGS = {
    "KVTIDE_DRAM_BUDGET": str(12 * MIB),
    "KVTIDE_DRAM_SEGMENT": str(MIB),
    "KVTIDE_NVME_BUDGET": str(16 * MIB),
    "KVTIDE_NVME_SEGMENT": str(MIB),
}
GROWTH = 32 * MIB
"""Of the node's own memory, the arena apart, since every trick was tried twice, that is no leak: tables fill up. Before
that the heap itself grows by more: what a million answers at once left behind is in pieces."""


def traffic(folder: Path, seconds: float, times: int) -> None:
    """At least so many seconds, and until every trick was tried so many ``times``."""
    mark = {"TEST_RUN": str(folder)}
    node = Process(folder, **SETTINGS, **mark)
    try:
        before = node.at_rest()
        with Crowd(folder, "tests.node.traffic_worker", CLIENTS + 1, mark) as crowd:
            for number in range(CLIENTS + 1):
                crowd.enter(number, seed=number)
            early = 0
            end = time.monotonic() + seconds
            while time.monotonic() < end or crowd.count(CLIENTS, "turns") < times * len(TRICKS):
                everybody_gets_on(node, crowd)
                if not early and crowd.count(CLIENTS, "turns") >= 2 * len(TRICKS):
                    early = host.resident(node.process.pid)
            for person in crowd.people.values():
                person.signal(signal.SIGUSR1)
            eventually(lambda: crowd.errors or crowd.work("done").all())
            assert not crowd.errors, crowd.errors
            for column in ("verified", "stored", "heard"):
                assert crowd.work(column)[:CLIENTS].all(), f"somebody has {column} nothing"
            with Client(node.path) as client:
                assert client.statistics().pinned == 0
        assert node.at_rest() == before
        assert not early or host.resident(node.process.pid) - early < GROWTH
        assert "Traceback" not in node.log
        for reason in ("does not read", "a frame of", "not understood", "length <= 1000", "sent no hello"):
            assert reason in node.log
        node.stop()
    finally:
        node.kill()
    assert host.alive(f"TEST_RUN={folder}") == []


def everybody_gets_on(node: Process, crowd: Crowd) -> None:
    before = crowd.work("turns")

    def worked() -> bool:
        assert not crowd.errors, crowd.errors
        assert node.process.poll() is None, node.log
        return bool((crowd.work("turns") > before + 10)[:CLIENTS].all())

    eventually(worked)


def test_eight_clients_and_a_hostile_client(tmp_path: Path) -> None:
    traffic(tmp_path, 3, times=1)


@pytest.mark.long
def test_eight_clients_and_a_hostile_client_for_a_minute(tmp_path: Path) -> None:
    traffic(tmp_path, 60, times=3)
