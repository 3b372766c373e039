"""Real client processes of a node, to be killed and stopped, and a board on which they say how they get on.

Run as a program it is a *zygote*: it imports everything once and forks a client for each line on its standard input, so
that a client costs milliseconds. Clients write on a board (a file that all map: a few counters for each thread) and, if
something is wrong, into a file of errors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["THREADS", "Crowd", "Job", "Person", "Player", "Row", "counting"]

THREADS = 2
COLUMNS = ["turns", "verified", "stored", "half", "held", "heard", "done"]
Row = npt.NDArray[np.int64]


def counting(name: str) -> int:
    """The column of a counter."""
    return COLUMNS.index(name)


@dataclass(frozen=True)
class Job:
    """The life of one client."""

    play: str
    """A module whose ``PLAYER`` makes a player of a job."""
    folder: str
    number: int
    seed: int

    @property
    def socket(self) -> Path:
        return Path(self.folder) / "node.sock"

    def board(self) -> npt.NDArray[np.int64]:
        return np.memmap(Path(self.folder) / "board", np.int64, "r+").reshape(-1, THREADS, len(COLUMNS))

    def wrong(self, text: str) -> None:
        """Say what the test must see."""
        with (Path(self.folder) / "errors").open("a") as file:
            file.write(f"client {self.number} (process {os.getpid()}): {text}\n")


class Person:
    """A client process. Signals go to that one, though its number may be another's by now."""

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.stopped = False
        self._pidfd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """And wait until it is dead, which it was before if something is wrong."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        assert select.select([self._pidfd], [], [], 60)[0], f"process {self.pid} does not die"
        os.close(self._pidfd)


class Crowd:
    """Clients with the numbers from 0 on, each of which plays ``play``."""

    def __init__(self, folder: Path, play: str, size: int, mark: Mapping[str, str]) -> None:
        self._folder = folder
        self._play = play
        np.zeros((size, THREADS, len(COLUMNS)), np.int64).tofile(folder / "board")
        self.board = Job(play, str(folder), 0, 0).board()
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", __name__, play],
            cwd=Path(__file__).parent.parent.parent,
            # Threads of a numerical library would not survive the fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.people: dict[int, Person] = {}

    def enter(self, number: int, seed: int) -> Person:
        """A client with that number begins."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self.board[number] = 0
        job = Job(self._play, str(self._folder), number, seed)
        self._zygote.stdin.write(json.dumps(asdict(job)) + "\n")
        self._zygote.stdin.flush()
        person = self.people[number] = Person(number, int(self._zygote.stdout.readline()))
        return person

    def kill(self, number: int) -> None:
        self.people.pop(number).kill()

    def count(self, number: int, column: str) -> int:
        return int(self.board[number, :, counting(column)].sum())

    def work(self, column: str) -> Row:
        """A counter of all threads of all clients, as it is now."""
        return self.board[:, :, counting(column)].copy()

    @property
    def errors(self) -> str:
        file = self._folder / "errors"
        return file.read_text() if file.exists() else ""

    def close(self) -> None:
        for number in list(self.people):
            self.kill(number)
        self._zygote.kill()
        self._zygote.wait()
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Player(Protocol):
    """What a client process does, in several threads, until it is killed."""

    def play(self, row: Row, thread: int) -> None:
        """The life of one thread; ``row`` is its place on the board."""

    def told(self) -> None:
        """SIGUSR1 came."""


def _live(job: Job, kind: Callable[[Job], Player]) -> None:
    def run(player: Player, thread: int) -> None:
        try:
            player.play(job.board()[job.number, thread], thread)
        except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
            job.wrong(traceback.format_exc())

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        player = kind(job)
    except BaseException:  # noqa: BLE001
        job.wrong(traceback.format_exc())
        return
    for thread in range(THREADS):
        threading.Thread(target=run, args=(player, thread), daemon=True).start()
    while True:
        signal.sigwait([signal.SIGUSR1])
        player.told()


def _jobs() -> Iterator[Job]:
    for line in sys.stdin:
        yield Job(**json.loads(line))


def main() -> None:
    kind = importlib.import_module(sys.argv[1]).PLAYER
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for job in _jobs():
        pid = os.fork()
        if not pid:
            _live(job, kind)
            os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
