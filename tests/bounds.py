"""How much work is done under an index's lock, counted in blocks."""

from __future__ import annotations

import threading
from types import TracebackType

from kvtide.index.index import Index
from kvtide.store.store import Store

__all__ = ["WatchedLock", "watch"]


class WatchedLock:
    """Takes the place of an index's lock, and notes how many blocks left the index in any one hold of it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = index.lock
        self._depth = 0
        self._before = 0
        self.most = 0
        """The most blocks that left in one hold."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._lock.acquire(blocking, timeout)
        if got:
            self._depth += 1
            if self._depth == 1:
                self._before = len(self._index)
        return got

    def release(self) -> None:
        if self._depth == 1:
            self.most = max(self.most, self._before - len(self._index))
        self._depth -= 1
        self._lock.release()

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def watch(store: Store) -> WatchedLock:
    """Watch the lock of a store's index from now on. Nobody else may use the store at this moment."""
    watched = WatchedLock(store.index)
    store.index.lock = watched  # type: ignore[assignment]
    assert isinstance(watched._lock, type(threading.RLock()))
    return watched
