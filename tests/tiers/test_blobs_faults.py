"""Servers of shared storage that are killed, restarted, held in their tracks, full, or that refuse."""

from __future__ import annotations

import gc
import itertools
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import obstore
import pytest

from kvtide.errors import ConfigError, TierError
from kvtide.testing.blobs import TIME, cut, names, value
from kvtide.testing.blocks import aligned
from kvtide.testing.servers import S3Server, Server, ValkeyServer
from kvtide.tiers.shared.blobs import Blobs
from kvtide.tiers.shared.objects import Objects
from kvtide.tiers.shared.resp import ValkeyConnection, command
from kvtide.tiers.shared.valkey import Valkey

SHORT = 0.5
"""Seconds for a call that is to run out of them."""


def objects(server: S3Server) -> Objects:
    return Objects("s3://faults", endpoint=server.endpoint)


@pytest.fixture(params=["s3", "valkey"])
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Blobs]]:
    """A running server and its blobs. The server is alive again in the end, for the next test."""
    with ExitStack() as stack:
        if request.param == "s3":
            server: Server = request.getfixturevalue("s3")
            blobs: Blobs = objects(request.getfixturevalue("s3"))
        else:
            own = server = stack.enter_context(ValkeyServer(tmp_path / "valkey"))
            blobs = Valkey(own.url)
        stack.callback(blobs.close)
        yield server, blobs


def calls(blobs: Blobs, name: str, timeout: float) -> list[Callable[[], object]]:
    """One of each kind."""
    return [
        lambda: blobs.read([(name, [aligned(5000)])], timeout),
        lambda: blobs.read_part(name, aligned(100), 100, timeout),
        lambda: blobs.write([(names(1)[0], [aligned(5000)])], timeout),
        lambda: blobs.create(names(1)[0], b"", timeout),
        lambda: blobs.find([name], timeout),
        lambda: blobs.delete(names(1), timeout),
        lambda: list(blobs.list(timeout)),
    ]


def test_a_server_that_hangs_costs_a_caller_his_deadline(faulty: tuple[Server, Blobs]) -> None:
    server, blobs = faulty
    (name,) = names(1)
    blobs.write([(name, [value(name, 5000)])], TIME)
    server.hold()
    try:
        for call in calls(blobs, name, SHORT):
            with pytest.raises(TimeoutError, match="in time"):
                call()
    finally:
        server.resume()
    room = aligned(5000)
    assert blobs.read([(name, [room])], TIME) == [5000]
    assert room == value(name, 5000)


def test_nobody_uses_memory_after_a_call_has_ended(faulty: tuple[Server, Blobs]) -> None:
    """A write of many megabytes ran out of time half-way; then others use that memory, and the server wakes up."""
    server, blobs = faulty
    name, other = names(2)
    blobs.write([(other, [value(other, 100)])], TIME)  # the storage is known
    span = value(name, 32 << 20)
    server.hold()
    with pytest.raises(TimeoutError):
        blobs.write([(name, cut(span.toreadonly(), 4096))], SHORT)
    span[:] = bytes(len(span))
    server.resume()
    room = aligned(len(span))
    if blobs.read([(name, [room])], TIME) != [-1]:
        assert room == value(name, len(span))
    assert blobs.find([other], TIME) == [True]


def test_a_server_that_is_killed_and_comes_back(faulty: tuple[Server, Blobs]) -> None:
    server, blobs = faulty
    name, later = names(2)
    blobs.write([(name, [value(name, 5000)])], TIME)
    server.kill()
    try:
        for call in calls(blobs, name, TIME):
            with pytest.raises(OSError, match=r"reached|refused|closed|reset") as raised:
                call()
            assert not isinstance(raised.value, TimeoutError), "it is not there, and says so at once"
            assert raised.value.strerror, "reasons are counted by what they say"
    finally:
        server.start()
    if isinstance(server, S3Server):
        assert blobs.read([(name, [aligned(5000)])], TIME) == [5000]
    blobs.write([(later, [value(later, 5000)])], TIME)
    room = aligned(5000)
    assert blobs.read([(later, [room])], TIME) == [5000]
    assert room == value(later, 5000)


def test_a_server_that_dies_under_traffic(tmp_path: Path) -> None:
    """Every call ends, with an answer that is right or an error; afterwards all is well."""
    with ValkeyServer(tmp_path / "valkey") as server:
        blobs, over = Valkey(server.url), threading.Event()

        def work(_: int) -> int:
            rounds = 0
            while not over.is_set() or not rounds:
                mine = names(4)
                room = [aligned(300_000) for _ in mine]
                with suppress(OSError):
                    blobs.write([(name, [value(name, 300_000)]) for name in mine], TIME)
                    options = [(name, [span]) for name, span in zip(mine, room, strict=True)]
                    for name, span, count in zip(mine, room, blobs.read(options, TIME), strict=True):
                        assert count in (-1, 300_000)
                        assert count == -1 or span == value(name, 300_000)
                    rounds += 1
            return rounds

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(work, i) for i in range(4)]
            for _ in range(3):
                server.kill()
                server.start()
            over.set()
            assert all(d.result() for d in done)
        blobs.close()


# -- objects ----------------------------------------------------------------------------------------------------


def test_wrong_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    blobs = objects(s3)
    for call in calls(blobs, names(1)[0], TIME):
        with pytest.raises(OSError, match="does not accept these credentials"):
            call()
    blobs.close()


def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    blobs = Objects("s3://nowhere", endpoint=s3.endpoint)
    with pytest.raises(OSError, match="no such bucket"):
        blobs.read([(names(1)[0], [aligned(100)])], TIME)
    with pytest.raises(OSError, match="no such bucket"):
        list(blobs.list(TIME))
    blobs.close()


@pytest.mark.parametrize("url", ["", "bucket", "ftp://bucket", "http://host/bucket", "s3://"])
def test_an_url_that_is_no_object_store(url: str) -> None:
    with pytest.raises(ConfigError, match=r"objects\.url"):
        Objects(url)


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    text = rf"^objects\.certificate is '{tmp_path}/none', which cannot be read: No such file or directory\. Give"
    with pytest.raises(ConfigError, match=text):
        Objects("s3://bucket", certificate=str(tmp_path / "none"))


def test_storage_without_conditions_is_noticed_once(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It overwrites what it was told to create; so it is asked first, and can elect nobody."""
    real, modes = obstore.put_async, []

    def careless(*arguments: Any, mode: str, **more: Any) -> object:
        modes.append(mode)
        return real(*arguments, mode="overwrite", **more)

    monkeypatch.setattr(obstore, "put_async", careless)
    blobs, (name,) = objects(s3), names(1)
    for _ in range(3):
        assert blobs.write([(name, [value(name, 5000)])], TIME) == [True]
    assert modes == ["create", "create", "overwrite"], "tried twice, then written once"
    with pytest.raises(OSError, match="keeps no conditions"):
        blobs.create(name, b"", TIME)
    blobs.close()


def test_closing_ends_what_is_under_way(s3: S3Server) -> None:
    blobs, threads = objects(s3), threading.active_count()
    s3.hold()
    try:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(blobs.read, [(names(1)[0], [aligned(100)])], SHORT)
            blobs.close()
            with pytest.raises(OSError, match=r"closed|in time"):
                reading.result()
    finally:
        s3.resume()
    gc.collect()
    assert threading.active_count() < threads


# -- Valkey -----------------------------------------------------------------------------------------------------


def say(server: ValkeyServer, *words: bytes) -> object:
    """What a server replies to a command."""
    end = time.monotonic() + TIME
    with closing(ValkeyConnection(("127.0.0.1", server.port), None, end)) as connection:
        connection.send(command(*words), end)
        return connection.reply(end)


def test_a_full_server_evicts_and_stays_within_its_limit(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, maxmemory="20mb") as server, closing(Valkey(server.url)) as blobs:
        written = names(60)
        for name in written:
            blobs.write([(name, [value(name, 1 << 20)])], TIME)
        found = blobs.find(written, TIME)
        assert 0 < sum(found) < 20
        assert found[-1]


def test_a_server_that_is_full_of_what_it_may_not_evict(tmp_path: Path) -> None:
    settings = {"maxmemory": "20mb", "maxmemory_policy": "volatile-lru"}
    with ValkeyServer(tmp_path, **settings) as server, closing(Valkey(server.url, ttl=60)) as blobs:
        numbers = itertools.count()
        while say(server, b"SET", b"another's %d" % next(numbers), bytes(1 << 20)) == b"OK":
            pass
        (name,) = names(1)
        with pytest.raises(OSError, match="full"):
            blobs.write([(name, [value(name, 2 << 20)])], TIME)
        assert say(server, b"FLUSHALL") == b"OK"
        blobs.write([(name, [value(name, 2 << 20)])], TIME)
        assert blobs.read([(name, [aligned(2 << 20)])], TIME) == [2 << 20]


@pytest.mark.parametrize(
    ("settings", "ttl", "complaint"),
    [
        ({"maxmemory": "0"}, 0, "no limit of memory.*set maxmemory"),
        ({"maxmemory_policy": "noeviction"}, 0, "noeviction.*allkeys-lru"),
        ({"maxmemory_policy": "allkeys-random"}, 0, "does not evict by use"),
        ({"maxmemory_policy": "volatile-lru"}, 0, r"only what expires: set valkey\.ttl"),
        ({"maxmemory_policy": "volatile-lfu"}, 60, None),
        ({"requirepass": "sesame"}, 0, "does not accept this user and password"),
    ],
)
def test_a_server_that_is_not_fit_is_refused_with_what_to_do(
    tmp_path: Path, settings: dict[str, str], ttl: float, complaint: str | None
) -> None:
    with ValkeyServer(tmp_path, **settings) as server:
        if complaint is None:
            Valkey(server.url, ttl=ttl).close()
        else:
            with pytest.raises(TierError, match=complaint):
                Valkey(server.url, ttl=ttl)


def test_a_server_that_is_not_there_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = ValkeyServer(tmp_path)
    with caplog.at_level("WARNING", "kvtide.valkey"):
        blobs, (name,) = Valkey(server.url), names(1)
    assert caplog.messages == [
        f"Valkey at 127.0.0.1:{server.port} cannot be reached yet: Connection refused; all its blocks are misses until "
        "then. Check that it runs, and valkey.url"
    ]
    with pytest.raises(ConnectionRefusedError):
        blobs.find([name], TIME)
    with server:
        assert blobs.find([name], TIME) == [False]
    blobs.close()


def test_a_password(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("sesame\n")
    with ValkeyServer(tmp_path / "server", requirepass="sesame") as server:
        blobs = Valkey(server.url, password_file=str(secret))
        assert blobs.find(names(1), TIME) == [False]
        blobs.close()
        secret.write_text("wrong")
        with pytest.raises(TierError, match="WRONGPASS"):
            Valkey(server.url, user="default", password_file=str(secret))


@pytest.mark.parametrize("url", ["", "valkey", "http://host", "valkey://host/x", "valkey://:80", "valkey://host:port"])
def test_an_url_that_is_no_server(url: str) -> None:
    with pytest.raises(ConfigError, match=r"valkey\.url"):
        Valkey(url)


def test_a_secret_has_no_place_in_an_url() -> None:
    with pytest.raises(ConfigError, match=r"valkey\.password_file") as raised:
        Valkey("valkey://me:sesame@host")
    assert "sesame" not in str(raised.value)


def test_a_blob_is_gone_when_its_time_is_over(valkey: ValkeyServer) -> None:
    blobs, (name,) = Valkey(valkey.url, ttl=0.05), names(1)
    blobs.write([(name, [value(name, 100)])], TIME)
    end = time.monotonic() + TIME
    while blobs.find([name], TIME) == [True]:
        assert time.monotonic() < end, "it never expired"
    blobs.close()


def test_databases_are_apart(valkey: ValkeyServer) -> None:
    one, two, (name,) = Valkey(valkey.url), Valkey(f"{valkey.url}/3"), names(1)
    two.write([(name, [value(name, 100)])], TIME)
    assert (one.find([name], TIME), two.find([name], TIME)) == ([False], [True])
    one.close()
    two.close()


def test_what_does_not_speak_the_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        replies = [b"HTTP/1.1 400 Bad Request\r\n", b"x" * 100_000, b"$x\r\n", b":\r\n"]

        def serve() -> None:
            for reply in replies:
                with listener.accept()[0] as sock:
                    sock.recv(1000)
                    with suppress(OSError):
                        sock.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in replies:
            connection = ValkeyConnection(listener.getsockname(), None, time.monotonic() + TIME)
            connection.send(command(b"PING"), time.monotonic() + TIME)
            with pytest.raises(OSError, match="does not speak the protocol"):
                connection.reply(time.monotonic() + TIME)
            connection.close()
        thread.join()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[ValkeyServer]]:
    """Three servers with a third of the slots each."""
    with ExitStack() as stack:
        servers = [stack.enter_context(ValkeyServer(tmp_path / str(i), cluster_enabled="yes")) for i in range(3)]

        for i, server in enumerate(servers):
            first, last = i * 16384 // 3, (i + 1) * 16384 // 3 - 1
            assert say(server, b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % last) == b"OK"
            say(server, b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % servers[0].port)
        end = time.monotonic() + 60
        while not all(b"cluster_state:ok" in bytes(say(s, b"CLUSTER", b"INFO")) for s in servers):  # type: ignore[call-overload]
            assert time.monotonic() < end, "the cluster never came together"
            time.sleep(0.05)
        yield servers


def test_a_cluster(cluster: list[ValkeyServer]) -> None:
    blobs, written = Valkey(cluster[1].url), names(50)
    blobs.write([(name, cut(value(name, 20_000), 4096)) for name in written], TIME)
    room = [aligned(20_000) for _ in written]
    assert blobs.read([(n, [span]) for n, span in zip(written, room, strict=True)], TIME) == [20_000] * 50
    assert all(span == value(n, 20_000) for n, span in zip(written, room, strict=True))
    fresh = Valkey(cluster[2].url)
    assert {name for name, _, _ in fresh.list(TIME)} == set(written)
    cluster[0].kill()
    for name in written:
        with suppress(OSError):
            assert blobs.find([name], TIME) == [True]
    blobs.close()
    fresh.close()
    with pytest.raises(TierError, match="no database 2"):
        Valkey(f"{cluster[1].url}/2")


@pytest.fixture
def tunnel(valkey: ValkeyServer, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A port that speaks TLS and hands on to Valkey, whose test build does not; and its certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run([*request.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with suppress(OSError):
                    inner = context.wrap_socket(plain, server_side=True)
                    outer = socket.create_connection(("127.0.0.1", valkey.port))
                    for ends in ((inner, outer), (outer, inner)):
                        threads.append(threading.Thread(target=pump, args=ends))
                        threads[-1].start()
                    open_.extend((inner, outer))

    threads: list[threading.Thread] = []
    open_: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))
    server = threading.Thread(target=serve)
    server.start()
    yield listener.getsockname()[1], certificate
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join()
    for sock in open_:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for sock in open_:
        sock.close()


def test_tls(tunnel: tuple[int, Path]) -> None:
    port, certificate = tunnel
    blobs, (name,) = Valkey(f"valkeys://localhost:{port}", certificate=str(certificate)), names(1)
    blobs.write([(name, cut(value(name, 3 << 20), 4096))], TIME)
    room = aligned(3 << 20)
    assert blobs.read([(name, [room])], TIME) == [3 << 20]
    assert room == value(name, 3 << 20)
    blobs.close()


def test_tls_with_somebody_whom_nobody_trusts(tunnel: tuple[int, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "kvtide.valkey"):
        blobs = Valkey(f"valkeys://localhost:{tunnel[0]}")
    assert "cannot be reached yet: TLS failed: its certificate is not accepted: " in caplog.text
    assert "_ssl.c" not in caplog.text
    with pytest.raises(OSError, match=r"TLS failed: its certificate is not accepted: [a-z -]+$"):
        blobs.find(names(1), TIME)
    blobs.close()


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("nothing")
    for setting in ("certificate", "identity"):
        with pytest.raises(
            ConfigError, match=rf"^valkey\.{setting} is '.*/none', which cannot be used: [a-z ]+\. Give"
        ):
            Valkey("valkeys://localhost", **{setting: str(tmp_path / "none")})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"^valkey\.{setting} is .*/not', which cannot be used: No such file"):
            Valkey("valkeys://localhost", **{setting: str(tmp_path / "not")})  # type: ignore[arg-type]
