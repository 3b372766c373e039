"""``/healthz`` and ``/metrics`` of a real node: they tell what was done, and nobody who asks badly harms anybody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtide import Store, config
from kvtide.node.admin.auth import HttpAuth
from kvtide.node.admin.http import Http
from kvtide.node.client.client import Client
from kvtide.node.server.loop import run_in_loop
from kvtide.node.server.server import Node
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.serving import Process, eventually


class Watched(Process):
    """A node that serves HTTP at ``port``."""

    @property
    def port(self) -> int:
        return int(re.findall(r"http://127\.0\.0\.1:(\d+)/metrics", self.log)[-1])

    def get(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        """The status, the content's type and the content."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read().decode()

    def metrics(self) -> dict[tuple[str, ...], float]:
        """By name and values of labels."""
        families = text_string_to_metric_families(self.get("/metrics")[2])
        return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}

    def settles(self, expected: dict[tuple[str, ...], float]) -> None:
        """Metrics become what is expected: they may be a tenth of a second old."""

        def wrong() -> dict[tuple[str, ...], float | None]:
            found = self.metrics()
            return {key: found.get(key) for key, value in expected.items() if found.get(key) != value}

        with contextlib.suppress(AssertionError):
            eventually(lambda: not wrong())
        assert not wrong()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    process = Watched(tmp_path_factory.mktemp("node"), KVTIDE_NODE_HTTP="127.0.0.1:0", KVTIDE_NVME_STORE="through")
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def unharmed(node: Watched) -> Iterator[None]:
    yield
    assert node.get("/healthz")[0] == 200
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(99), data(PLAIN, prompt(99)))
        assert length(session, prompt(99)) == SIZE
        assert session.drop(prompt(99)) == 1


def test_counters_rise_by_exactly_what_was_done(node: Watched) -> None:
    before = node.metrics()
    tokens = prompt(1, 2, 3)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        assert client.flush(60)
        assert length(session, prompt(1, 2, 3, 4)) == 3 * SIZE
        nbytes = 3 * PLAIN.geometry["full"].footprint
        rises = {
            ("kvtide_prompts_total",): 1,
            ("kvtide_prompt_tokens_total", "dram"): 3 * SIZE,
            ("kvtide_prompt_tokens_total", "missed"): SIZE,
            ("kvtide_stored_blocks_total",): 3,
            ("kvtide_tier_written_blocks_total", "nvme"): 3,
            ("kvtide_tier_written_bytes_total", "dram"): nbytes,
            ("kvtide_tier_read_bytes_total", "dram"): nbytes,
            ("kvtide_node_clients", "connected"): 1,
            ("kvtide_sessions",): 1,
        }
        node.settles({key: before.get(key, 0.0) + rise for key, rise in rises.items()})
        with session.match(tokens), session.reserve(prompt(1, 2, 3, 5)):
            node.settles(
                {
                    ("kvtide_client_rights", "0", "read"): 1,
                    ("kvtide_client_rights", "0", "write"): 1,
                    ("kvtide_reservations",): 1,
                }
            )
        assert session.drop(tokens) == 3
    node.settles(
        {
            ("kvtide_node_clients", "connected"): 0,
            ("kvtide_sessions",): 0,
            ("kvtide_leases",): 0,
            ("kvtide_removed_blocks_total", "all", "dropped"): before["kvtide_removed_blocks_total", "all", "dropped"]
            + 3,
        }
    )


STOPPED = """
import sys, signal, os
from pathlib import Path
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
client = Client(Path(sys.argv[1]))
session = client.session(MODEL)
reservation = session.reserve(prompt(50, 51))
client._link._requests.shutdown(2)
print("gone", flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_what_a_client_holds_that_hung_up_is_in_quarantine_until_it_is_dead(node: Watched) -> None:
    command = [sys.executable, "-c", STOPPED, str(node.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "gone\n"
        eventually(lambda: node.metrics()["kvtide_node_quarantined_slots",] == 2)
        assert node.metrics()["kvtide_node_clients", "gone"] == 1
        process.kill()
    node.settles({("kvtide_node_quarantined_slots",): 0, ("kvtide_node_clients", "gone"): 0})


def test_health_is_told(node: Watched) -> None:
    status, kind, text = node.get("/healthz")
    assert (status, kind) == (200, "application/json")
    assert json.loads(text)["status"] == "serving"
    assert node.get("/metrics")[1] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/..", 404),
        ("GET", "/metrics?name[]=x", 200),
        ("HEAD", "/metrics", 200),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
    ],
)
def test_only_two_pages_can_be_read(node: Watched, method: str, path: str, status: int) -> None:
    found, _, text = node.get(path, method)
    assert found == status
    assert bool(text) == (method != "HEAD")


def spoken(node: Watched, said: bytes) -> bytes:
    """What the node answers to bytes, until it hangs up."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=30) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
            while part := sock.recv(65536):
                answer += part
        return answer


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /metrics\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"HTTP/1.1 400 "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /" + b"x" * 4000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 9000, b"HTTP/1.1 431 "),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 10_000_000, b""),
        (b"GET \xff\xfe\x00 HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2, b"HTTP/1.1 200 "),
    ],
)
def test_what_is_no_request_is_answered_so_or_not_at_all(node: Watched, said: bytes, answer: bytes) -> None:
    assert spoken(node, said).startswith(answer)


def test_who_says_nothing_loses_his_connection(node: Watched) -> None:
    """Many of them, more than are let in: they time out, and meanwhile the node serves its clients."""
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port), timeout=30)) for _ in range(50)
        ]
        for sock in silent[::2]:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"GET /metrics HTTP/1.1\r\n")  # and nothing more
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(77)) == 0
        for sock in silent:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    assert node.get("/metrics")[0] == 200


def test_who_does_not_read_his_answer_hurts_nobody(node: Watched) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.connect(("127.0.0.1", node.port))
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert node.get("/metrics")[0] == 200


def health(http: Http) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection(http.address, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, json.load(answer)


@pytest.mark.parametrize("since", ["its first segment", "later"])
def test_who_stops_or_has_a_broken_disk_is_not_healthy(tmp_path: Path, since: str) -> None:
    disk = FaultyDisk()
    settings = config.read(
        env={},
        dram={"budget": "4MiB", "segment": "1MiB"},
        nvme={"path": str(tmp_path / "tier"), "budget": "16MiB", "segment": "1MiB", "store": "through"},
    )

    async def serve(store: Store) -> None:
        node = Node(store, tmp_path / "node.sock")
        http = Http(node, HttpAuth(settings.node))
        await http.listen("127.0.0.1:0")
        assert (await asyncio.to_thread(health, http))[1]["status"] == "serving"
        with store.session(MODEL) as session:
            if since == "later":
                session.store(prompt(0), data(PLAIN, prompt(0)))
                assert store.flush(60)
            disk.arm(Fault("write", files="*.segment", times=1000))
            for number in range(1, 20):
                session.store(prompt(number), data(PLAIN, prompt(number)))
                assert store.flush(60).complete  # each by itself: what is written together fails once
            disk.disarm()
        await asyncio.to_thread(eventually, lambda: health(http)[0] == 503)
        status, about = await asyncio.to_thread(health, http)
        assert (status, about["status"], about["failed_tiers"]) == (503, "failed", ["nvme"])
        node.close()
        await asyncio.to_thread(eventually, lambda: health(http)[1]["status"] == "stopping")
        assert (await asyncio.to_thread(health, http))[0] == 503
        http.close()

    with Store(settings, disk=disk, mapped=True) as store:
        run_in_loop(serve(store))


def test_a_node_that_is_told_to_stop_answers_until_it_has(tmp_path: Path) -> None:
    node = Watched(tmp_path, KVTIDE_NODE_HTTP="127.0.0.1:0")
    assert node.get("/healthz")[0] == 200
    node.signal(signal.SIGTERM)
    answers = []
    with contextlib.suppress(ConnectionError, HTTPException):
        while True:
            answers.append(node.get("/healthz")[0])
    assert node.process.wait(60) == 0, node.log
    assert answers == sorted(answers), "once it stops, it does not serve again"
    assert set(answers) <= {200, 503}


def test_an_address_that_cannot_be_had_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "nonsense", "127.0.0.1:99999"):
            command = [sys.executable, "-m", "kvtide", "node", "--socket", str(tmp_path / "s"), "--http", address]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert ended.returncode == 2
            assert f"cannot serve HTTP at {address!r}" in ended.stderr
            assert "127.0.0.1:9410" in ended.stderr
            assert not (tmp_path / "s").exists()
