"""Connects to a host within a deadline, the resolution of its name included.

The system's resolver cannot be interrupted, and while no name server answers it takes up to a minute. A node that stops
must not wait for that, because it would lose the time in which it writes its blocks. So a name is resolved on a thread
of its own, which callers leave at their deadline. A caller who needs the same name meanwhile waits for the same thread,
so there is one for each name at most. Addresses in digits need none.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtide import forks

__all__ = ["tcp_connect"]


def tcp_connect(where: tuple[str, int], end: float) -> socket.socket:
    """A socket that is connected to one of the addresses of a host, in blocking mode. Raises OSError: TimeoutError if
    ``end`` has come, as ``time.monotonic`` tells it. Each address gets an equal part of the time that is left, so one
    that says nothing does not hide the next."""
    found = _resolved(where, end)
    failure: OSError = TimeoutError(errno.ETIMEDOUT, "it does not answer")
    for n, (family, kind, protocol, _, to) in enumerate(found):
        if (left := end - time.monotonic()) <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left / (len(found) - n))
            sock.connect(to)
            sock.settimeout(None)
        except OSError as e:
            sock.close()
            failure = e
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


class _Resolution:
    """Of one name."""

    def __init__(self) -> None:
        self.found: Sequence[tuple[Any, ...]] = ()
        self.failure: OSError | None = None
        self.ended = threading.Event()

    def run(self, key: tuple[forks.Process, str, int]) -> None:
        try:
            self.found = socket.getaddrinfo(*key[1:], type=socket.SOCK_STREAM)
        except OSError as e:
            self.failure = e
        finally:
            _under_way.pop(key, None)
            self.ended.set()


_under_way: dict[tuple[forks.Process, str, int], _Resolution] = {}
"""By name and port. A forked child has none of its parent's threads, and so waits for none of them."""


def _resolved(where: tuple[str, int], end: float) -> Sequence[tuple[Any, ...]]:
    """What ``getaddrinfo`` says."""
    try:
        where[0].encode("idna")  # as the resolver will
    except UnicodeError:
        raise OSError(errno.EINVAL, f"{where[0]!r} is no host name") from None
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    key, mine = (forks.here, *where), _Resolution()
    try:
        one = _under_way.setdefault(key, mine)  # two threads at once get the same one, without a lock
        if one is mine:
            threading.Thread(target=mine.run, args=(key,), name="kvtide-resolve", daemon=True).start()
    except BaseException as e:  # an interrupt, or there are no more threads
        if _under_way.get(key) is mine:
            del _under_way[key]
        if isinstance(e, RuntimeError):
            raise OSError(errno.EAGAIN, f"there is no thread to resolve the name {where[0]}") from e
        raise
    if not one.ended.wait(max(0.0, end - time.monotonic())):
        raise TimeoutError(errno.ETIMEDOUT, f"no name server has answered for {where[0]}")
    if one.failure is not None:
        raise socket.gaierror(one.failure.errno, f"{one.failure.strerror} ({where[0]})") from one.failure
    return one.found
