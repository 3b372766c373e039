"""Three nodes on hosts of their own, under a steady stream of prompts, while one of them is killed, stopped, cut off,
slowed down or restarted: no byte is wrong, no prompt hangs, only what the dead node alone had is missing, budgets hold,
and when the fault is over everything is a hit again and nothing is left over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

import pytest

from kvtide.testing.interface import SIZE
from tests.node import host
from tests.node.certificates import Authority
from tests.node.serving import eventually
from tests.peers.faults import FAULTS, schedule, suffer
from tests.peers.hosts import PORT, Cluster
from tests.peers.network import Network, missing

NAMES = "a", "b", "c"
_ESTABLISHED = "01"
"""In /proc/net/tcp."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"there can be no network namespaces here: {reason}")
    with ExitStack() as stack:
        network = stack.enter_context(closing(Network(*NAMES)))
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack, network, *NAMES)


@pytest.fixture
def cluster(whole: Cluster) -> Iterator[Cluster]:
    """All nodes run and reach each other, before and after; nothing is left over."""
    yield whole
    whole.mend()
    whole.check_nothing_left()


def test_what_one_computed_is_a_hit_on_the_others(cluster: Cluster) -> None:
    for one in NAMES:
        path = cluster.computed(one)
        sent = cluster.serving(one).blocks_sent
        for other in set(NAMES) - {one}:
            before = cluster.read_from_others(other)
            cluster.until_hit(other, path)
            assert cluster.read_from_others(other) > before
        # The last one may have read from either of the two that have it.
        assert cluster.serving(one).blocks_sent >= sent + len(path)


@pytest.mark.parametrize(("what", "victim"), list(zip(FAULTS, NAMES * 2, strict=True)))
def test_a_fault_under_load(cluster: Cluster, what: str, victim: str) -> None:
    suffer(cluster, what, victim)


def test_two_nodes_that_do_not_reach_each_other_share_by_the_third(cluster: Cluster) -> None:
    """A node never asks others for others; what it has read is its own, and then it serves it."""
    path = cluster.computed("a")
    cluster.network.divide("a", "b")
    assert cluster.ask("b", path) == 0
    cluster.until_hit("c", path)
    cluster.until_hit("b", path)
    assert cluster.ask("a", path) == SIZE * len(path)


def test_nothing_is_left_of_a_network_whoever_made_it_was_killed() -> None:
    """The processes that hold the namespaces end, and so do those that run in them."""
    if reason := missing():
        pytest.skip(f"there can be no network namespaces here: {reason}")
    mark = f"TEST_RUN=network of {os.getpid()}"
    command = (
        "import subprocess, time; from tests.peers.network import Network; network = Network('a', 'b');"
        "subprocess.Popen([*network.enter('a'), 'sleep', '600']); print('ready', flush=True); time.sleep(600)"
    )
    environment = os.environ | dict([mark.split("=")])
    with subprocess.Popen([sys.executable, "-c", command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # It, three namespaces, and one that runs in one of them: which may be on its way into it.
        eventually(lambda: len(host.alive(mark)) == 5)
        process.kill()
    eventually(lambda: not host.alive(mark))


@pytest.mark.long
def test_connections_of_a_host_that_vanished_are_given_up(cluster: Cluster) -> None:
    """Nothing arrives that would end them: the host lost its power. An address may have so many connections, and a host
    that comes and goes would be kept out in the end."""
    ours = cluster.members["a"].process.pid
    where = cluster.network.addresses["c"]
    assert connected(ours, where)
    cluster.network.lose("c")
    cluster.members["c"].kill()
    cluster.until(lambda: not connected(ours, where), "no connection to it or from it")
    assert cluster.ask("b", cluster.computed("a"))


def connected(pid: int, address: str) -> int:
    """Connections, on the host of a process, to an address and from it, which the kernel believes in."""
    backwards = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(line[2].startswith(backwards) and line[3] == _ESTABLISHED for line in lines)


# -- a long random schedule -------------------------------------------------------------------------------------

SECONDS = float(os.environ.get("TEST_SECONDS", "150"))
SEED = int(os.environ.get("TEST_SEED", time.time_ns() % 1_000_000))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tls", [False, True], ids=["secret", "tls"])
def test_a_random_schedule_of_faults(tmp_path: Path, tls: bool) -> None:
    """For minutes, with little memory, so that blocks are evicted all the time."""
    if reason := missing():
        pytest.skip(f"there can be no network namespaces here: {reason}")
    print(f"TEST_SEED={SEED}")  # pytest shows it if the test fails
    random, peers = Random(SEED), {}
    if tls:
        authority = Authority(tmp_path)
        certificates = [authority.issue(f"host-{name}") for name in NAMES]
        assert certificates[0] == tmp_path / "host-a.pem"
        peers = {
            "addresses": " ".join(f"{{{name}}}:{PORT}" for name in NAMES),
            "certificate": str(tmp_path / "host-{name}.pem"),
            "authority": str(authority.file),
            "names": " ".join(f"host-{name}" for name in NAMES),
        }
    small = {"KVTIDE_DRAM_BUDGET": "4MiB", "KVTIDE_NVME_BUDGET": "16MiB", "KVTIDE_NVME_SEGMENT": "4MiB"}
    with ExitStack() as stack:
        network = stack.enter_context(closing(Network(*NAMES)))
        cluster = Cluster(tmp_path, stack, network, *NAMES, peers=peers or None, **small)
        schedule(cluster, random, SECONDS)
