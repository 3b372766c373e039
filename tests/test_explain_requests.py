"""Past requests of ``explain``: what is remembered of them is what they got, and remembering them delays nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

import kvtide
from kvtide import Explanation, Model, Session, Why
from kvtide.index.absence_log import Absence
from kvtide.index.keys import DEFAULT_TENANT, Chain
from kvtide.node import protocol as p
from kvtide.node import work_limits
from kvtide.store.backend import LocalBackend
from kvtide.store.explanation import ExplainedBlocks
from kvtide.store.recent_requests import RANGES, RecentRequest, RecentRequests
from kvtide.testing.clock import FakeClock
from tests.node.raw import answer, dialled, greet
from tests.node.serving import eventually
from tests.plan.small import MODEL, keep, prompt
from tests.test_explain import World, counted, opened

__all__ = ["opened"]

Opener = Callable[..., World]


def past(session: Session, request: str) -> Explanation:
    found = session.explain_request(request)
    assert found is not None
    return found


def explained(name: str = "", now: float = 0.0, missed: int = 1) -> Explanation:
    return Explanation(16, 16, (ExplainedBlocks(0, missed, Why.NEVER_SEEN),), now, request=name)


def request(name: str, **more: object) -> RecentRequest:
    fields = {"tenant": b"t", "who": frozenset([1]), "nbytes": 0, "explain": explained} | more
    return RecentRequest(name, **fields)  # type: ignore[arg-type]


# -- what it got is what is told --------------------------------------------------------------------------------


def test_a_request_that_waited_for_shared_storage_is_told_as_it_ended(opened: Opener, tmp_path: Path) -> None:
    shared = {"path": str(tmp_path / "shared")}
    writer = World("embedded", tmp_path, files=shared)
    with writer.host.session(MODEL) as session:
        keep(session, 1, 2, 3)
        assert writer.store.flush(30)
    writer.close()
    world = opened(files=shared)
    with world.host.session(MODEL) as session:
        session.match(prompt(1, 2, 3, 4), request="hurried").release()
        assert [some.why for some in past(session, "hurried").blocks] == [Why.SEARCHED]
        assert "being searched for in shared storage" in str(past(session, "hurried"))
        with session.match(prompt(1, 2, 3), wait=30, request="patient") as match:
            assert match.blocks == 3
        assert past(session, "patient").hits == 3
        assert past(session, "patient").by_reason() == {}
        assert counted(world).misses == {}


def test_a_later_match_of_a_request_replaces_the_one_before_and_is_not_counted_again(opened: Opener) -> None:
    world = opened()
    with world.host.session(MODEL) as session:
        session.match(prompt(1), request="one").release()
        assert past(session, "one").by_reason() == {"never seen": 1}
        keep(session, 1)
        session.match(prompt(1, 2), record=False, request="one").release()
        assert past(session, "one").hits == 1
        recent = counted(world)
        assert (recent.requests, recent.misses) == (1, {"never seen": 1})


def test_what_was_being_written_at_the_match_is_told_so(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        keep(session, 1)
        session.drop(prompt(1))
        reservation = session.reserve(prompt(1))
        session.match(prompt(1), request="one").release()
        reservation.abort()
        assert [some.why for some in past(session, "one").blocks] == [Why.BEING_WRITTEN]


def test_what_happened_just_after_a_request_is_not_its_reason(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        session.match(prompt(1), request="one").release()
        session.reserve(prompt(1)).abort()  # at the same time: the clock stands still
        assert past(session, "one").blocks[0].why is not Why.STORE_DROPPED


def test_an_exact_name_goes_before_one_that_an_engine_made_of_it(opened: Opener) -> None:
    with opened().host.session(MODEL) as session:
        for number, name in enumerate(["a", "a-b", "0_child", "12_other-7", "ab"]):
            session.match(prompt(*range(number + 1)), request=name).release()
        assert past(session, "a").request == "a"
        assert past(session, "a-b").request == "a-b"
        assert past(session, "child").request == "0_child"
        assert past(session, "other").request == "12_other-7"
        assert session.explain_request("b") is None


# -- many blocks, and many requests -----------------------------------------------------------------------------

TINY = Model(kvtide.Layout.attention(layers=1, heads=1, head_dim=64, dtype="int8", block_tokens=16), "given:tiny")


def alternating(world: World, session: Session, blocks: int) -> Chain:
    """A prompt of which every second block was dropped."""
    chain = session.chain(np.arange(16 * blocks, dtype=np.uint32))
    other = LocalBackend(world.store.main, TINY.layout, TINY.namespace(DEFAULT_TENANT), DEFAULT_TENANT.tag)
    marks = np.frombuffer(chain.joined, np.uint64)[::4] | np.uint64(1 << 63)
    with world.store.index.lock:
        world.store.index.absence_log.note_blocks(marks[1::2], next(iter(other.asker.values())), Absence.DROPPED)
    return chain


def test_counts_are_of_all_blocks_even_if_not_all_are_listed(opened: Opener) -> None:
    blocks = 5000
    world = opened(explain={"memory": "16MiB"})
    with world.host.session(TINY) as session:
        chain = alternating(world, session, blocks)
        session.match(chain, request="long").release()
        for found, most in ((session.explain(chain), 2000), (past(session, "long"), RANGES)):
            assert len(found.blocks) == most
            assert (found.blocks[-1].why, found.blocks[-1].stop) == (Why.NOT_LISTED, blocks)
            reasons = found.by_reason()
            assert sum(reasons.values()) == blocks
            assert blocks // 2 - 100 < reasons["dropped"] <= blocks // 2, "a few records were overwritten"
            assert (found.hits, found.stored) == (0, 0)
            assert f"{blocks:,} blocks of 16, 0 from the store" in str(found)
            assert "not listed one by one" in str(found)
            other = found.with_others([(16 * 10, ("weights",))]).by_reason()
            assert sum(other.values()) == blocks
            # Of the first ten: five, and those whose record was overwritten by chance.
            dropped = sum(min(b.stop, 10) - min(b.first, 10) for b in found.blocks if b.why is Why.DROPPED)
            assert other["another namespace"] == 10 - dropped
        assert sum(counted(world).misses.values()) == blocks


def test_ranges_are_made_without_the_index_lock(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    world, held = opened(), list[bool]()

    def noted(*fields: object) -> ExplainedBlocks:
        held.append(world.store.index.lock_is_mine())
        return ExplainedBlocks(*fields)  # type: ignore[arg-type]

    with world.host.session(MODEL) as session:
        monkeypatch.setattr("kvtide.store.explain.ExplainedBlocks", noted)
        session.explain(prompt(1, 2))
        session.match(prompt(1, 2), request="one").release()
        past(session, "one")
    assert held == [False, False]


def test_nobody_who_asks_waits_for_the_reasons_of_others() -> None:
    recent, found = RecentRequests(1 << 20, FakeClock()), list[str]()
    for name in ("first", "second", "third"):

        def explain(name: str = name) -> Explanation:
            found.append(name)
            return explained()

        recent.put(request(name, explain=explain))
    recent.statistics()
    recent.forget(b"another")
    assert not found
    assert recent.find("second", [1]) is not None
    assert recent.find("second", [1]) is not None
    assert found == ["second"], "only its own, and once"
    assert recent.find("third", [2]) is None
    recent.close()


def test_a_caller_does_not_wait_while_reasons_are_found_out() -> None:
    clock, entered, free = FakeClock(), threading.Event(), threading.Event()

    def slow() -> Explanation:
        entered.set()
        free.wait(30)
        return explained()

    recent = RecentRequests(1 << 20, clock)
    recent.put(request("slow", explain=slow))
    clock.advance(1)
    assert entered.wait(30)
    recent.put(request("second"))
    assert recent.statistics().waiting == 2
    recent.forget(b"t")
    free.set()
    recent.close()
    assert recent.statistics().requests == 0, "and what was forgotten meanwhile does not come back"


def test_the_thread_looks_at_all_that_were_put_by_several_threads() -> None:
    clock = FakeClock()
    recent = RecentRequests(8 << 20, clock)

    def work(number: int) -> None:
        for i in range(100):
            recent.put(request(f"{number}-{i}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        clock.advance(1)
        eventually(lambda: not recent.statistics().waiting)
        recent.put(request("another"))
    clock.advance(1)
    eventually(lambda: recent.statistics().misses == {"never seen": 403})
    recent.close()


def test_the_thread_is_woken_also_if_it_looked_before_its_waker_noted_that() -> None:
    """The waker stands still between both, and the thread, whose rest has just ended, looks at everything."""
    clock = FakeClock()
    recent = RecentRequests(8 << 20, clock)
    recent.close()
    woken = list[float]()

    class Wake:
        def put(self, _: bool) -> None:
            woken.append(recent.tidy())

    recent._wake = Wake()  # type: ignore[assignment]
    recent.put(request("first"))
    assert woken == [0.5]
    clock.advance(1)
    recent._rests_until = time.monotonic() + 60
    assert recent.tidy() > 50
    recent._rests_until = 0.0
    recent.put(request("second"))
    assert woken == [0.5, float("inf")]
    recent.put(request("third"))
    assert woken == [0.5, float("inf"), 0.5]


def test_a_request_whose_reasons_cannot_be_found_out_keeps_none_from_being_remembered() -> None:
    def broken() -> Explanation:
        raise MemoryError

    clock = FakeClock()
    recent = RecentRequests(20_000, clock)
    recent.close()
    recent.put(request("broken", explain=broken))
    clock.advance(1)
    with pytest.raises(MemoryError):
        recent.tidy()
    assert not recent.statistics().waiting
    for number in range(40):
        recent.put(request(f"{number}"))
        recent.find(f"{number}", [1])
    assert recent.statistics().overlooked == 0
    assert recent.find("39", [1]) is not None


def test_waiting_requests_count_with_the_memory_that_they_take() -> None:
    recent = RecentRequests(100_000, FakeClock())
    for number in range(1000):
        recent.put(request(f"{number}" * 20))
    statistics = recent.statistics()
    assert statistics.bytes <= 100_000
    assert 0 < statistics.waiting < 100_000 // 1500
    assert statistics.waiting + statistics.overlooked == 1000
    recent.close()


def test_requests_of_two_minutes_in_turns_are_counted_in_their_minutes() -> None:
    clock = FakeClock()
    recent, now = RecentRequests(8 << 20, clock), clock.time()
    for number in range(40):
        when = now - 60 * (number % 2)
        recent.put(request(f"{number}", explain=partial(explained, now=when)))
        recent.find(f"{number}", [1])
    assert recent.statistics().lately == {"never seen": 40}
    recent.close()


def test_explaining_does_not_change_which_models_are_known(opened: Opener) -> None:
    world = opened()
    with world.host.session(TINY) as tiny, world.host.session(MODEL) as session:
        tiny.match(prompt(1)).release()
        keep(session, 1)
        before = world.store.known_models.of(DEFAULT_TENANT.tag, b"")
        assert len(before) == 2
        session.explain(prompt(1, 2))
        assert world.store.known_models.of(DEFAULT_TENANT.tag, b"") == before


def test_nothing_is_remembered_if_it_is_switched_off(opened: Opener) -> None:
    world = opened(explain={"memory": 0})
    with world.host.session(MODEL) as session:
        keep(session, 1)
        session.match(prompt(1, 2), request="one").release()
        assert session.explain_request("one") is None
        assert world.store.known_models.of(DEFAULT_TENANT.tag, b"") == []


# -- a node bounds its answers --------------------------------------------------------------------------------


def asked(path: Path, operations: list[p.Operation]) -> list[object]:
    """The answers to the operations after opening the tiny model."""
    with dialled(path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        opening = p.Open(p.describe(TINY.layout), 16, TINY.namespace(DEFAULT_TENANT), DEFAULT_TENANT.tag)
        sock.sendall(p.frame(p.Request(1, [opening])))
        (session,) = answer(sock)[1]
        changed = [msgspec.structs.replace(o, session=session) if hasattr(o, "session") else o for o in operations]
        sock.sendall(p.frame(p.Request(2, changed)))
        answers: list[object] = answer(sock)[1]
        return answers


def test_the_models_and_explanations_of_one_request_are_bounded(tmp_path: Path) -> None:
    world = World("node", tmp_path, explain={"memory": "16MiB"})
    for number in range(32):
        about = b"about %d" % number + bytes(15_000)
        world.store.known_models.note(DEFAULT_TENANT.tag, b"", number.to_bytes(32), about)
    with world.host.session(TINY) as session:
        chain = alternating(world, session, 5000)
        session.match(chain, request="long").release()
        node = tmp_path / "node.sock"
        models = asked(node, [p.Models(DEFAULT_TENANT.tag)] * 100)
        explained = asked(node, [p.Explain(0, chain.joined)] * 100)
        last = asked(node, [p.Explain(0, b"", request="long", past=True)] * 1000)
    world.close()
    for answers, least, most in ((models, 1, 10), (explained, 1, 60), (last, 10, 500)):
        given = [found for found in answers if not isinstance(found, list)]
        assert least <= len(given) <= most, "the others are refused"
        assert len(msgspec.msgpack.encode(given)) <= 8 * work_limits.FRAME
        assert "in a request of its own" in str(answers[-1])
