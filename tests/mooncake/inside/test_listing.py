"""The list of blobs, which comes from the HTTP server of the master."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from kvtide.testing.blobs import TIME, names, value
from kvtide.tiers.shared.mooncake import Mooncake
from kvtide.tiers.shared.mooncake_client import load_library
from tests.mooncake.servers import MooncakeMaster


def test_it_has_every_blob_whatever_keys_others_have(master: MooncakeMaster) -> None:
    store = load_library().MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address) == 0
    keys = [b"list:\xff", "list:a&b", "list:a#b", "list:a%41", "list:a,b", "list:a b", "x list:a", "x\nlist:a"]
    with closing(Mooncake(master.url, folder="list")) as blobs, closing(store):
        assert [store.put(key, b"x") for key in keys] == [0] * len(keys)
        mine = names(100)
        blobs.write([(name, [value(name, 100)]) for name in mine], TIME)
        assert sorted(blobs.list(TIME)) == sorted((name, 100, 0.0) for name in mine)


@contextmanager
def _admin(answer: Callable[[str], Iterator[bytes]]) -> Iterator[Mooncake]:
    """A client of a master whose HTTP server answers so to a path, and which has nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for part in answer(self.path.partition("?")[0]):
                    self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with closing(Mooncake(f"mooncake://127.0.0.1:9?admin={server.server_port}")) as blobs:
            yield blobs
        server.shutdown()


def test_one_that_comes_byte_by_byte_ends_in_time() -> None:
    over = Event()

    def slowly(_: str) -> Iterator[bytes]:
        while not over.wait(0.01):
            yield b"x"

    with _admin(slowly) as blobs, ThreadPoolExecutor(1) as pool:
        listing = pool.submit(lambda: list(blobs.list(0.3)))
        try:
            with pytest.raises(TimeoutError, match="did not answer in time"):
                listing.result(30)
        finally:
            over.set()


def test_keys_of_others_take_no_memory() -> None:
    others = b"".join(b"other:%064d\n" % number for number in range(10_000))

    def answer(path: str) -> Iterator[bytes]:
        if path == "/get_all_keys":
            yield from (others for _ in range(64))  # 45 MB
            yield b"kvtide:a\nkvtide:b"
        else:
            yield b'{"data":{"kvtide:a":{"ok":true,"values":[{"size_":5}]},"kvtide:b":{"ok":false}}}'

    with _admin(answer) as blobs:
        tracemalloc.start()
        try:
            assert list(blobs.list(TIME)) == [("a", 5, 0.0)]
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
        finally:
            tracemalloc.stop()


def test_a_line_without_an_end_is_an_error() -> None:
    with (
        _admin(lambda _: (b"x" * (1 << 20) for _ in range(64))) as blobs,
        pytest.raises(OSError, match="as expected"),
    ):
        list(blobs.list(TIME))


@pytest.mark.parametrize("garbage", [b"?", b"[]", b"{}", b'{"data":{"kvtide:a":null}}', b'{"data":{}}'])
def test_one_that_is_garbage_is_an_error(garbage: bytes) -> None:
    answers = {"/get_all_keys": b"kvtide:a\n"}
    with (
        _admin(lambda path: iter([answers.get(path, garbage)])) as blobs,
        pytest.raises(OSError, match="as expected"),
    ):
        list(blobs.list(TIME))
