"""Three nodes and Valkey on hosts of their own: whatever happens to a node, or to the directory, no byte is wrong, no
prompt hangs, and when it is over everything is a hit again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

import pytest

from tests.peers.faults import FAULTS, schedule, suffer
from tests.peers.hosts import Cluster, Directory
from tests.peers.network import Network, missing

NAMES = "a", "b", "c"
SECONDS = float(os.environ.get("TEST_SECONDS", "150"))
SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 1_000_000))
Both = tuple[Cluster, Directory]


def opened(folder: Path, stack: ExitStack, **settings: str) -> Both:
    if reason := missing():
        pytest.skip(f"there can be no network namespaces here: {reason}")
    network = stack.enter_context(closing(Network(*NAMES, "valkey")))
    directory = Directory(folder / "valkey", network, "valkey")
    stack.callback(directory.kill)
    peers = {"directory": directory.url, "lease": "2s"}
    cluster = Cluster(folder, stack, network, *NAMES, peers=peers, **settings)
    cluster.pooled = 4  # to Valkey
    return cluster, directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with ExitStack() as stack:
        yield opened(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture
def cluster(whole: Both) -> Iterator[Cluster]:
    yield whole[0]
    whole[0].mend()
    whole[0].check_nothing_left()


@pytest.mark.parametrize(("what", "victim"), list(zip(FAULTS, NAMES * 2, strict=True)))
def test_a_fault_of_a_node_under_load(cluster: Cluster, what: str, victim: str) -> None:
    suffer(cluster, what, victim)


def lose(cluster: Cluster, directory: Directory) -> None:
    cluster.network.lose("valkey")


def found(cluster: Cluster, directory: Directory) -> None:
    cluster.network.mend("valkey")


Change = Callable[[Cluster, Directory], None]
TROUBLES: dict[str, tuple[Change, Change]] = {
    "killed": (lambda c, d: d.kill(), lambda c, d: d.start()),
    "stopped": (lambda c, d: d.signal(signal.SIGSTOP), lambda c, d: d.signal(signal.SIGCONT)),
    "partitioned": (lose, found),
    "slow": (lambda c, d: c.network.slow("valkey", "256kbit"), found),
}


@pytest.mark.parametrize("what", TROUBLES)
def test_trouble_of_the_directory_under_load(cluster: Cluster, whole: Both, what: str) -> None:
    """For longer than a lease. What each node has is there meanwhile; what others have may be missing."""
    begin, end = TROUBLES[what]
    _, directory = whole
    ours = {name: cluster.computed(name) for name in NAMES}
    with cluster.load(seed=7) as load:
        load.goes_on(*NAMES)
        begin(cluster, directory)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            for name in NAMES:
                assert cluster.ask(name, ours[name]) == len(ours[name]) * 16
            load.goes_on(*NAMES)
        more = {name: cluster.computed(name) for name in NAMES}
        end(cluster, directory)
        for computed in (ours, more):
            for name in NAMES:
                for other in set(NAMES) - {name}:
                    cluster.until_hit(other, computed[name])
        load.goes_on(*NAMES)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_random_schedule_of_faults_with_a_directory(tmp_path: Path) -> None:
    print(f"TEST_SEED={SEED}")
    small = {"KVTIDE_DRAM_BUDGET": "4MiB", "KVTIDE_NVME_BUDGET": "16MiB", "KVTIDE_NVME_SEGMENT": "4MiB"}
    with ExitStack() as stack:
        cluster, _ = opened(tmp_path, stack, **small)
        schedule(cluster, Random(SEED), SECONDS)
