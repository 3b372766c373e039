"""Blocks to and from an object store and Valkey, verified, compared with plain clients at the same concurrency.

The storage that the configuration names is measured, so that it can be any: ``objects.url``, ``valkey.url``. It may be
in use, so only its address is taken from the configuration. In an object store everything is written to a new folder,
which is removed at the end. Valkey must have enough free memory that it evicts nothing, and values written to it
expire. Blocks and the plain clients' values are written anew and removed in every round.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide import config as configuration
from kvtide.benchmarks.disk import Below
from kvtide.benchmarks.record import BenchRecord, Sample, compare, figure, timed
from kvtide.benchmarks.settings import MIB, Settings, block_sources, size_name
from kvtide.errors import ConfigError

__all__ = ["objects", "valkey"]

THREADS = 8
_PATIENCE = 120.0
"""Timeout in seconds, long enough to measure a slow storage too."""
_ROW = 16
"""Commands that are sent together."""
_VALKEY_THREADS = configuration.Valkey().threads
_EXPIRY = 3600
"""Seconds after which values in Valkey expire if a benchmark is killed."""

Put = Callable[[Sequence[str], Sequence[npt.NDArray[np.uint8]]], object]
Get = Callable[[Sequence[str], Sequence[npt.NDArray[np.uint8]]], object]


class PlainClient:
    """The limit: a plain client of the storage, ``row`` values per call, each into memory of the caller."""

    def __init__(
        self,
        nbytes: int,
        count: int,
        threads: int,
        row: int,
        put: Put,
        get: Get,
        remove: Callable[[str], object],
    ) -> None:
        self._total = nbytes * count
        self._names = [f"kvtide-bench/{i}" for i in range(count)]
        sources = block_sources(nbytes)
        self._blocks = [sources[i % 4] for i in range(count)]
        self._room = [np.zeros(nbytes, np.uint8) for _ in range(count)]
        self._row, self._put, self._get, self._remove = row, put, get, remove
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> Mapping[str, Sample]:
        store = timed(self._all, self._put, self._blocks, nbytes=self._total)
        load = timed(self._all, self._get, self._room, nbytes=self._total)
        assert np.array_equal(self._room[-1], self._blocks[-1])
        list(self._pool.map(self._remove, self._names))
        return {"store": store, "load": load}

    def _all(self, call: Put, values: list[npt.NDArray[np.uint8]]) -> None:
        starts = range(0, len(self._names), self._row)
        list(self._pool.map(lambda i: call(self._names[i : i + self._row], values[i : i + self._row]), starts))

    def close(self) -> None:
        self._pool.shutdown()


_REACH = ("url", "endpoint", "region", "user", "password_file", "certificate", "identity")
"""The settings that say where a storage is, and how it is reached."""


def _given(name: str) -> dict[str, Any]:
    """How to reach the storage that the user has configured. Its other settings, such as its budget, are not used."""
    section = getattr(configuration.read(), name)
    if not section.url:
        raise ConfigError(f"{name}.url is not set: name the storage to measure, KVTIDE_{name.upper()}_URL=...")
    return {field: getattr(section, field) for field in _REACH if field in section.__struct_fields__}


def objects(settings: Settings) -> Iterator[BenchRecord]:
    """Store to and load from an object store, verified, compared with obstore alone."""
    from obstore.store import from_url

    given = _given("objects") | {"threads": THREADS, "requests": THREADS, "timeout": _PATIENCE}
    given["url"] = f"{given['url'].rstrip('/')}/kvtide-bench-{secrets.token_hex(8)}"
    more: Any = {"endpoint": given["endpoint"]} if given["endpoint"] else {}
    store = from_url(
        given["url"],
        unsigned_payload=True,  # like the store's own requests
        client_options={"allow_http": given["endpoint"].startswith("http://")},
        **more,
    )

    def put(names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        store.put(names[0], values[0], use_multipart=False)

    def get(names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        np.copyto(
            values[0], np.frombuffer(memoryview(store.get_range(names[0], start=0, length=len(values[0]))), np.uint8)
        )

    try:
        for nbytes in (32 * MIB, 2 * MIB):
            count = settings.rounds(512, 256) * MIB // nbytes
            plain = PlainClient(nbytes, count, THREADS, 1, put, get, store.delete)
            yield from _records(settings, "objects", nbytes, count, given, plain, f"obstore alone, {THREADS} at a time")
    finally:
        for found in store.list():
            store.delete([each["path"] for each in found])


def valkey(settings: Settings) -> Iterator[BenchRecord]:
    """Store to and load from Valkey, verified, compared with a plain pipelined client."""
    from valkey import Valkey

    threads = _VALKEY_THREADS
    given = _given("valkey") | {"threads": threads, "timeout": _PATIENCE, "ttl": _EXPIRY}
    client: Any = Valkey.from_url(given["url"])

    def put(names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        row = client.pipeline(transaction=False)
        for name, value in zip(names, values, strict=True):
            row.set(name, value.data, ex=_EXPIRY)
        row.execute()

    def get(names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        row = client.pipeline(transaction=False)
        for name in names:
            row.get(name)
        for value, came in zip(values, row.execute(), strict=True):
            np.copyto(value, np.frombuffer(came, np.uint8))

    for nbytes in (2 * MIB, MIB // 4):
        count = settings.rounds(256, 64) * MIB // nbytes
        _check_room(client.info("memory"), count * nbytes)
        plain = PlainClient(nbytes, count, threads, _ROW, put, get, client.delete)
        against = f"valkey-py with libvalkey, {threads} threads, {_ROW} commands in a row"
        yield from _records(settings, "valkey", nbytes, count, given, plain, against)


def _check_room(memory: Mapping[str, Any], needed: int) -> None:
    """Refuse to measure a server that would evict other users' data."""
    most, used = int(memory.get("maxmemory", 0)), int(memory["used_memory"])
    if most and used + 2 * needed > most:
        raise ConfigError(
            f"the server at valkey.url has {max(0, most - used) // MIB} MiB of memory left, and {2 * needed // MIB} "
            "MiB would be written to it, which would evict what is there; give another KVTIDE_VALKEY_URL"
        )


def _records(
    settings: Settings, name: str, nbytes: int, count: int, given: dict[str, Any], plain: PlainClient, against: str
) -> Iterator[BenchRecord]:
    with contextlib.closing(Below(nbytes, count, name, given)) as ours, contextlib.closing(plain):
        rounds = compare({"kvtide": ours, "plain": plain}, settings.rounds(7, 3), settings.progress)
    for task in ("store", "load"):
        mine, theirs = rounds["kvtide"][task], rounds["plain"][task]
        limit = [s.speed for s in theirs]
        yield figure(
            f"{name}-{task}-{size_name(nbytes)}",
            "GB/s",
            [s.speed for s in mine],
            better="higher",
            limit=limit,
            against=against,
            reference=limit,
            bar=0.85,
            command=settings.command,
        )
        yield figure(
            f"{name}-{task}-cpu-{size_name(nbytes)}",
            "CPU s/GB",
            [s.cpu_per_gb for s in mine],
            better="lower",
            limit=[s.cpu_per_gb for s in theirs],
            against=against,
            reference=[s.cpu_per_gb for s in theirs],
            command=settings.command,
            note="ours: with the copy into DRAM and every checksum",
        )
