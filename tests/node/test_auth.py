"""A node that others can reach over HTTP: who may ask what, by certificate or token, and nobody else anything."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import msgspec
import pytest

from kvtide.config import Node
from kvtide.errors import ConfigError, TierError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.admin.auth import HttpAuth, HttpCaller
from kvtide.node.admin.http import PAGES
from kvtide.node.client.admin import HttpAdminClient
from kvtide.node.client.client import Client
from kvtide.node.roles import Role
from kvtide.node.tls import client_tls
from kvtide.security.audit import verify
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.certificates import Authority
from tests.node.serving import Process, eventually

READ, WRITE, ADMIN = (role * 32 for role in "rwa")
TOKENS = f"""
# name role token
prometheus read {READ}
engine write {WRITE}   # of no use here
ops admin {ADMIN}
"""
FORGET = f"/forget?tenant={DEFAULT_TENANT.tag.hex()}"
NONE: Mapping[str, str] = {}

Answer = tuple[int, str]


class Reached(Process):
    """A node that listens at all addresses of this host."""

    def __init__(self, folder: Path, **settings: str) -> None:
        audit = str(folder / "audit.jsonl")
        super().__init__(folder, KVTIDE_NODE_HTTP="0.0.0.0:0", KVTIDE_SECURITY_AUDIT=audit, **settings)

    @property
    def port(self) -> int:
        return int(re.findall(r"https?://0\.0\.0\.0:(\d+)/metrics", self.log)[-1])

    def ask(
        self, path: str, tls: ssl.SSLContext | None = None, method: str = "", headers: Mapping[str, str] = NONE
    ) -> Answer:
        """The status and the content."""
        connection = (
            HTTPConnection("127.0.0.1", self.port, timeout=30)
            if tls is None
            else HTTPSConnection("127.0.0.1", self.port, timeout=30, context=tls)
        )
        with contextlib.closing(connection):
            connection.request(method or ("POST" if "forget" in path else "GET"), path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def acts(self) -> list[tuple[str, str, str]]:
        """Who did what, and how it ended, from the audit log."""
        log = self.folder / "audit.jsonl"
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [(act["who"], act["what"], act["result"].split(":")[0]) for act in found]


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# -- tokens -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "tokens").touch(0o600)
    (folder / "tokens").write_text(TOKENS)
    node = Reached(folder, KVTIDE_NODE_TOKENS=f"file:{folder / 'tokens'}")
    yield node
    node.stop()


@pytest.mark.parametrize("role", [None, *Role])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_for_those_whose_role_suffices(tokens: Reached, page: str, role: Role | None) -> None:
    token = {None: "", Role.READ: READ, Role.WRITE: WRITE, Role.ADMIN: ADMIN}[role]
    status, text = tokens.ask(FORGET if page == "/forget" else page, headers=bearing(token) if token else {})
    needed = PAGES[page]
    allowed = needed is None or (role is not None and role >= needed)
    answered = 422 if page == "/forget" else 200  # nothing was stored that could be forgotten
    assert status == (answered if allowed else 401 if role is None else 403), text
    if not allowed:
        assert f"{page[1:]} needs the role {needed}" in text


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        f"Bearer {READ[:-1]}",
        f"Bearer {READ}r",
        f"Bearer {READ.upper()}",
        f"Basic {READ}",
        READ,
        "Bearer prometheus",
        "Bearer \xff\xfe",
        "Bearer " + "x" * 4000,
    ],
)
def test_a_wrong_token_is_none(tokens: Reached, header: str) -> None:
    assert tokens.ask("/metrics", headers={"Authorization": header})[0] == 401


def test_two_tokens_at_once_are_no_request(tokens: Reached) -> None:
    with socket.create_connection(("127.0.0.1", tokens.port), timeout=30) as sock:
        twice = f"Authorization: Bearer {WRITE}\r\nAuthorization: Bearer {READ}\r\n"
        sock.sendall(f"GET /metrics HTTP/1.1\r\n{twice}\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_probe_without_a_token_learns_whether_it_serves_and_no_more(tokens: Reached) -> None:
    assert json.loads(tokens.ask("/healthz")[1]) == {"status": "serving"}
    assert json.loads(tokens.ask("/healthz", headers=bearing(READ))[1]).keys() > {"blocks", "clients", "uptime_seconds"}


def test_an_administrator_forgets_a_tenant_from_afar_and_it_is_written_down(tokens: Reached) -> None:
    with Client(tokens.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        for header, status in ((bearing(WRITE), 403), ({}, 401), (bearing(ADMIN) | {"Origin": "https://evil"}, 403)):
            assert tokens.ask(FORGET, headers=header)[0] == status
        assert tokens.ask(FORGET, method="GET", headers=bearing(ADMIN))[0] == 405
        assert tokens.ask("/forget?tenant=all", headers=bearing(ADMIN))[0] == 400
        assert length(session, prompt(1)) == SIZE
        code, body = tokens.ask(FORGET, headers=bearing(ADMIN))
        assert (code, json.loads(body)["blocks"]) == (200, 1)
        assert length(session, prompt(1)) == 0
    expected = {("ops over HTTP", "forget", "done"), ("engine over HTTP", "forget", "refused")}
    expected |= {("a stranger over HTTP", "forget", "refused")}
    eventually(lambda: expected <= set(tokens.acts()))
    assert verify(tokens.folder / "audit.jsonl").problem == ""


def test_tokens_are_renewed_while_the_node_serves(tokens: Reached) -> None:
    file = tokens.folder / "tokens"
    try:
        file.write_text("prometheus read another-token-of-some-length\n")
        assert tokens.ask("/metrics", headers=bearing(READ))[0] == 401
        assert tokens.ask("/metrics", headers=bearing("another-token-of-some-length"))[0] == 200
        file.write_text("nonsense\n")
        assert tokens.ask("/metrics", headers=bearing("another-token-of-some-length"))[0] == 200, (
            "the old stay in force"
        )
        assert "the old certificates and tokens stay in force: node.tokens: line 1" in tokens.log
        file.chmod(0o644)
        file.write_text(f"stranger admin {'s' * 32}\n")
        assert tokens.ask("/metrics", headers=bearing("s" * 32))[0] == 401, "everybody could have read or made it"
        assert f"every user of this host may read or write {file} (mode 0644)" in tokens.log
        assert "s" * 32 not in tokens.log
        file.chmod(0o600)
        assert tokens.ask("/metrics", headers=bearing("s" * 32))[0] == 200, "to put the mode right is enough"
    finally:
        file.chmod(0o600)
        file.write_text(TOKENS)
    assert tokens.ask("/metrics", headers=bearing(READ))[0] == 200


def test_no_token_is_in_the_log(tokens: Reached) -> None:
    assert not any(token in tokens.log for token in (READ, WRITE, ADMIN))
    assert "tokens are sent unencrypted at 0.0.0.0:0: set node.certificate" in tokens.log


# -- certificates -------------------------------------------------------------------------------------------


class Pki:
    """One authority for nodes and their clients, and another that signs whatever it likes."""

    def __init__(self, folder: Path) -> None:
        self.ours = Authority(folder, "ours")
        self.node = self.ours.issue("node")
        other = folder / "other"
        other.mkdir()
        self.other = Authority(other, "other")

    def client(self, certificate: Path | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ours.file)
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[Reached]:
    node = Reached(
        tmp_path_factory.mktemp("mutual"),
        KVTIDE_NODE_CERTIFICATE=str(pki.node),
        KVTIDE_NODE_AUTHORITY=str(pki.ours.file),
        KVTIDE_NODE_NAMES="prometheus:read ops.example.com:admin",
    )
    yield node
    node.stop()


def test_a_certificate_gives_the_role_of_its_name(mutual: Reached, pki: Pki) -> None:
    reader, operator = pki.client(pki.ours.issue("prometheus")), pki.client(pki.ours.issue("x", "ops.example.com"))
    nobody = pki.client(pki.ours.issue("nobody"))
    assert [mutual.ask("/metrics", tls)[0] for tls in (reader, operator, nobody)] == [200, 200, 401]
    assert [mutual.ask(FORGET, tls)[0] for tls in (reader, operator, nobody)] == [403, 422, 401]
    eventually(lambda: ("prometheus over HTTP", "forget", "refused") in mutual.acts())
    assert ("ops.example.com over HTTP", "forget", "UnknownTenantError") in mutual.acts()


@pytest.mark.parametrize("what", ["none", "expired", "of another authority", "signed by itself"])
def test_without_a_good_certificate_nothing_is_said(mutual: Reached, pki: Pki, what: str) -> None:
    made: dict[str, Callable[[], Path | None]] = {
        "none": lambda: None,
        "expired": lambda: pki.ours.issue("prometheus", expired=True),
        "of another authority": lambda: pki.other.issue("prometheus"),
        "signed by itself": lambda: Authority(pki.other.file.parent, "prometheus").issue("prometheus"),
    }
    tls = pki.client(made[what]())
    for page in PAGES:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            mutual.ask(page, tls)


def test_older_tls_is_not_spoken(mutual: Reached, pki: Pki) -> None:
    tls = pki.client(pki.ours.issue("prometheus"))
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        mutual.ask("/metrics", tls)


def test_plain_http_gets_nothing_from_https(mutual: Reached) -> None:
    with socket.create_connection(("127.0.0.1", mutual.port), timeout=30) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in sock.recv(1000)


@contextlib.contextmanager
def secured(node: Reached, tls: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", node.port), timeout=60) as raw,
        tls.wrap_socket(raw, server_hostname="127.0.0.1") as sock,
    ):
        yield sock


def test_who_never_shakes_hands_or_never_ends_a_request_keeps_nobody_out(mutual: Reached, pki: Pki) -> None:
    """More of them than are let in at a time. They lose their connection, and clients are served meanwhile."""
    tls = pki.client(pki.ours.issue("prometheus"))
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", mutual.port), timeout=60)) for _ in range(60)
        ]
        with Client(mutual.path) as client, client.session(MODEL) as session:
            session.store(prompt(2), data(PLAIN, prompt(2)))
            assert length(session, prompt(2)) == SIZE
        for sock in silent:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    with secured(mutual, tls) as slow, contextlib.suppress(ConnectionError, ssl.SSLError):
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert slow.recv(1) == b"", "it was given some seconds"
    with secured(mutual, tls) as large:
        large.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 10_000)
        assert large.recv(100).startswith(b"HTTP/1.1 431 ")
    assert mutual.ask("/metrics", tls)[0] == 200


def test_certificates_are_renewed_while_the_node_serves(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    client, node = ours.issue("client"), tmp_path / "served.pem"
    node.write_bytes(ours.issue("node", expired=True).read_bytes())
    names = {"KVTIDE_NODE_NAMES": "client:read", "KVTIDE_NODE_AUTHORITY": str(ours.file)}
    with contextlib.closing(_Stopping(tmp_path, KVTIDE_NODE_CERTIFICATE=str(node), **names)) as served:
        tls = ssl.create_default_context(cafile=ours.file)
        tls.load_cert_chain(client)
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            served.ask("/metrics", tls)
        node.write_bytes(ours.issue("node").read_bytes())
        assert served.ask("/metrics", tls)[0] == 200


class _Stopping(Reached):
    close = Process.stop


# -- commands -----------------------------------------------------------------------------------------------


def command(*words: str, **environment: str) -> tuple[int, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=known | {"COLUMNS": "160"} | environment,
    )
    return done.returncode, done.stdout + done.stderr


def test_commands_reach_a_node_by_a_certificate(mutual: Reached, pki: Pki, tmp_path: Path) -> None:
    address = f"https://127.0.0.1:{mutual.port}"
    ours = {"KVTIDE_NODE_AUTHORITY": str(pki.ours.file), "KVTIDE_SECURITY_AUDIT": str(tmp_path / "audit.jsonl")}
    admin = ours | {"KVTIDE_NODE_CERTIFICATE": str(pki.ours.issue("ops.example.com"))}
    reader = ours | {"KVTIDE_NODE_CERTIFICATE": str(pki.ours.issue("prometheus"))}
    code, said = command("status", address, "--once", **reader)
    assert (code, f"node {mutual.process.pid} at {mutual.path}" in said) == (0, True), said
    code, said = command("doctor", "node", address, **reader)
    assert (code, "no requests are recorded at this node" in said) == (0, True), said
    with Client(mutual.path) as client, client.session(MODEL) as session:
        session.store(prompt(3), data(PLAIN, prompt(3)))
        forget = ("forget", "--tenant", "default", "--node", address)
        code, said = command(*forget, **reader)
        assert (code, "forget needs the role admin, and prometheus over HTTP has read" in said) == (1, True), said
        assert length(session, prompt(3)) == SIZE
        code, said = command(*forget, "--node", "https://127.0.0.1:1", **admin)
        assert code == 1, said
        first, second = said.splitlines()
        assert first.startswith(f"{address}: done, ")
        assert second.startswith("https://127.0.0.1:1: failed: no node answers")
        assert length(session, prompt(3)) == 0
    others = admin | {"KVTIDE_NODE_AUTHORITY": str(pki.other.file)}
    code, said = command("status", address, "--once", **others)
    assert (code, "certificate verify failed" in said) == (2, True), "it is not the node that we trust"


def test_commands_reach_a_node_by_a_token_and_do_not_send_it_in_the_clear(tokens: Reached) -> None:
    code, said = command("status", f"http://127.0.0.1:{tokens.port}", "--json", KVTIDE_TOKEN=READ)
    assert (code, json.loads(said)["node"]["pid"]) == (0, tokens.process.pid)
    code, said = command("status", f"http://127.0.0.1:{tokens.port}", "--json")
    assert (code, "status needs the role read, and a stranger over HTTP has none" in said) == (2, True)
    code, said = command("status", "http://node.example.com:9410", "--json", KVTIDE_TOKEN=READ)
    assert (code, "http only to this host" in said) == (2, True)


@pytest.mark.parametrize("whose", ["ours", "other"])
def test_a_token_is_sent_to_whoever_has_a_good_certificate_alone(pki: Pki, whose: str) -> None:
    """Somebody answers in a node's place, with a certificate of an authority that we do not know."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.node if whose == "ours" else pki.other.issue("thief"))
    heard = bytearray()

    def answer(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line, contextlib.suppress(OSError), context.wrap_socket(line, server_side=True) as tls:
            heard.extend(tls.recv(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        node = HttpAdminClient(
            f"https://127.0.0.1:{listener.getsockname()[1]}", Node(authority=str(pki.ours.file)), {"KVTIDE_TOKEN": READ}
        )
        with pytest.raises(TierError, match="no node answers" if whose == "ours" else "certificate verify failed"):
            node.status()
        thread.join()
    assert (READ.encode() in heard, bool(heard)) == (whose == "ours", whose == "ours")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_certificates_made_as_the_documentation_says_are_good(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "node.md").read_text()
    (script,) = [s for s in re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "openssl req" in s]
    subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    node = Node(
        certificate=str(tmp_path / "host7.example.com.pem"), authority=str(tmp_path / "ca.pem"), names="ops:admin"
    )
    passes = HttpAuth(node)
    ours = client_tls(msgspec.structs.replace(node, certificate=str(tmp_path / "ops.pem")))
    assert passes.tls is not None
    ours.verify_flags |= ssl.VERIFY_X509_STRICT  # as later Pythons have it by default
    a, b, c, d = (ssl.MemoryBIO() for _ in range(4))
    server = passes.tls.wrap_bio(a, b, server_side=True)
    client = ours.wrap_bio(c, d, server_hostname="host7.example.com")
    for _ in range(3):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
            a.write(d.read())
            c.write(b.read())
    assert client.version() == "TLSv1.3"
    assert passes.of("", server.getpeercert()) == HttpCaller("ops", Role.ADMIN)


# -- what is refused at the start ---------------------------------------------------------------------------


def test_nobody_is_served_beyond_loopback_without_being_asked_who_he_is(tmp_path: Path, pki: Pki) -> None:
    command = [sys.executable, "-m", "kvtide", "node", "--socket", str(tmp_path / "s"), "--http"]
    for address in ("0.0.0.0:0", "[::]:0", ":0"):
        for more in ({}, {"KVTIDE_NODE_CERTIFICATE": str(pki.node)}):
            ended = subprocess.run(
                [*command, address], capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **more}
            )
            assert ended.returncode == 2, ended.stderr
            assert f"node.http is {address!r}, which other hosts can reach" in ended.stderr
            assert "node.tokens" in ended.stderr
            assert not (tmp_path / "s").exists()


def test_a_node_listens_nowhere_and_with_http_at_loopback_alone(tmp_path: Path) -> None:
    def listening(process: Process) -> set[str]:
        """Addresses at which it takes connections, as the kernel knows them."""
        inodes = set()
        for fd in Path(f"/proc/{process.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
        found = set()
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{process.process.pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in inodes and (words[3] == "0A" or table.startswith("udp")):
                    found.add(words[1].split(":")[0])
        return found

    node = Process(tmp_path)
    assert listening(node) == set()
    assert node.path.stat().st_mode & 0o777 == 0o600
    node.stop()
    node = Process(tmp_path, KVTIDE_NODE_HTTP="127.0.0.1:0")
    assert listening(node) == {"0100007F" if sys.byteorder == "little" else "7F000001"}
    node.stop()


def test_settings_that_would_keep_nobody_out_are_refused(pki: Pki, tmp_path: Path) -> None:
    both = {"certificate": str(pki.node), "authority": str(pki.ours.file)}
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text(TOKENS)
    file = f"file:{tmp_path / 'tokens'}"
    for settings, said in (
        ({"authority": str(pki.ours.file), "names": "a:read"}, "all three"),
        (both, "all three"),
        ({"certificate": str(pki.node), "names": "a:read"}, "all three"),
        (both | {"names": "a:all"}, "'a:all'"),
        (both | {"names": "a:read", "tokens": file}, "one of them"),
        ({"certificate": str(pki.ours.file)}, "a certificate and its key"),
        ({"certificate": str(tmp_path / "none")}, "No such file"),
        ({"tokens": READ}, "do not belong into a configuration"),
        ({"tokens": f"file:{tmp_path / 'none'}"}, "cannot read"),
        ({"tokens": "env:NONE"}, "that is set"),
        ({"tokens": "env:EMPTY"}, "there are none"),
        ({"tokens": "env:SHORT"}, "16 letters at least"),
        ({"tokens": "env:WRONG"}, "line 2 of env:WRONG"),
    ):
        environment = {"EMPTY": "# none", "SHORT": "a read short", "WRONG": f"a read {READ}\nb all {READ}"}
        with pytest.raises(ConfigError, match=said) as caught:
            HttpAuth(msgspec.structs.replace(Node(), **settings), environment)
        assert READ not in str(caught.value), "an error is shown, and logged"


def test_who_is_known_by_token_and_by_certificate(pki: Pki) -> None:
    passes = HttpAuth(Node(tokens="env:T"), {"T": TOKENS})
    assert passes.of(f"bearer  {ADMIN} ", None) == HttpCaller("ops", Role.ADMIN)
    assert passes.of("", {"subject": ((("commonName", "ops"),),)}) is None
    names = "a:read spiffe://house/kvtide:write b:admin"
    passes = HttpAuth(Node(certificate=str(pki.node), authority=str(pki.ours.file), names=names))
    several = {"subject": ((("commonName", "a"),),), "subjectAltName": (("URI", "spiffe://house/kvtide"),)}
    assert passes.of("", several) == HttpCaller("spiffe://house/kvtide", Role.WRITE)
    assert passes.of(f"Bearer {ADMIN}", {"subject": ((("organizationName", "b"),),)}) is None
    assert HttpAuth(Node()).of("", None) == HttpCaller("an unauthenticated caller", Role.READ)
