"""The end of a client: when its slots may be given to others.

A client's rights (prefix leases, reservations, a worker's use of either) let its process read or write slots of the
node's memory. A closed socket is not enough to take them back: a process that is stopped (SIGSTOP) may later go on
writing into its slots. Each client therefore sends a pidfd of its process with its hello. When its socket closes, the
node keeps its rights until that pidfd reports the exit, or until the same process says, over another connection, that
it does not use them any more. Until then the slots are in quarantine: no other block is stored in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from kvtide.node import work_limits
from kvtide.node.server.loop import Loop

__all__ = ["ClientExit"]


class ClientExit:
    """Gives back the rights of one client, once. For use in the node's loop."""

    def __init__(self, loop: Loop, pidfd: int, give_back: Callable[[], Iterator[int]]) -> None:
        """``give_back`` gives back the rights, step by step, and yields the units of work of each step."""
        self._loop = loop
        self._pidfd = pidfd
        self._give_back = give_back
        self._waiting = self._ended = False

    def wait(self) -> None:
        """Give the rights back when the process has exited."""
        self._waiting = True
        self._loop.add_reader(self._pidfd, self.end)

    def end(self) -> None:
        """Give the rights back now: the process has exited, or does not use them any more."""
        if self._ended:
            return
        self._ended = True
        if self._waiting:
            self._loop.remove_reader(self._pidfd)
        self._run(self._give_back())

    def _run(self, steps: Iterator[int]) -> None:
        """Run the steps in turns: the client may have held so much that the other clients would have to wait."""
        spent = 0
        for units in steps:
            spent += units
            if spent >= work_limits.TURN:
                self._loop.after_others(lambda: self._run(steps))
                return
        os.close(self._pidfd)
