"""A real process, killed with SIGKILL at any moment, under load, again and again on the same directory.

After each death the directory is opened and every block in it is read: what can be read is right, what was dropped is
gone, the budget holds, nothing is left behind. Every fourth life has a directory of its own with room for everything,
where more can be asked: whatever was announced as written is there. Every fifth time the journal is lost or torn too.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.block import BlockKey
from kvtide.store.store import Store
from tests import crash_worker
from tests.books import agree, left_behind
from tests.crash_worker import CHAINS, DEPTH, Job

PATIENCE = 120.0


class Zygote:
    """Forks processes that are to be killed, and hears what they say."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash_worker"],
            cwd=Path(__file__).parent.parent,
            # Threads of a numerical library would not survive the fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._heard = b""

    def live_and_die(self, job: Job, reports: int, seconds: float) -> list[list[str]]:
        """Let a child work until it has reported so often, and a little longer; kill it; what did it say?"""
        assert self._process.stdin is not None
        self._process.stdin.write(crash_worker.line(job).encode())
        said = [self._next(PATIENCE)]
        while said[-1][0] != "p":
            said.append(self._next(PATIENCE))
        # Not by its number, which may be another's by the time that it is killed.
        child = os.pidfd_open(int(said[-1][1]))
        while len(said) <= reports and said[-1] != ["e"]:
            said.append(self._next(PATIENCE))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and said[-1] != ["e"]:
            said.append(self._next(left))
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and said why
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        while said[-1] != ["e"]:
            said.append(self._next(PATIENCE))
        wrong = [" ".join(words) for words in said if words[:1] == ["x"]]
        assert not wrong, wrong
        assert self._process.poll() is None
        return said

    def _next(self, seconds: float) -> list[str]:
        """The next line; none if it does not come in time, which only a lost zygote makes an error."""
        out = self._process.stdout
        assert out is not None
        while b"\n" not in self._heard:
            if not select.select([out], [], [], seconds)[0]:
                assert seconds < PATIENCE, "the worker says nothing any more"
                return []
            more = os.read(out.fileno(), 1 << 16)
            assert more, "the zygote is gone"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().split(" ")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


class Ledger:
    """What is known of the blocks in one directory."""

    def __init__(self) -> None:
        self.dropped: set[BlockKey] = set()
        """Dropped, acknowledged, and nobody has begun to store them again."""
        self.written: set[BlockKey] = set()
        """Announced as written."""
        self.doubtful: set[BlockKey] = set()
        """Somebody has begun to drop them, at some time."""

    def hear(self, said: list[list[str]]) -> None:
        for words in said:
            match words:
                case ["s", number, start]:
                    self.dropped.difference_update(KEYS[int(number)][int(start) :])
                case ["d", number, start]:
                    self.doubtful.update(KEYS[int(number)][int(start) :])
                case ["D", number, start]:
                    self.dropped.update(KEYS[int(number)][int(start) :])
                case ["a", key]:
                    self.written.add(BlockKey(bytes.fromhex(key)))


KEYS = [crash_worker.keys(number) for number in range(CHAINS)]


def check(job: Job, ledger: Ledger) -> int:
    """Open the directory that a process left behind, and read it all. Answers how many blocks it had."""
    folder = Path(job.folder)
    left_behind(folder, job.config.nvme.budget, {"journal.new", "probe", "kvtide.json.new"})
    readable = set()
    with Store(job.config, mapped=True) as store:
        sessions = crash_worker.sessions(store)
        for number in range(CHAINS):
            session = crash_worker.session_of(sessions, number)
            for depth in range(DEPTH):
                # Each by itself, so that the loss of its parents hides nothing.
                if crash_worker.read(session, number, depth + 1, have=depth) > depth:
                    readable.add(KEYS[number][depth])
        agree(store)
    left_behind(folder, job.config.nvme.budget)
    assert not readable & ledger.dropped, "dropped blocks came back"
    if job.roomy:
        lost = ledger.written - ledger.doubtful - readable
        assert not lost, f"{len(lost)} of {len(ledger.written)} blocks that were announced as written are lost"
    return len(readable)


def spoil_journal(path: Path, rng: random.Random) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    match rng.randrange(3):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[: rng.randrange(len(data) + 1)])
        case 2 if data:
            at = rng.randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])


def resources() -> tuple[int, int, set[str]]:
    """Descriptors, mappings of arenas, and shared memory, of this process or of none."""
    maps = Path("/proc/self/maps").read_text().count("memfd:kvtide")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return descriptors, maps, {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("kvtide")}


def kill_again_and_again(zygote: Zygote, folder: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    tight = Ledger()
    found: Counter[str] = Counter()
    before = resources()
    for life in range(times):
        roomy = life % 4 == 3
        ledger = Ledger() if roomy else tight
        job = Job(
            folder=str(folder / (f"roomy-{life}" if roomy else "tight")),
            seed=rng.randrange(1 << 32),
            roomy=roomy,
            when="through" if roomy else rng.choice(["through", "eviction", "second-touch"]),
            codec=rng.choice(["raw", "zstd"]),
            durable=rng.random() < 0.3,
        )
        reports = rng.choice([0, 1, rng.randrange(10), rng.randrange(150)])
        ledger.hear(zygote.live_and_die(job, reports, rng.random() * 0.02))
        if not Path(job.folder).exists():
            continue  # killed before it had begun
        if life % 5 == 4:
            spoil_journal(Path(job.folder) / "journal", rng)
        blocks = check(job, ledger)
        found["roomy" if roomy else "tight"] += blocks
        found["dropped"] += len(ledger.dropped)
        if roomy:
            found["announced"] += len(ledger.written)
            shutil.rmtree(job.folder)
        assert resources() == before, f"leaked after {life + 1} lives"
    assert all(found[what] for what in ("roomy", "tight", "dropped", "announced")), f"nothing was tried: {found}"


def test_killed_at_any_moment(zygote: Zygote, tmp_path: Path) -> None:
    kill_again_and_again(zygote, tmp_path, 45, seed=1)


@pytest.mark.long
def test_killed_at_any_moment_for_long(zygote: Zygote, tmp_path: Path) -> None:
    kill_again_and_again(zygote, tmp_path, 500, seed=random.SystemRandom().randrange(1 << 32))
