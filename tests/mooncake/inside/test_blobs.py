"""The contract of shared storage, over a real master."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing.blobs import TIME, BlobsContract, names, value
from kvtide.testing.blocks import aligned
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
    """This client remembers the size of what it has read."""
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


def test_calls_that_poll_leave_a_core_for_the_bytes(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    under_way: list[int] = []
    most: list[int] = []
    call = Mooncake._call

    def counting(self: Mooncake, timeout: float, do: Callable[[Any], Sequence[int]]) -> list[int]:
        under_way.append(0)
        most.append(len(under_way))
        try:
            return call(self, timeout, do)
        finally:
            under_way.pop()

    monkeypatch.setattr(Mooncake, "_call", counting)
    with closing(Mooncake(master.url, transfers=8)) as blobs, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: blobs.write([(name, [value(name, 2 << 20)])], TIME), names(32)))
    assert max(most) == 1
