"""Callers that are interrupted at one known step: what others wait for goes on, and nothing is charged for ever."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide import Persist, Store, Unwritten, config
from kvtide.index.pins import Pins
from kvtide.testing.interface import MODEL, PLAIN, data, prompt


def opened(**settings: Any) -> Store:
    return Store(config.read(None, {}, dram={"budget": "4MiB", "segment": "1MiB"}, **settings))


def nvme(path: Path, **more: object) -> dict[str, object]:
    return {"path": str(path / "kv"), "budget": "16MiB", "segment": "1MiB", "threads": 2, **more}


def interrupt(patch: pytest.MonkeyPatch, where: object, name: str, *, after: bool = False) -> None:
    """Let the first call be interrupted: before it does anything, or when it has returned."""
    call: Callable[..., object] = getattr(where, name)
    come: list[bool] = []

    def interrupted(*given: Any, **named: Any) -> object:
        if come:
            return call(*given, **named)
        come.append(True)
        if after:
            call(*given, **named)
        raise KeyboardInterrupt

    patch.setattr(where, name, interrupted)


def test_a_prompt_whose_search_was_interrupted_is_looked_for_by_the_next_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(files={"path": str(tmp_path)}) as store, store.session(MODEL) as session:
        interrupt(monkeypatch, store.main.colds[0].tier, "find")
        with pytest.raises(KeyboardInterrupt):
            session.match(prompt(1))
        with session.match(prompt(1), wait=30) as match:
            assert not match.pending


def test_pins_of_a_block_whose_drop_was_interrupted_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as store, store.session(MODEL) as session, store.session(MODEL) as other:
        for one in (session, other):
            one.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            assert one.pin(prompt(1, 2)) == 2
        interrupt(monkeypatch, Pins, "end")
        with pytest.raises(KeyboardInterrupt):
            session.drop(prompt(1, 2))
        assert [one.backend.pins.nbytes for one in (session, other)] == [0, 0]  # type: ignore[attr-defined]
        session.store(prompt(3, 4), data(PLAIN, prompt(3, 4)))
        assert store.statistics().pinned == 0, "another's blocks took the rows, and not the pins"
        assert session.unpin(prompt(3, 4)) == 0


def test_pins_that_were_being_moved_to_another_row_are_charged_once_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened() as store, store.session(MODEL) as session, store.session(MODEL) as other:
        first = session.reserve(prompt(1))
        assert session.pin(prompt(1)) == other.pin(prompt(1)) == 1
        second = other.reserve(prompt(1))
        interrupt(monkeypatch, Pins, "move", after=True)
        with pytest.raises(KeyboardInterrupt):
            second.seal()
        first.abort()
        second.abort()
        assert [one.backend.pins.nbytes for one in (session, other)] == [0, 0]  # type: ignore[attr-defined]
        session.store(prompt(3), data(PLAIN, prompt(3)))
        assert store.statistics().pinned == 0


def test_who_waits_for_a_writer_is_told_though_the_writer_is_interrupted_while_it_seals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(nvme=nvme(tmp_path)) as store, store.session(MODEL) as session:
        first, second = session.reserve(prompt(1)), session.reserve(prompt(1))
        waiting = session.store(prompt(1), data(PLAIN, prompt(1)), durable=True)
        assert waiting.pending
        interrupt(monkeypatch, store.pipeline._promotion, "landed", after=True)
        with pytest.raises(KeyboardInterrupt):
            first.seal()
        second.abort()
        assert waiting.wait(60), "it was sealed before the interruption, and is written for who waits"
        assert store.statistics().pipeline.leases == 0


@pytest.mark.parametrize("how", ["match", "reserve", "statistics", "close"])
def test_who_waits_for_forgotten_writers_is_told_by_whoever_comes_next(tmp_path: Path, how: str) -> None:
    with opened(nvme=nvme(tmp_path)) as store:
        session = store.session(MODEL)
        writers = [session.reserve(prompt(1)), session.reserve(prompt(1))]
        waiting = session.store(prompt(1), data(PLAIN, prompt(1)), durable=True)
        assert waiting.pending
        writers.clear()
        gc.collect()
        calls: dict[str, Callable[[], object]] = {
            "match": lambda: session.match(prompt(2)).release(),
            "reserve": lambda: store.pipeline.reserve([]),
            "statistics": store.statistics,
            "close": store.close,
        }
        calls[how]()
        assert waiting.wait(60).reasons == {Unwritten.REMOVED: 1}


def test_a_forgotten_reservation_ends_like_an_aborted_one() -> None:
    """Nothing is to be repaired, which would look at all rows; and the second writer takes its place."""
    with opened() as store, store.session(MODEL) as session:
        tokens = prompt(1, 2)
        first, second = session.reserve(tokens), session.reserve(tokens)
        del first
        gc.collect()
        session.match(prompt(3)).release()
        found = store.statistics()
        assert (found.pipeline.reservations, found.counts.get("interrupted calls", 0)) == (1, 0)
        assert store.index.rows(second.keys).tolist() == second.rows.tolist()
        assert store.dram.blocks == 2
        second.seal()
        assert session.find(tokens) == [True, True]


@pytest.mark.parametrize("where", ["lane", "sync", "hold", "on request", "told"])
def test_nobody_waits_for_a_durable_store_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its blocks are written for the next who wants them durable, and nothing is held or charged meanwhile."""
    tokens, other = prompt(1, 2), prompt(1, 3)
    with opened(nvme=nvme(tmp_path, store="second-touch")) as store, store.session(MODEL) as session:
        cold, pipeline = store.main.colds[0], store.pipeline
        if where == "sync":  # only then it is the caller who begins to sync
            assert session.store(tokens, data(PLAIN, tokens), durable=True).wait(60)
        tier = SimpleNamespace(sync=cold.sync)
        asked = replace(cold, sync=lambda blocks, done: tier.sync(blocks, done))
        monkeypatch.setitem(pipeline.persister._colds, cold.number, asked)
        places: dict[str, tuple[object, str]] = {
            "lane": (cold.lane, "write"),
            "sync": (tier, "sync"),
            "hold": (pipeline.persister, "_follow"),
            "on request": (pipeline._demotion, "_write_requested"),
            "told": (pipeline._demotion, "tell"),
        }
        interrupt(monkeypatch, *places[where], after=where not in ("lane", "sync"))
        with pytest.raises(KeyboardInterrupt):
            session.store(tokens, data(PLAIN, tokens), durable=True)
        assert session.store(other, data(PLAIN, other), durable=True).wait(60)
        assert session.store(tokens, data(PLAIN, tokens), durable=True).wait(60)
        assert store.flush(60)
        found = store.statistics()
        assert (found.held, found.pipeline.leases, found.lanes["nvme"].write_bytes_waiting) == (0, 0, 0)
        assert len(pipeline.persister) == 0
        assert not pipeline._demotion._under_way[cold.number]
        assert not pipeline._demotion._watchers


def test_others_who_watch_a_write_that_is_given_up_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is interrupted before its blocks are given to the tier, and meanwhile another wants them durable."""
    tokens = prompt(1, 2)
    with opened(nvme=nvme(tmp_path, store="through")) as store, store.session(MODEL) as session:
        lane = store.main.colds[0].lane
        waiting: list[Persist] = []

        def write(*_: object) -> None:
            monkeypatch.undo()
            waiting.append(session.store(tokens, data(PLAIN, tokens), durable=True))
            raise KeyboardInterrupt

        monkeypatch.setattr(lane, "write", write)
        with pytest.raises(KeyboardInterrupt):
            session.store(tokens, data(PLAIN, tokens))
        assert waiting[0].wait(30).reasons.keys() <= {Unwritten.WRITE_FAILED}
