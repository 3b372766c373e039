"""Whoever answers in a key service's place gets no token by a redirect, and holds nobody up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvtide import Store, Unwritten, config
from kvtide.security import wrapping
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import KeyRing
from kvtide.security.wrapping import Away, Unavailable, VaultWrapper
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt, until
from tests.security.vault import TOKEN, serving

KEY = bytes(range(32))
SECRET = b"64 bytes of secret".ljust(64, b".")


class Elsewhere:
    """Answers every request with a redirect to ``to``, or notes down whose token it got."""

    def __init__(self, to: str = "", code: int = 302) -> None:
        outer = self
        self.tokens: list[str] = []
        self.requests = 0

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.requests += 1
                outer.tokens += self.headers.get_all("X-Vault-Token") or []
                self.send_response(code if to else 200)
                if to:
                    self.send_header("Location", to if to.startswith("http") else f"{outer.url}{to}")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = answer  # noqa: N815 - http.server's names

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_token_does_not_follow_a_redirect(code: int) -> None:
    with Elsewhere() as thief, Elsewhere(f"{thief.url}/v1/transit/encrypt/kvtide", code) as false:
        made = VaultWrapper(f"{false.url}/transit/kvtide", {"VAULT_TOKEN": TOKEN})
        with pytest.raises(Away, match=rf"redirects \({code}\).*security\.key_source"):
            made.wrap(SECRET)
        assert (false.requests, thief.requests, thief.tokens) == (1, 0, [])


def test_a_redirect_to_itself_does_not_go_round() -> None:
    with Elsewhere("/v1/transit/encrypt/kvtide") as false:
        with pytest.raises(Away, match="redirects"):
            VaultWrapper(f"{false.url}/transit/kvtide", {"VAULT_TOKEN": TOKEN}).wrap(SECRET)
        assert false.requests == 1


class Dripper:
    """Sends ``begin`` and then ``piece`` for as long as its client stays, with a pause before each."""

    def __init__(self, begin: bytes, piece: bytes, pause: float) -> None:
        self._begin, self._piece, self._pause = begin, piece, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.asked = 0
        self.sent = 0
        self.left = threading.Event()
        """Somebody has hung up."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                self.asked += 1
                self._threads.append(threading.Thread(target=self._drip, args=(line,)))
                self._threads[-1].start()

    def _drip(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            line.recv(1 << 16)
            line.sendall(self._begin)
            while not self._stop.wait(self._pause):
                self.sent += line.send(self._piece)
        if not self._stop.is_set():
            self.left.set()

    def __enter__(self) -> Dripper:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wrapping, "_PATIENCE", 0.3)
    return iter(())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n"


@pytest.mark.parametrize(
    ("scheme", "begin", "piece"),
    [
        ("http", b"", b"H"),
        ("http", b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        ("http", b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ("http", HEAD, b" "),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        ("https", b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc", b"\x03"),
    ],
    ids=["status", "headers", "interim", "body", "chunks", "handshake"],
)
@pytest.mark.usefixtures("brief")
def test_an_answer_that_drips_ends_with_the_limit(scheme: str, begin: bytes, piece: bytes) -> None:
    with Dripper(begin, piece, 0.02) as slow:
        made = VaultWrapper(f"{scheme}://127.0.0.1:{slow.port}/transit/kvtide", {"VAULT_TOKEN": TOKEN})
        with pytest.raises(Away, match="does not answer within"):
            made.unwrap(b"vault:v1:abcd")
        assert slow.left.wait(30), "it is not read from any more: nothing of it stays behind"
        assert slow.asked == 1


def test_an_answer_without_an_end_is_cut() -> None:
    with Dripper(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" " * (1 << 16), 0) as endless:
        made = VaultWrapper(f"http://127.0.0.1:{endless.port}/transit/kvtide", {"VAULT_TOKEN": TOKEN})
        with pytest.raises(Away, match="more than 65536 bytes"):
            made.unwrap(b"vault:v1:abcd")
        assert endless.left.wait(30)
        assert endless.sent < 64 << 20, "what sockets had room for"


@pytest.mark.usefixtures("brief")
def test_one_dripping_answer_is_waited_for_by_all_tenants_together_and_the_others_keep_their_keys(
    tmp_path: Path,
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    tenants = [bytes([n]) * 16 for n in range(1, 6)]
    with Dripper(HEAD, b" ", 0.02) as slow, serving() as vault:
        good = VaultWrapper(vault.address, {"VAULT_TOKEN": TOKEN})
        key_ring = KeyRing(file, good)
        kept = [key_ring.of(tenant) for tenant in tenants[:2]]
        key_ring._wrapper = VaultWrapper(f"http://127.0.0.1:{slow.port}/transit/kvtide", {"VAULT_TOKEN": TOKEN})
        for tenant in tenants[2:]:
            with pytest.raises(Unavailable, match="does not answer within"):
                key_ring.of(tenant)
        assert slow.asked == 1, "the next tenants are told at once"
        assert [key_ring.of(tenant) for tenant in tenants[:2]] == kept
        assert [key_ring.find(key.id) for key in kept] == kept
        key_ring.close()


def test_a_store_goes_on_without_its_key_service_and_no_request_fails_or_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the lease nothing is lost; beyond it the tenant's blocks are misses, until the service is back."""
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    clock, tokens = FakeClock(), [prompt(n) for n in range(20)]
    with serving() as vault:
        how = config.read(
            None,
            env={},
            dram={"budget": "16MiB", "segment": "2MiB"},
            nvme={"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "2MiB", "store": "through"},
            security={
                "encrypt": True,
                "key_source": f"vault:{vault.address}",
                "key_file": str(tmp_path / "keys.json"),
                "lease": "60s",
            },
        )
        with Store(how, clock=clock) as home, home.session(MODEL) as session:

            def hits() -> int:
                return sum(length(session, some) == SIZE for some in tokens)

            for some in tokens:
                session.store(some, data(PLAIN, some))
            assert home.flush(60)
            assert home.key_ring is not None
            vault.sealed = True
            clock.advance(31)
            home.key_ring.tend()
            assert hits() == 20
            clock.advance(30)
            home.key_ring.tend()
            until(lambda: home.statistics().tiers["dram"].blocks == 0)
            asked = len(vault.asked)
            assert hits() == 0
            for some in tokens:
                assert session.store(some, data(PLAIN, some)).dropped == 0, "in memory there is room"
            assert hits() == 20
            assert len(vault.asked) - asked <= 1, "it is asked again after a pause, and not by every request"
            vault.sealed = False
            clock.advance(6)
            other = prompt(99)
            session.store(other, data(PLAIN, other))
            flushed = home.flush(60)
            assert (flushed.written, flushed.unwritten) == (1, {Unwritten.WRITE_FAILED: 20}), "and that is told"
        with Store(how, clock=clock) as home, home.session(MODEL) as session:
            assert length(session, prompt(99)) == SIZE, "what is stored when it is back is sealed and found again"
