"""The contract of shared storage, over a real master."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvtide.testing.blobs import TIME, BlobsContract, names, value
from kvtide.testing.blocks import aligned
from kvtide.testing.interface import until
from kvtide.tiers.shared.blobs import Blobs
from kvtide.tiers.shared.mooncake import Mooncake
from tests.mooncake.servers import Holder, MooncakeMaster


@pytest.fixture(scope="module")
def opened(master: MooncakeMaster) -> Iterator[Mooncake]:
    """One for all tests: closing Mooncake's client takes a second."""
    blobs = Mooncake(master.url)
    yield blobs
    blobs.close()


class TestMooncake(BlobsContract):
    dated = False

    @pytest.fixture
    def blobs(self, opened: Mooncake, master: MooncakeMaster) -> Blobs:
        self.url = master.url
        return opened

    def make(self, where: Path) -> Blobs:
        return Mooncake(self.url)


def test_a_blob_that_another_client_replaced_by_one_of_another_size(opened: Mooncake, master: MooncakeMaster) -> None:
    """This client has read it before."""
    other = Mooncake(master.url)
    try:
        for sizes in ((200_000, 100_000), (100_000, 200_000)):
            (name,) = names(1)
            for size in sizes:
                other.write([(name, [value(name, size)])], TIME)
                for _ in range(2):
                    room = aligned(300_000)
                    assert opened.read([(name, [room[:4096], room[4096:]])], TIME) == [size]
                    assert room[:size] == value(name, size)
                    assert opened.read_part(name, aligned(300_000), 4096, TIME) == size - 4096
                other.delete([name], TIME)
            assert opened.read([(name, [aligned(300_000)])], TIME) == [-1]
    finally:
        other.close()


def test_what_goes_after_the_question_for_its_size_is_missing(
    opened: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = names(2)
    opened.write([(name, [value(name, 50_000)]) for name in (gone, stays)], TIME)
    ask = Mooncake._sizes

    def sizes(self: Mooncake, keys: Sequence[str], timeout: float) -> dict[str, int]:
        found = ask(self, keys, timeout)
        self.delete([gone], TIME)
        return found

    monkeypatch.setattr(Mooncake, "_sizes", sizes)
    room = aligned(50_000)
    assert opened.read([(gone, [aligned(50_000)]), (stays, [room])], TIME) == [-1, 50_000]
    assert room == value(stays, 50_000)


def test_bytes_that_went_with_their_holder_are_an_error_at_once(tmp_path: Path) -> None:
    """The master does not know yet that it has ended."""
    (name,) = names(1)
    with (
        MooncakeMaster(tmp_path, "--client_ttl=600") as server,
        Holder(server, 64 << 20) as holder,
        closing(Mooncake(server.url)) as blobs,
    ):
        blobs.write([(name, [value(name, 100_000)])], TIME)
        holder.kill()
        for _ in range(2):  # with and without its size
            with pytest.raises(OSError, match="is gone"):
                blobs.read([(name, [aligned(100_000)])], TIME)


def test_a_call_that_waits_for_bytes_leaves_the_cores_to_those_that_move_them(tmp_path: Path) -> None:
    (name,) = names(1)
    with (
        MooncakeMaster(tmp_path, "--client_ttl=600") as server,
        Holder(server, 64 << 20) as holder,
        closing(Mooncake(server.url)) as blobs,
        ThreadPoolExecutor(1) as pool,
    ):
        blobs.write([(name, [value(name, 8 << 20)])], TIME)
        holder.hold()
        reading = pool.submit(blobs.read, [(name, [aligned(8 << 20)])], TIME)
        with pytest.raises(TimeoutError):
            reading.result(0.5)  # the call is under way
        before = time.process_time()
        with pytest.raises(TimeoutError):
            reading.result(1.0)
        assert time.process_time() - before < 0.3
        holder.resume()
        assert reading.result(TIME) == [8 << 20]


def test_of_many_that_write_and_read_a_blob_all_do(opened: Mooncake) -> None:
    """The library has one session for an object."""
    (name,) = names(1)
    start = threading.Barrier(8)

    def work(_: int) -> bool:
        start.wait()
        for _ in range(10):
            assert opened.write([(name, [value(name, 300_000)])], TIME) == [True]
            room = aligned(300_000)
            assert opened.read([(name, [room])], TIME) == [300_000]
            assert opened.read_part(name, room[:4096], 0, TIME) == 4096
            if room != value(name, 300_000):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_write_that_failed_can_be_repeated(tmp_path: Path) -> None:
    """Also by another client: the master does not keep what was begun."""
    first, second = names(2)
    with (
        MooncakeMaster(tmp_path, "--client_ttl=600") as server,
        closing(Mooncake(server.url)) as blobs,
        closing(Mooncake(server.url)) as other,
    ):
        with Holder(server, 64 << 20):
            assert blobs.write([(first, [value(first, 100_000)])], TIME) == [True]
        # The master does not know yet that it has ended.
        with pytest.raises(OSError, match="is gone"):
            blobs.write([(second, [value(second, 100_000)])], TIME)
        assert blobs.find([second], TIME) == [False]
        with Holder(server, 64 << 20):
            for client in (other, blobs):
                until(lambda client=client: _written(client, second, 100_000))  # type: ignore[misc]
                client.delete([second], TIME)


def _written(blobs: Mooncake, name: str, size: int) -> bool:
    """Whether it was written, and can be read. The master may choose the holder that has ended."""
    room = aligned(size)
    try:
        blobs.write([(name, [value(name, size)])], TIME)
        return blobs.read([(name, [room])], TIME) == [size] and room == value(name, size)
    except OSError:
        return False
