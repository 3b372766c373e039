"""Makes the node's memory accessible to a client: addresses of slots, and descriptors of segments new to the client."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvtide.index.index import DRAM, Rows
from kvtide.index.lease import Reservation
from kvtide.node import protocol as p
from kvtide.store.backend import LocalBackend, LocalPrefixLease
from kvtide.store.store import Store

__all__ = ["LentSegment", "SegmentExporter"]


class LentSegment(NamedTuple):
    """A segment whose descriptor is about to be sent to a client."""

    serial: int
    fd: int
    nbytes: int


class SegmentExporter:
    """The segments known to one client; ``writable``: whether it may write to them."""

    def __init__(self, store: Store, writable: bool) -> None:
        self._drams = [partition.dram for partition in store.partitions]
        self._writable = writable
        self._known: set[int] = set()
        """Segments whose descriptors the client has."""
        self._new: list[LentSegment] = []
        self._removals = 0

    def slots(self, backend: LocalBackend, holding: LocalPrefixLease) -> p.Collected:
        """The slots of a leased prefix."""
        blocks, first, places = backend.places(holding)
        slots = [p.Slots(first[g.name], self._addresses(backend, places[g.name])) for g in backend.layout.groups]
        return p.Collected(blocks, slots)

    def reserved(self, number: int, made: Reservation, backend: LocalBackend, addressed: bool = True) -> p.Reserved:
        """A reservation and, if ``addressed``, the addresses of its slots for this client to write."""
        groups = [backend.numbers[k[32:]] for k in made.keys]
        places = self._addresses(backend, backend.partition.index.place[DRAM][made.rows]) if addressed else b""
        return p.Reserved(number, made.refused, groups, list(made.depths), places, made.pending, made.later)

    def _addresses(self, backend: LocalBackend, places: Rows) -> bytes:
        dram = backend.partition.dram
        found, serials = dram.addresses(places)
        for serial in serials - self._known:
            # A copy: a later operation of the same frame may free the segment.
            self._new.append(LentSegment(serial, self._copy(dram.descriptor(serial)), dram.nbytes(serial)))
            self._known.add(serial)
        return found.tobytes()

    def _copy(self, fd: int) -> int:
        return os.dup(fd) if self._writable else os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def take_new(self) -> list[LentSegment]:
        """The segments to send with the next reply; the caller closes the descriptors."""
        new, self._new = self._new, []
        return new

    def gone(self) -> list[int]:
        """Segments that the client has and that were removed; each is returned once."""
        removals = sum(dram.removals for dram in self._drams)
        if removals == self._removals:
            return []
        self._removals = removals
        gone = sorted(self._known.difference(*(dram.serials for dram in self._drams)))
        self._known.difference_update(gone)
        return gone

    def close(self) -> None:
        for lent in self.take_new():
            os.close(lent.fd)
