"""A caller is interrupted between any two steps: by Ctrl-C, or by a signal handler that raises.

CPython looks for signals when a function is entered, when a call has returned and when a loop goes back. A trace
function raises an exception at one such point inside kvtide, in the caller's thread alone. Then everybody else's calls
must work, what is found must be right, and with the next call nothing may be left of the interrupted one: no right, no
slot, no charge, no byte in a queue.
"""

from __future__ import annotations

import dis
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide import Unwritten
from kvtide.index.index import ABSENT, DRAM
from kvtide.store.session import Session
from kvtide.store.store import Store

SOURCE = str(Path(kvtide.__file__).parent)
LIBRARY = (threading.__file__,)
LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD_IF_TRUE"}
LOOKS |= {"POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE"}

LAYOUT = kvtide.Layout.attention(layers=1, heads=1, head_dim=128, dtype="bfloat16", block_tokens=16, page=16)
MODEL = kvtide.Model(LAYOUT, weights="given:interrupts")
NBYTES = LAYOUT.geometry["full"].nbytes
BLOCKS = 4
KNOWN = 60
"""Prompts that were stored before: more than DRAM holds."""


class Interrupted(Exception):  # noqa: N818 - no error of ours
    """What a signal handler raises: it need not be a KeyboardInterrupt."""


def looks(code: CodeType, at: int) -> bool:
    """Whether CPython looks for signals when it has done the instruction at ``at``."""
    return dis.opname[code.co_code[at]] in LOOKS


@cache
def handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """The ranges of instructions that have an exception handler, and where it is."""
    return [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]  # type: ignore[attr-defined]


def same_handler(code: CodeType, one: int, other: int) -> bool:
    found = [next((to for start, end, to in handlers(code) if start <= at < end), None) for at in (one, other)]
    return found[0] == found[1]


class Points:
    """Counts the points at which CPython would look for signals, and raises at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self._at = at
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Points | None:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) and name not in LIBRARY:
            return None
        if frame.f_code.co_name == "__del__":  # what is raised there is printed by CPython, and nobody gets it
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            here, before = frame.f_lasti, self._last.get(frame)
            # The exception would be raised by the instruction before, under the same handlers.
            if before is not None and looks(frame.f_code, before) and same_handler(frame.f_code, before, here):
                self.count += 1
                if self.count == self._at:
                    place = f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
                    raise Interrupted(place)
            self._last[frame] = here
        return self

    def run(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # CPython 3.12 gives no events for opcodes unless this was set before
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(before)
            self._last.clear()  # else these frames would keep what an interrupted call has forgotten


def prompt(number: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(number * 10_000, number * 10_000 + BLOCKS * 16, dtype=np.uint32)


def content(number: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    return [np.full(NBYTES, (7 * number + i) % 251, np.uint8) for i in range(BLOCKS)]


class World:
    """A small store with more on disk than DRAM holds."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.store: Store = kvtide.open(
            dram={"budget": "1MiB", "segment": "1MiB"},
            nvme={"path": str(path), "budget": "16MiB", "segment": "1MiB", "threads": 2, **settings},
        )
        self.session: Session = self.store.session(MODEL)
        self.fresh = KNOWN
        self.place = ""
        """Where a call was interrupted last."""
        for number in range(KNOWN):
            self.session.store(prompt(number), content(number))
        assert self.store.flush()

    def new(self) -> int:
        self.fresh += 1
        return self.fresh

    def check(self, durable: bool = False) -> None:
        """After an interruption: the next call ends what was left, others' calls work, and every byte is right.

        ``durable``: others want to have the last prompt durable.
        """
        assert not self.store.index.lock_is_mine(), f"interrupted at {self.place}, the lock was not given back"
        self.session.find(prompt(0))
        failures: list[BaseException] = []

        def others() -> None:
            try:
                number = self.new()
                stored = self.session.store(prompt(number), content(number))
                for known in (number, number % KNOWN, 1):
                    with self.session.match(prompt(known)) as match:
                        loaded = self.session.load(match).wait(60)
                        for view, expected in zip(loaded.blocks, content(known), strict=False):
                            assert bytes(view) == expected.tobytes(), "wrong bytes"
                with self.session.match(prompt(number)) as match:
                    assert stored.dropped or match.tokens == BLOCKS * 16, "what another caller stored is not found"
                if durable:
                    done = self.session.store(prompt(number - 1), content(number - 1), durable=True).wait(60)
                    assert not {Unwritten.TIMEOUT, Unwritten.CANCELLED} & done.reasons.keys(), "others wait in vain"
                assert self.store.flush(60)
            except BaseException as e:  # noqa: BLE001 - raised below
                failures.append(e)

        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        thread.join(60)
        if thread.is_alive():
            stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))
            pytest.fail(f"interrupted at {self.place}, another caller hangs:\n{stack}")
        if failures:
            raise failures[0]
        end = time.monotonic() + 60
        while len(self.store.pipeline.persister) and time.monotonic() < end:
            time.sleep(0.001)  # what an interrupted call has begun goes on
        assert not len(self.store.pipeline.persister), f"interrupted at {self.place}, a request never ends"
        demotion = self.store.pipeline._demotion
        left = [demotion._watchers, *demotion._under_way.values(), *demotion._requested.values()]
        assert not any(left), f"interrupted at {self.place}, writes on request are left"
        self.session.match(prompt(0)).release()
        found = self.store.statistics()
        line = found.pipeline
        assert (found.held, line.leases, line.reservations, line.pending) == (0, 0, 0, 0), self.place
        for lane in found.lanes.values():
            assert (lane.read_bytes_waiting, lane.write_bytes_waiting, lane.blocks_under_way) == (0, 0, 0)
        index = self.store.index
        with index.lock:
            here = int(np.count_nonzero(index.state[DRAM][: index.size] != ABSENT))
        assert self.store.dram.blocks == here, "a slot of DRAM is nobody's"
        assert not self.store.pipeline.blocks_doomed

    def verbs(self) -> dict[str, Callable[[], object]]:
        session, known = self.session, random.Random(self.fresh).randrange(KNOWN)

        def load() -> None:
            with session.match(prompt(known)) as match:
                session.load(match).wait(60)

        def copy() -> None:
            with session.match(prompt(known)) as match:
                session.load(match, into=[np.empty(NBYTES, np.uint8) for _ in range(BLOCKS)]).wait(60)

        def reserve() -> None:
            with session.reserve(prompt(self.new())) as reservation:
                for view in reservation.views:
                    view[:] = bytes(len(view))
                reservation.seal()

        def pin() -> None:
            session.pin(prompt(known))
            session.unpin(prompt(known))

        return {
            "store": lambda: session.store(prompt(self.fresh + 1), content(self.fresh + 1)),
            "durable": lambda: session.store(prompt(self.fresh + 1), content(self.fresh + 1), durable=True),
            "match": lambda: session.match(prompt(known)).release(),
            "load": load,
            "copy": copy,
            "reserve": reserve,
            "prefetch": lambda: session.prefetch(prompt(known)).wait(60),
            "drop": lambda: session.drop(prompt(self.new())),
            "pin": pin,
            "expect": lambda: session.expect(prompt(known), turn="tool", returns_in=1000),
        }


@pytest.fixture(scope="module", params=["through", "eviction"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("interrupts"), store=request.param)
    yield world
    world.store.close()


VERBS = ["store", "durable", "match", "load", "copy", "reserve", "prefetch", "drop", "pin", "expect"]


def interrupt(world: World, verb: str, at: int) -> bool:
    """Do a verb and interrupt it there; False if it ended before."""
    try:
        Points(at).run(world.verbs()[verb])
    except Interrupted as e:
        world.place = str(e)
        return True
    return False


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_left_of_a_call_that_is_interrupted_anywhere(world: World, verb: str) -> None:
    points = Points()
    points.run(world.verbs()[verb])
    world.check()
    chance = random.Random(verb)
    interrupted = 0
    for at in sorted(chance.sample(range(1, points.count), min(25, points.count - 1))):
        interrupted += interrupt(world, verb, at)
        world.new()
        world.check(verb == "durable")
    assert interrupted, "no call was interrupted: this test tested nothing"


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_left_of_a_call_that_is_interrupted_at_hundreds_of_points(world: World, verb: str) -> None:
    points = Points()
    points.run(world.verbs()[verb])
    for at in range(1, points.count, max(1, points.count // 400)):
        interrupt(world, verb, at)
        world.new()
        world.check(verb == "durable")


def test_a_real_signal_may_come_at_any_time(tmp_path: Path) -> None:
    """As a caller would use it: a timer whose handler raises, over loops of stores and loads."""
    world = World(tmp_path)

    def late(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, late)
    chance = random.Random(1)
    try:
        for turn in range(40):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-4, 4e-3))
                try:
                    while True:
                        world.verbs()["store" if turn % 2 else "load"]()
                        world.new()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                pass
            if turn % 8 == 7:
                # A match whose ``with`` was interrupted on the way out, with views given out, ends with its session.
                world.session.close()
                world.session = world.store.session(MODEL)
                world.check()
    finally:
        signal.signal(signal.SIGALRM, before)
    world.store.close()


def test_a_close_that_is_interrupted_can_be_repeated_and_lets_go_of_the_folder(tmp_path: Path) -> None:
    for n, at in enumerate([1, 5, 20, 60, 120, 240, 480]):
        folder = tmp_path / str(n)
        world = World(folder)
        try:
            Points(at).run(world.store.close)
        except Interrupted:
            world.store.close()
        again = kvtide.open(dram={"budget": "1MiB"}, nvme={"path": str(folder), "budget": "16MiB"})
        again.close()
