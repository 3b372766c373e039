"""``kvtide status``: what it shows of a real node."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtide import Store, cli
from kvtide import config as configuration
from kvtide.cli import cluster
from kvtide.cli.status import frame
from kvtide.errors import TierError
from kvtide.metrics import METRICS
from kvtide.node.client.client import Client
from kvtide.store.node_statistics import (
    ClientStatistics,
    ClusterServing,
    NodeStatistics,
    PeerServing,
    Status,
    least,
)
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from kvtide.tiers.shared.budget import BudgetCoordinatorStatistics
from kvtide.tiers.shared.credits import BudgetStatistics
from kvtide.transfer.node_search import ClusterStatistics, MemberStatistics
from tests.node.serving import Process, eventually
from tests.peers.nodes import token


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("node"), KVTIDE_NVME_STORE="through")
    yield process
    process.stop()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["status", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.stdout


def shown(now: Status, last: Status | None = None) -> list[list[str]]:
    """The words of each line of a frame."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(frame(now, last))
    return [line.split() for line in console.export_text().splitlines()]


def test_one_frame_shows_tiers_hits_queues_and_clients(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(60)
        assert length(session, prompt(1, 2, 3, 4)) == 2 * SIZE
        with session.match(prompt(1)):
            text = subprocess.run(
                [sys.executable, "-m", "kvtide", "status", f"unix:{node.path}", "--once"],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
                env={**os.environ, "COLUMNS": "160"},
            ).stdout
    lines = [line.split() for line in text.splitlines()]
    assert f"node {node.process.pid} at {node.path}" in text
    dram, _ = [line for line in lines if line[:1] == ["dram"]]
    assert {"16", "MiB", "lru"} <= set(dram)
    assert ["found", "in", "dram", "48", "60", "%", "-", "-"] in lines
    assert ["missed", "32", "40", "%", "-", "-"] in lines
    (mine,) = [line for line in lines if line[:1] == [str(os.getpid())]]
    assert mine[-5:-1] != ["0"] * 4
    assert max(map(len, text.splitlines())) <= 160
    assert "rights to read 1, to write 0" in text


def test_addresses_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    """Also those that begin with a letter, which a table could take for a style."""
    peers = {"addresses": "[fd00::7]:9411", "token_file": token(tmp_path)}
    with Store(configuration.read(None, env={}, dram={"budget": "1MiB", "segment": "1MiB"}, peers=peers)) as store:
        statistics = store.statistics()
    members = tuple(MemberStatistics(n, n, "[fd00::8]:9411", "peer 1") for n in (1, 2))
    now = Status(replace(statistics, cluster=ClusterStatistics(members)), NodeStatistics(1, "", 1.0))
    text = "\n".join(" ".join(line) for line in shown(now))
    assert text.count("peer [fd00::7]:9411") == 5, "tiers, traffic, hits, lanes and speeds"
    assert text.count("peer 1 is [fd00::8]:9411") == 2


def test_what_nodes_compress_for_each_other_is_shown(tmp_path: Path) -> None:
    peers = {"addresses": "10.0.0.7:9411", "token_file": token(tmp_path)}
    with Store(configuration.read(None, env={}, dram={"budget": "1MiB", "segment": "1MiB"}, peers=peers)) as store:
        statistics = store.statistics()
    name = "peer 10.0.0.7:9411"
    tier = replace(statistics.tiers[name], bytes_compressed=2 << 30, bytes_uncompressed=3 << 30)
    serving = PeerServing(bytes_compressed=20 << 20, bytes_uncompressed=30 << 20)
    plain = Status(statistics, NodeStatistics(1, "", 1.0, peers=PeerServing()))
    now = Status(replace(statistics, tiers={**statistics.tiers, name: tier}), NodeStatistics(1, "", 1.0, peers=serving))
    before, text = ("\n".join(" ".join(line) for line in shown(one)) for one in (plain, now))
    assert "compressed" not in before
    assert "read from other nodes: 3 GiB of blocks, compressed to 2 GiB" in text
    assert "; 30 MiB of blocks, compressed to 20 MiB" in text


def test_why_a_node_is_no_member_is_shown(tmp_path: Path) -> None:
    problem = "two nodes announce the address [fd00::8]:9411"
    with Store(configuration.read(None, env={}, dram={"budget": "1MiB", "segment": "1MiB"})) as store:
        statistics = replace(store.statistics(), cluster=ClusterStatistics())
    node = NodeStatistics(1, "", 1.0, cluster=ClusterServing(problem=problem))
    assert problem in "\n".join(" ".join(line) for line in shown(Status(statistics, node)))
    assert problem not in repr(least(Status(statistics, node))), "it has addresses"


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (ClusterServing(number=1, epoch=7, members=2), "cluster: 3 members"),
        (ClusterServing(members=2), "cluster: 2 members, this node is not joined"),
    ],
)
def test_members_are_counted_without_a_prompt(own: ClusterServing, text: str) -> None:
    """What a node has found for its last prompt may be of yesterday."""
    with Store(configuration.read(None, env={}, dram={"budget": "1MiB", "segment": "1MiB"})) as store:
        statistics = replace(store.statistics(), cluster=ClusterStatistics())
    node = NodeStatistics(1, "", 1.0, cluster=own)
    assert text in "\n".join(" ".join(line) for line in shown(Status(statistics, node)))
    (metric,) = [one for one in METRICS if one.name == "kvtide_cluster_members"]
    assert [value for _, value in metric.samples(statistics, node)] == [2]


def test_the_table_of_a_cluster_shows_any_address(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = ["[fd00::8]:9411", "[/fd00::9]:9411"]
    member = {"epoch": 2, "lease_left": 1.0, "this_node": False, "tier": "", "away": False}
    member |= {"bytes_per_second": 0.0, "round_trip": 0.0, "carrier": "", "compressed": False}
    members = [{**member, "number": n, "address": one} for n, one in enumerate(addresses, 1)]
    members[0] |= {"carrier": "TLS", "compressed": True}
    directory = {"entries": 0, "bytes": 0}
    own = ClusterServing(problem="two nodes announce the address [fd00::7]:9411")
    found: dict[str, object] = {"members": members, "matrix": [], "directory": directory, "node": own, "lookups": None}
    cluster._show(found, clear=False)
    text = capsys.readouterr().out
    assert all(one in text for one in (*addresses, "[fd00::7]:9411"))
    assert text.count("TLS, compressed") == text.count("compressed") == 1


def test_the_most_frequent_reasons_of_misses_are_shown(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        dropped = prompt(*range(900, 920))
        session.store(dropped, data(PLAIN, dropped))
        session.drop(dropped)
        session.match(prompt(*range(900, 923)), request="missed").release()
        begin = "blocks missed in the last 10 min: 20 dropped, "
        eventually(lambda: begin in " ".join(run(f"unix:{node.path}", "--once").split()))


def test_the_frame_leaves_itself_out_and_the_json_does_not(node: Process) -> None:
    assert f"\n{os.getpid()} " not in run(str(node.path), "--once")
    found = json.loads(run(str(node.path), "--json"))
    assert [c["pid"] for c in found["node"]["clients"]] == [os.getpid()]
    status = msgspec.convert(found, Status)
    assert status.store.tiers["dram"].budget == 16 << 20
    assert status.node.path == str(node.path)


def test_rates_are_those_since_the_last_frame(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        first = client.status()
        session.store(prompt(10, 11), data(PLAIN, prompt(10, 11)))
        assert length(session, prompt(10, 11)) == 2 * SIZE
        second = client.status()
    lines = shown(second, first)
    assert any(line[:3] == ["found", "in", "dram"] and line[-3:] == ["32", "100", "%"] for line in lines)
    _, traffic = [line for line in lines if line[:1] == ["dram"]]
    assert "-" not in traffic[:5]
    restarted = Status(second.store, NodeStatistics(first.node.pid + 1, first.node.path, 5.0))
    assert any(line[:3] == ["found", "in", "dram"] and line[-2:] == ["-", "-"] for line in shown(restarted, first))


def test_what_is_wrong_stands_out(node: Process) -> None:
    with Client(node.path) as client:
        store = client.status().store
    gone = ClientStatistics(4711, False, 90_061.0, 1, 0, 2, 3, 10, 1, 0, 7)
    store.counts["stores dropped: no room in DRAM"] = 3
    text = "\n".join(" ".join(line) for line in shown(Status(store, NodeStatistics(1, "x", 61.0, True, 1, 1, [gone]))))
    assert "4711 1 d 1 h 1 0 2 3 10 1 0 B\n" in text
    assert "client 4711 is gone; 7 slots wait for its death" in text
    assert "node 1 at x, 1 min 1 s, 1 requests, stopping" in text
    assert "3 stores dropped: no room in DRAM" in text


def test_who_keeps_the_budget_of_shared_storage_is_shown(node: Process) -> None:
    with Client(node.path) as client:
        store = client.status().store
    told = BudgetCoordinatorStatistics("west 12", 3, 1 << 40, 1000, 1 << 39, 1 << 20, 1 << 30, 70_000, 4)
    store.budgets.update(
        files=BudgetStatistics(told, True, 1.2, 64 << 20),
        objects=BudgetStatistics(BudgetCoordinatorStatistics(), False, 75.0, 0),
    )
    text = "\n".join(" ".join(line) for line in shown(Status(store, NodeStatistics())))
    assert "files: its budget is kept by west 12 (this node), last seen 1 s ago" in text
    assert "granted: 1 GiB to all, 64 MiB to this node; removed: 70,000 blocks; unfinished: 1 MiB; cleared: 4" in text
    assert "objects: its budget is kept by nobody, last seen 1 min 15 s ago" in text


def test_a_busy_node_fits_into_80_columns(node: Process) -> None:
    """With the largest numbers that it may have: no cell of a table is cut or wrapped."""
    with Client(node.path) as client:
        found = client.status()
    large = 1_234_567
    store = found.store
    tiers = {name: replace(tier, blocks=large, budget=(1 << 40) - 1) for name, tier in store.tiers.items()}
    lanes = {
        name: replace(
            lane,
            reads_waiting=large,
            writes_waiting=large,
            read_bytes_waiting=1022 << 20,
            write_bytes_waiting=1022 << 20,
            read_speed=replace(lane.read_speed, bytes_per_second=1022.4 * 2**20, measured=False, remembered=True),
        )
        for name, lane in store.lanes.items()
    }
    guest = ClientStatistics(4_194_304, False, 86_399.0, 100, 1234, 1234, 100, 12_345_678, 1234, 1022 << 20, large)
    now = Status(replace(store, tiers=tiers, lanes=lanes), NodeStatistics(4_194_304, "x", 1e6, False, 1, 1, [guest]))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(frame(now, None))
    text = console.export_text()
    assert "…" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("4194304")]
    assert line.split()[-2:] == ["1022", "MiB"]
    assert "1022 MiB/s, remembered" in text
    assert max(map(len, text.splitlines())) <= 80


def test_it_goes_on_until_it_is_interrupted(node: Process) -> None:
    """In a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "kvtide", "status", str(node.path), "--every", "0.1"]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True) as process:
        os.close(follower)
        seen = b""
        while seen.count(b"requests") < 3:
            seen += os.read(leader, 65536)
        process.send_signal(2)
        while process.poll() is None:
            try:
                seen += os.read(leader, 65536)
            except OSError:  # it has hung up
                break
        assert process.wait(60) == 0, seen
    os.close(leader)


def test_without_a_node_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"no node answers at .*; start one with: kvtide node"):
        CliRunner().invoke(cli.app, ["status", str(tmp_path / "none.sock")], catch_exceptions=False)
