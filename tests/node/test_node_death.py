"""The node dies again and again under clients that hold views of its memory: the host never has much more than the
budget, because memory that clients still map counts, whichever node allocated it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.crash_worker import MIB
from tests.node import host
from tests.node.crowd import Crowd
from tests.node.serving import Process, eventually

CLIENTS = 2
BUDGET, SEGMENT = 12 * MIB, MIB
SETTINGS = {
    "KVTIDE_DRAM_BUDGET": str(BUDGET),
    "KVTIDE_DRAM_SEGMENT": str(SEGMENT),
    "KVTIDE_NVME_BUDGET": str(16 * MIB),
    "KVTIDE_NVME_SEGMENT": str(MIB),
}


class Gauge:
    """Measures, all the time, how much memory of arenas there is on this host, as far as it is ours."""

    def __init__(self, node: Process, crowd: Crowd) -> None:
        self._node = node
        self._crowd = crowd
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauge")
        self.peak = self.samples = 0

    def now(self) -> int:
        return sum(host.memory(self._pids()).values())

    def _pids(self) -> list[int]:
        return [self._node.process.pid, *(p.pid for p in self._crowd.people.values())]

    def _run(self) -> None:
        while not self._over.wait(0.002):
            found = self.now()
            if found > BUDGET + SEGMENT:  # or one gave memory back and another took it, while we looked
                with host.standing_still(self._pids()):
                    found = self.now()
            self.peak, self.samples = max(self.peak, found), self.samples + 1

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("deaths", [6, pytest.param(20, marks=pytest.mark.long)])
def test_deaths_of_a_node_do_not_add_up(tmp_path: Path, deaths: int) -> None:
    mark = {"TEST_RUN": str(tmp_path)}
    node = Process(tmp_path, **SETTINGS, **mark)
    try:
        with Crowd(tmp_path, "tests.node.lease_worker", CLIENTS, mark) as crowd:
            for number in range(CLIENTS):
                crowd.enter(number, seed=number)
            with Gauge(node, crowd) as gauge:

                def full_and_held() -> bool:
                    assert not crowd.errors, crowd.errors
                    held = all(crowd.count(number, "held") > 1 for number in range(CLIENTS))
                    return held and gauge.now() > BUDGET - SEGMENT

                for _ in range(deaths):
                    eventually(full_and_held)
                    node.kill()
                    node.start()
                eventually(full_and_held)
            assert gauge.samples > 50 * deaths
            assert gauge.peak > BUDGET - SEGMENT
            assert gauge.peak <= BUDGET + SEGMENT, f"{gauge.peak / MIB:.1f} MiB of {BUDGET / MIB:.0f}"
        assert host.memory(host.alive(f"TEST_RUN={tmp_path}")).keys() <= host.memory([node.process.pid]).keys()
    finally:
        node.kill()
    assert host.alive(f"TEST_RUN={tmp_path}") == []
