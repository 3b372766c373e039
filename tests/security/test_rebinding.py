"""A page in a browser whose name points to this host gets nothing, and a stranger on it sums alone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from kvtide.node.client.client import Client
from kvtide.node.host_names import HostNames
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
from tests.node.test_http import Watched
from tests.serve.serving import Served

EVIL = ("evil.example", "evil.example:9410", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "")


def ask(port: int, path: str, host: str | None, method: str = "GET", body: str = "") -> tuple[int, str]:
    """The status and the content; without a header Host if that is None."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode())
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("node")
    settings = {"HTTP": "127.0.0.1:0", "HOSTS": "grafana.example, other"}
    quotas = {"KVTIDE_DRAM_QUOTAS": f"{'ab' * 16}:20%"}
    process = Watched(folder, **{f"KVTIDE_NODE_{name}": value for name, value in settings.items()}, **quotas)
    yield process
    process.stop()


def test_only_known_names_are_answered(node: Watched) -> None:
    own = socket.gethostname()
    good = ["localhost", "LOCALHOST.", "127.0.0.1", f"127.0.0.1:{node.port}", "[::1]:1", own, f"{own}:80"]
    good += ["grafana.example", "other:9410"]
    for page in ("/status", "/metrics"):
        assert [ask(node.port, page, host)[0] for host in good] == [200] * len(good)
        refused = [ask(node.port, page, host) for host in (*EVIL, None)]
        assert [status for status, _ in refused] == [421] * 7
        assert all("node.hosts" in text and len(text) < 300 for _, text in refused)
    assert ask(node.port, "http://evil.example/status", "localhost")[0] == 421, "a whole address wins over the header"


def test_a_probe_may_use_any_name_and_learns_nothing_else(node: Watched) -> None:
    for host in (*EVIL, None):
        assert ask(node.port, "/healthz", host) == (200, '{"status": "serving"}')
    assert json.loads(ask(node.port, "/healthz", "localhost")[1]).keys() > {"status", "blocks"}


def test_a_stranger_sees_sums_and_nobody(node: Watched) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        full = client.status()
        pages = {page: ask(node.port, page, "localhost")[1] for page in ("/status", "/metrics")}
    assert (full.node.pid, full.node.path) == (node.process.pid, str(node.path))
    assert [c.pid for c in full.node.clients] == [os.getpid()], "the socket tells its own users"
    assert "ab" * 16 in full.store.tenants
    said = json.loads(pages["/status"])
    assert (said["store"]["blocks"], said["store"]["tiers"]["dram"]["blocks"]) == (3, 3)
    assert (said["node"]["pid"], said["node"]["path"], said["store"]["tenants"]) == (0, "", {})
    assert [(c["pid"], c["sessions"], c["models"]) for c in said["node"]["clients"]] == [(0, 1, [])]
    secrets = ["ab" * 16, str(node.folder), full.node.clients[0].models[0].namespace]
    assert [word in page for page in pages.values() for word in secrets] == [False] * 6
    assert f'pid="{os.getpid()}"' not in pages["/metrics"]


def test_addresses_have_one_spelling() -> None:
    hosts = HostNames(["[2001:DB8::1]:80", "10.0.0.7:9"])
    assert all(map(hosts.knows, ("[2001:db8:0:0::1]", "10.0.0.7", "[0:0:0:0:0:0:0:1]:9410")))
    assert not any(
        map(hosts.knows, ("", "[", ":80", "10.0.0.70", "a localhost", "localhost@evil.example", "[::1")[:-1])
    )


def test_a_server_of_a_model_answers_known_names_alone() -> None:
    question = json.dumps({"prompt": "Hello", "max_tokens": 1})
    with Served({"hosts": ["chat.example"]}) as served:
        port = int(served.url.rpartition(":")[2])
        pages = [("/v1/completions", "POST", question), ("/v1/models", "GET", ""), ("/metrics", "GET", "")]
        for page, method, body in pages:
            for host in EVIL:
                status, text = ask(port, page, host, method, body)
                assert (status, "--allow-host" in text) == (421, True)
            for host in ("localhost:8000", "127.0.0.1", "chat.example"):
                assert ask(port, page, host, method, body)[0] == 200
        assert len(served.engine.answers) == 3, "nothing was computed for the others"
        assert [ask(port, "/health", host)[0] for host in EVIL] == [200] * 6
    with Served({"api_key": "k" * 20}) as served:
        port = int(served.url.rpartition(":")[2])
        assert ask(port, "/v1/models", "evil.example")[0] == 401, "where there is a key, the key decides"
