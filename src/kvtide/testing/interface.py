"""The contract of the public interface, as tests: every implementation of ``Store`` and ``Session`` must pass them.

::

    class TestMine(InterfaceContract):
        outlives = True  # blocks are there again after a restart

        def open(self, folder, **settings):
            return my_open(folder, **settings)

Only public names are used, and every byte that comes back is checked, so the suite runs unchanged against a store in
this process or in another one. Needs pytest.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import kvtide
from kvtide import (
    BlockRemoved,
    BlockStored,
    Extra,
    Flushed,
    Group,
    Kind,
    Layout,
    Loaded,
    Model,
    Persisted,
    Session,
    Store,
    Tenant,
    Unwritten,
)
from kvtide.errors import ClosedError, KvtideError, LayoutError, RightError
from kvtide.testing.blocks import Bytes, content

__all__ = ["InterfaceContract"]

SIZE = 16
"""Tokens in a block."""

PLAIN = Layout.attention(layers=2, heads=2, head_dim=128, block_tokens=SIZE)
PADDED = Layout.attention(layers=2, heads=1, head_dim=20, block_tokens=SIZE)
HYBRID = Layout(
    (
        Group("full", Kind.FULL, 1, 2, 64, "bfloat16"),
        Group("near", Kind.WINDOW, 2, 2, 64, "bfloat16", window=2 * SIZE),
        Group("mamba", Kind.STATE, 1, 4, 1500, "float32"),
        Group("eagle", Kind.DRAFT, 1, 1, 64, "bfloat16"),
    ),
    SIZE,
)
MODEL = Model(PLAIN, "given:contract")
OTHER_TENANT = Tenant("other", b"0123456789abcdef0123456789abcdef")


def prompt(*path: int) -> list[int]:
    """A prompt of one block per number; prompts with equal first numbers share blocks."""
    return [token for number in path for token in [number] * SIZE]


def data(layout: Layout, tokens: Sequence[int], group: str = "full", of: str = "") -> list[Bytes]:
    """The right bytes of each block of a prompt: they follow from all tokens up to its end."""
    nbytes = layout.geometry[group].nbytes
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [content(f"{of} {group} {list(tokens[:end])}".encode(), nbytes) for end in ends]


def everything(layout: Layout, tokens: Sequence[int]) -> dict[str, list[Bytes]]:
    """``data`` for every group."""
    return {g.name: data(layout, tokens, g.name) for g in layout.groups}


def stripped(layout: Layout, view: memoryview, group: str = "full") -> Bytes:
    """A block as its caller gave it: without the padding that a view has between sections."""
    geometry = layout.geometry[group]
    assert len(view) == geometry.footprint
    sections = np.frombuffer(view, np.uint8).reshape(geometry.sections, geometry.stride)
    return sections[:, : geometry.section].ravel()


def check(layout: Layout, loaded: Loaded, tokens: Sequence[int], of: str = "") -> None:
    """Compare every byte of every view with ``data``."""
    for name, views in loaded.views.items():
        right = data(layout, tokens, name, of)[loaded.first[name] :]
        for number, (view, block) in enumerate(zip(views, right, strict=False)):
            assert view.readonly
            assert np.array_equal(stripped(layout, view, name), block), f"wrong bytes: {name} {number}"


def length(session: Session, tokens: Sequence[int], extras: Sequence[Extra] = ()) -> int:
    """How many tokens of a prompt can be loaded; all are checked (unless ``extras`` give them other contents)."""
    with session.match(tokens, extras, wait=30) as match:
        loaded = session.load(match).wait(60)
        if not extras:
            check(session.layout, loaded, tokens)
        return loaded.tokens


def held(store: Store) -> int:
    """How many blocks are leased after all transfers have ended."""
    assert store.flush(60).complete
    return store.statistics().held


def until(condition: Callable[[], bool]) -> None:
    """Wait for an asynchronous event, such as the expiry of a block."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class InterfaceContract:
    """Subclass it in a test module, as ``Test...``, and define ``open``."""

    outlives: ClassVar[bool] = False
    """Whether a store that is opened on the same folder again has the blocks stored before."""

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        """A store with its files under ``folder``, with these settings in addition to its own."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with self.open(tmp_path / "kv") as opened:
            yield opened
            assert held(opened) == 0, "some right was never given back"

    @pytest.fixture
    def session(self, store: Store) -> Iterator[Session]:
        with store.session(MODEL) as opened:
            yield opened

    @contextmanager
    def hybrid(self, store: Store) -> Iterator[Session]:
        with store.session(Model(HYBRID, "given:hybrid")) as opened:
            yield opened

    # -- storing and loading ------------------------------------------------------------------------------

    def test_what_was_stored_is_found_and_comes_back_byte_for_byte(self, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        done = session.store(tokens, data(PLAIN, tokens))
        assert (done.stored, done.present, done.dropped) == (3, 0, 0)
        with session.match(tokens) as match:
            assert (match.tokens, match.blocks, match.ready, match.pending) == (len(tokens), 3, True, False)
            assert match.wanted == {"full": range(3)}
            loaded = session.load(match).wait()
            assert (loaded.tokens, loaded.first) == (len(tokens), {"full": 0})
            assert len(loaded.blocks) == 3
            check(PLAIN, loaded, tokens)

    def test_an_empty_store_has_nothing(self, session: Session) -> None:
        with session.match(prompt(1, 2), wait=30) as match:
            assert (match.tokens, match.ready, match.pending) == (0, True, False)
            loaded = session.load(match).wait()
            assert (loaded.tokens, loaded.blocks) == (0, [])

    def test_an_empty_prompt_is_no_error(self, session: Session) -> None:
        assert session.store([], []).stored == 0
        with session.match([]) as match:
            assert session.load(match).wait().tokens == 0
        assert session.drop([]) == 0

    def test_a_longer_prompt_finds_what_it_shares(self, session: Session) -> None:
        session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        assert length(session, prompt(1, 2, 9, 3)) == 2 * SIZE
        assert length(session, prompt(1, 2, 3, 4)) == 3 * SIZE
        assert length(session, prompt(1, 2)) == 2 * SIZE
        assert length(session, prompt(2, 3)) == 0, "the same tokens after others are another block"

    def test_a_part_of_a_block_is_no_block(self, session: Session) -> None:
        tokens = [*prompt(1), *[7] * (SIZE - 1)]
        with pytest.raises(LayoutError, match="1 full blocks"):
            session.store(tokens, data(PLAIN, prompt(1, 7)))
        session.store(tokens, data(PLAIN, prompt(1)))
        assert length(session, tokens) == SIZE

    def test_what_is_there_is_not_copied_again(self, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        rubbish = [np.zeros(PLAIN.geometry["full"].nbytes, np.uint8)] * 2
        done = session.store(tokens, [*rubbish, *data(PLAIN, tokens)[2:]])
        assert (done.stored, done.present, done.dropped) == (1, 2, 0)
        assert length(session, tokens) == 3 * SIZE

    def test_blocks_may_be_stored_from_the_middle_on(self, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        session.store(tokens, data(PLAIN, tokens)[1:], start=1)
        assert length(session, tokens) == 0, "a prefix needs its first block"
        session.store(tokens, data(PLAIN, tokens)[:1])
        assert length(session, tokens) == 3 * SIZE

    @pytest.mark.parametrize(
        "make", [bytearray, lambda n: np.zeros(n, np.uint8), lambda n: np.zeros((4, n // 8), "u2")]
    )
    def test_a_load_fills_buffers_of_any_shape(self, session: Session, make: Callable[[int], Any]) -> None:
        tokens = prompt(1, 2, 3)
        session.store(tokens, data(PLAIN, tokens))
        buffers = [make(PLAIN.geometry["full"].nbytes) for _ in range(5)]  # more than needed is not an error
        with session.match(tokens) as match:
            loaded = session.load(match, buffers).wait()
            check(PLAIN, loaded, tokens)
        assert loaded.tokens == len(tokens)
        for buffer, block in zip(buffers, data(PLAIN, tokens), strict=False):
            assert bytes(memoryview(buffer).cast("B")) == block.tobytes()

    def test_what_the_engine_has_is_not_loaded(self, session: Session) -> None:
        tokens = prompt(1, 2, 3, 4)
        session.store(tokens, data(PLAIN, tokens))
        buffers = [bytearray(PLAIN.geometry["full"].nbytes) for _ in range(2)]
        with session.match(tokens, have=2 * SIZE + 3) as match:
            assert match.wanted == {"full": range(2, 4)}
            loaded = session.load(match, buffers).wait()
            assert (loaded.tokens, loaded.first) == (len(tokens), {"full": 2})
        assert [bytes(b) for b in buffers] == [b.tobytes() for b in data(PLAIN, tokens)[2:]]

    def test_what_the_engine_has_need_not_be_in_the_store(self, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        session.store(tokens, data(PLAIN, tokens)[2:], start=2)
        with session.match(tokens, have=2 * SIZE) as match:
            loaded = session.load(match).wait()
            assert (loaded.tokens, loaded.first) == (len(tokens), {"full": 2})
            check(PLAIN, loaded, tokens)
        with session.match(tokens, have=10 * SIZE) as match:
            assert session.load(match).wait().blocks == []

    def test_padding_is_invisible_to_buffers(self, store: Store) -> None:
        tokens = prompt(1, 2)
        assert PADDED.geometry["full"].nbytes < PADDED.geometry["full"].footprint
        with store.session(Model(PADDED, "given:padded")) as session:
            session.store(tokens, data(PADDED, tokens))
            buffers = [bytearray(PADDED.geometry["full"].nbytes) for _ in range(2)]
            with session.match(tokens) as match:
                check(PADDED, session.load(match, buffers).wait(), tokens)
            assert [bytes(b) for b in buffers] == [b.tobytes() for b in data(PADDED, tokens)]

    def test_many_blocks_at_once(self, session: Session) -> None:
        tokens = prompt(*range(60))
        assert session.store(tokens, data(PLAIN, tokens)).stored == 60
        assert length(session, tokens) == len(tokens)

    # -- names --------------------------------------------------------------------------------------------

    def test_a_chain_that_grows_is_the_same_prompt(self, session: Session) -> None:
        chain = session.chain(prompt(1))
        session.store(chain, data(PLAIN, prompt(1)))
        for turn in range(2, 5):
            have = chain.blocks
            chain.extend(prompt(turn))
            session.store(chain, data(PLAIN, prompt(*range(1, turn + 1)))[have:], start=have)
        assert length(session, prompt(1, 2, 3, 4)) == 4 * SIZE
        with session.match(chain) as match:
            assert match.tokens == 4 * SIZE

    def test_a_chain_is_good_for_every_session_of_its_model_and_for_no_other(self, store: Store) -> None:
        with store.session(MODEL) as one, store.session(MODEL) as two, store.session(MODEL, OTHER_TENANT) as other:
            chain = one.chain(prompt(1))
            one.store(chain, data(PLAIN, prompt(1)))
            with two.match(chain) as match:
                assert match.tokens == SIZE
            for verb in (other.match, other.drop, other.pin, other.prefetch, other.reserve):
                with pytest.raises(LayoutError, match="another model or tenant"):
                    verb(chain)

    def test_tokens_may_be_an_array(self, session: Session) -> None:
        session.store(np.array(prompt(1, 2), np.uint32), data(PLAIN, prompt(1, 2)))
        assert length(session, prompt(1, 2)) == 2 * SIZE

    def test_extras_make_other_blocks(self, session: Session) -> None:
        tokens, lora = prompt(1, 2), [Extra("lora", "poet")]
        session.store(tokens, data(PLAIN, tokens, of="poet"), lora)
        assert length(session, tokens) == 0
        with session.match(tokens, lora) as match:
            check(PLAIN, session.load(match).wait(), tokens, of="poet")
            assert match.tokens == 2 * SIZE
        late = [Extra("image", b"cat", SIZE, SIZE + 4)]
        session.store(tokens, data(PLAIN, tokens))
        assert length(session, tokens, late) == SIZE, "what comes before the image is shared"
        with pytest.raises(LayoutError, match="extras are part of a chain"):
            session.match(session.chain(tokens), lora)

    @pytest.mark.parametrize(
        ("model", "tenant"),
        [
            (replace(MODEL, weights="given:contract@2"), None),
            (replace(MODEL, adapter="poet"), None),
            (replace(MODEL, fidelity="fp8"), None),
            (replace(MODEL, scales=b"\x01"), None),
            (replace(MODEL, config={"rope": 1e6}), None),
            (MODEL, OTHER_TENANT),
        ],
        ids=["weights", "adapter", "fidelity", "scales", "config", "tenant"],
    )
    def test_blocks_of_another_model_or_tenant_are_not_there(
        self, store: Store, session: Session, model: Model, tenant: Tenant | None
    ) -> None:
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        with store.session(model, tenant) if tenant else store.session(model) as other:
            assert length(other, tokens) == 0
            assert (other.pin(tokens), other.drop(tokens)) == (0, 0)
            other.store(tokens, data(PLAIN, tokens, of="other"))
            with other.match(tokens) as match:
                check(PLAIN, other.load(match).wait(), tokens, of="other")
            assert other.drop(tokens) == 2
        assert length(session, tokens) == len(tokens), "mine are untouched"

    def test_two_sessions_of_one_model_share(self, store: Store, session: Session) -> None:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        with store.session(Model(PLAIN, "given:contract")) as other:
            assert length(other, prompt(1)) == SIZE

    # -- several groups -----------------------------------------------------------------------------------

    def test_groups_come_back_together(self, store: Store) -> None:
        tokens = prompt(1, 2, 3, 4)
        with self.hybrid(store) as session:
            done = session.store(tokens, everything(HYBRID, tokens))
            assert done.stored == 16
            with session.match(tokens) as match:
                assert match.tokens == len(tokens)
                assert match.wanted == {
                    "full": range(4),
                    "near": range(2, 4),
                    "mamba": range(3, 4),
                    "eagle": range(4),
                }
                buffers = {
                    name: [bytearray(HYBRID.geometry[name].nbytes) for _ in wanted]
                    for name, wanted in match.wanted.items()
                }
                loaded = session.load(match, buffers).wait()
                assert loaded.tokens == len(tokens)
                assert {n: len(v) for n, v in loaded.views.items()} == {"full": 4, "near": 2, "mamba": 1, "eagle": 4}
                check(HYBRID, loaded, tokens)
                for name, wanted in match.wanted.items():
                    right = [data(HYBRID, tokens, name)[i].tobytes() for i in wanted]
                    assert [bytes(b) for b in buffers[name]] == right
                with pytest.raises(ValueError, match="unpack"):
                    _ = loaded.blocks  # there is more than one group

    def test_a_window_needs_only_its_last_blocks_and_a_state_only_its_last(self, store: Store) -> None:
        tokens = prompt(1, 2, 3, 4)
        blocks = everything(HYBRID, tokens)
        with self.hybrid(store) as session:
            session.store(tokens, {"full": blocks["full"]})
            assert length(session, tokens) == 0
            session.store(tokens, {"near": blocks["near"][1:3]}, start=1)
            assert length(session, tokens) == 0
            session.store(tokens, {"mamba": blocks["mamba"][2:3]}, start=2)
            assert length(session, tokens) == 3 * SIZE
            session.store(tokens, {"mamba": blocks["mamba"][3:], "near": blocks["near"][3:]}, start=3)
            assert length(session, tokens) == 4 * SIZE

    def test_a_draft_never_blocks_its_target_and_comes_as_far_as_it_goes(self, store: Store) -> None:
        tokens = prompt(1, 2, 3)
        blocks = everything(HYBRID, tokens)
        draft = blocks.pop("eagle")
        with self.hybrid(store) as session:
            session.store(tokens, blocks)
            assert length(session, tokens) == 3 * SIZE
            session.store(tokens, {"eagle": draft[:1]})
            session.store(tokens, {"eagle": draft[2:]}, start=2)
            with session.match(tokens) as match:
                assert match.wanted["eagle"] == range(1)
                loaded = session.load(match).wait()
                assert (loaded.tokens, len(loaded.views["eagle"])) == (3 * SIZE, 1)
                check(HYBRID, loaded, tokens)
                targets = {
                    name: [bytearray(HYBRID.geometry[name].nbytes) for _ in wanted]
                    for name, wanted in match.wanted.items()
                    if name != "eagle"
                }
                assert session.load(match, targets).wait().tokens == 3 * SIZE, "who has no draft needs no buffers"

    def test_several_groups_are_given_by_name(self, store: Store) -> None:
        tokens = prompt(1)
        with self.hybrid(store) as session:
            with pytest.raises(LayoutError, match=r"several groups \(full, near, mamba, eagle\)"):
                session.store(tokens, data(HYBRID, tokens))
            with pytest.raises(LayoutError, match="no group 'far'"):
                session.store(tokens, {"far": data(HYBRID, tokens)})
            assert session.store(tokens, {}).stored == 0

    # -- writing in place ---------------------------------------------------------------------------------

    def test_a_reservation_is_filled_and_sealed(self, session: Session) -> None:
        tokens = prompt(1, 2)
        with session.reserve(tokens) as reservation:
            assert len(reservation.views) == len(reservation.keys) == 2
            with session.match(tokens) as match:
                assert (match.tokens, match.pending) == (0, True), "ask again"
            for depth, view in zip(reservation.depths, reservation.views, strict=True):
                np.copyto(np.frombuffer(view, np.uint8), data(PLAIN, tokens)[depth])
            reservation.seal()
        with session.match(tokens) as match:
            assert not match.pending
        assert length(session, tokens) == len(tokens)
        assert not reservation.open

    def test_a_reservation_has_only_what_is_missing(self, session: Session) -> None:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        with session.reserve(prompt(1, 2, 3)) as mine:
            assert list(mine.depths) == [1, 2]
            with session.reserve(prompt(1, 2, 3)) as theirs:
                assert list(theirs.depths) == [1, 2], "who writes them may never end"
                with session.reserve(prompt(1, 2, 3)) as nobodys:
                    assert (list(nobodys.keys), nobodys.refused, nobodys.pending) == ([], 0, 2)
        with session.reserve(prompt(1, 2, 3), start=1, stop=2) as again:
            assert list(again.depths) == [1]

    def test_a_reservation_that_is_not_sealed_leaves_nothing(self, session: Session) -> None:
        for end in ("abort", "leave", "raise"):
            with suppress(ZeroDivisionError), session.reserve(prompt(1, 2)) as reservation:
                assert len(reservation.views) == 2
                if end == "abort":
                    reservation.abort()
                elif end == "raise":
                    raise ZeroDivisionError
            assert length(session, prompt(1, 2)) == 0
            with session.match(prompt(1, 2)) as match:
                assert not match.pending
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(session, prompt(1)) == SIZE

    def test_a_reservation_is_sealed_once(self, session: Session) -> None:
        reservation = session.reserve(prompt(1))
        reservation.abort()
        reservation.abort()
        with pytest.raises(RightError, match="sealed or aborted before"):
            reservation.seal()

    # -- durability ---------------------------------------------------------------------------------------

    def test_a_flush_says_what_is_written_and_what_is_not(self, store: Store, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        assert store.flush(60) == Flushed(0)
        session.store(tokens, data(PLAIN, tokens))
        flushed = store.flush(60)
        assert flushed, "nothing went wrong"
        assert flushed.written + sum(flushed.unwritten.values()) == 3
        assert all(reason.intended for reason in flushed.unwritten)

    def test_a_durable_store_ends_when_all_of_a_prompt_is_durable_or_says_why_not(
        self, store: Store, session: Session
    ) -> None:
        head, tokens = prompt(1, 2), prompt(1, 2, 3)
        session.store(head, data(PLAIN, head))
        stored = session.store(tokens, data(PLAIN, tokens), durable=True)
        assert (stored.stored, stored.present, stored.dropped) == (1, 2, 0)
        persisted = stored.wait(60)
        if self.outlives:
            assert persisted == Persisted(3, {})
        else:
            assert not persisted
            assert persisted.reasons in ({Unwritten.NO_TIER: 3}, {Unwritten.NOT_DURABLE: 3})
        more = prompt(1, 2, 3, 4)
        assert session.store(more, data(PLAIN, more)[3:], start=3, durable=True).wait(60).durable == (
            4 if self.outlives else 0
        )
        assert held(store) == 0
        assert length(session, more) == 4 * SIZE

    def test_groups_are_durable_as_far_as_a_prefix_needs_them(self, store: Store) -> None:
        tokens = prompt(1, 2, 3)
        with self.hybrid(store) as session:
            persisted = session.store(tokens, everything(HYBRID, tokens), durable=True).wait(60)
            assert bool(persisted) == self.outlives
            assert persisted.durable + sum(persisted.reasons.values()) == 4 * 3
            assert session.store(prompt(8), {"full": []}, durable=True).wait(60) == Persisted(0, {})

    # -- pins, lifetimes and removal ----------------------------------------------------------------------

    def test_drop_removes_for_good(self, store: Store, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        session.store(tokens, data(PLAIN, tokens))
        assert store.flush(60)
        assert session.drop(tokens, start=1) == 2
        assert length(session, tokens) == SIZE
        assert session.drop(tokens) == 1
        assert session.drop(tokens) == 0
        assert (length(session, tokens), store.statistics().blocks) == (0, 0)
        session.store(tokens, data(PLAIN, tokens))
        assert length(session, tokens) == 3 * SIZE

    def test_a_match_outlives_a_drop(self, session: Session) -> None:
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        with session.match(tokens) as match:
            loaded = session.load(match).wait()
            assert session.drop(tokens) == 2
            assert length(session, tokens) == 0
            check(PLAIN, loaded, tokens)
            other = prompt(1, 2, 3, 4)
            session.store(other, data(PLAIN, other))
            check(PLAIN, loaded, tokens)

    def test_pins_are_counted(self, store: Store, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        assert session.pin(tokens) == 0, "there is nothing to pin"
        session.store(tokens, data(PLAIN, tokens))
        assert (session.pin(tokens), session.pin(tokens, stop=1), store.statistics().pinned) == (3, 1, 3)
        assert (session.unpin(tokens), store.statistics().pinned) == (3, 1)
        assert (session.unpin(tokens), session.unpin(tokens), store.statistics().pinned) == (1, 0, 0)

    def test_pinned_blocks_survive_a_flood_and_budgets_hold(self, tmp_path: Path) -> None:
        with self.open(tmp_path / "kv", dram={"budget": "1MiB", "segment": "1MiB"}) as store:
            session = store.session(MODEL)
            session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            session.pin(prompt(1, 2))
            for number in range(100, 200):
                tokens = prompt(number, number + 1)
                session.store(tokens, data(PLAIN, tokens))
                for tier in store.statistics().tiers.values():
                    assert tier.bytes_taken <= tier.budget
            with session.match(prompt(1, 2)) as match:
                assert (match.tokens, match.ready) == (2 * SIZE, True)
            assert length(session, prompt(1, 2)) == 2 * SIZE

    def test_a_block_lives_no_longer_than_it_may(self, store: Store, session: Session) -> None:
        session.store(prompt(1), data(PLAIN, prompt(1)), ttl=0.05)
        session.store(prompt(2), data(PLAIN, prompt(2)), ttl=3600)
        until(lambda: length(session, prompt(1)) == 0)
        assert length(session, prompt(2)) == SIZE
        until(lambda: store.statistics().blocks == 1)
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(session, prompt(1)) == SIZE

    def test_a_store_extends_the_life_of_a_prompt_and_only_expire_shortens_it(
        self, store: Store, session: Session
    ) -> None:
        session.store(prompt(1), data(PLAIN, prompt(1)), ttl=0.2)
        session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)), ttl=0.01)
        session.store(prompt(7), data(PLAIN, prompt(7)), ttl=0.3)
        until(lambda: length(session, prompt(7)) == 0)
        assert length(session, prompt(1, 2, 3)) == 3 * SIZE
        assert store.flush(60)
        assert session.expire(prompt(1, 2), 0.05, start=1) == 1
        until(lambda: length(session, prompt(1, 2, 3)) == SIZE)
        until(lambda: store.statistics().blocks == 1)
        assert session.expire(prompt(1, 2, 3), None) == 1
        with pytest.raises(LayoutError, match="cannot live 0 seconds"):
            session.expire(prompt(1), 0)

    def test_prefetch_brings_and_lets_go(self, store: Store, session: Session) -> None:
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        assert session.prefetch(tokens).wait(60)
        assert session.prefetch(prompt(8, 9)).wait(60), "nothing to bring is no error"
        assert held(store) == 0

    def test_what_is_expected_back_is_a_hint_and_holds_nothing(self, store: Store, session: Session) -> None:
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        session.expect(tokens, turn="tool")
        session.expect(session.chain(prompt(1, 2)), turn="end", returns_in=18)
        session.expect(prompt(7, 8), turn="end", returns_in=1e9)
        session.expect(prompt(1, 2))
        session.expect([], turn="tool")
        assert held(store) == 0
        assert length(session, tokens) == len(tokens)
        assert length(session, prompt(7, 8)) == 0

    @pytest.mark.parametrize(
        ("hint", "says"),
        [
            ({"turn": "tools"}, 'turn is \'tools\'; give "tool", "end" or None'),
            ({"turn": 1}, "turn is 1"),
            ({"returns_in": 0}, "returns_in is 0, not a time to come"),
            ({"returns_in": -1.5}, "returns_in is -1.5"),
            ({"returns_in": float("inf")}, "returns_in is inf"),
            ({"returns_in": float("nan")}, "returns_in is not a number"),
            ({"returns_in": "18"}, "returns_in is '18'"),
        ],
    )
    def test_a_hint_that_cannot_be_is_refused(self, session: Session, hint: dict[str, Any], says: str) -> None:
        with pytest.raises(LayoutError, match=re.escape(says)):
            session.expect(prompt(1), **hint)

    # -- a restart ----------------------------------------------------------------------------------------

    def test_a_restart_keeps_what_outlives_the_process(self, tmp_path: Path) -> None:
        plain, hybrid = prompt(1, 2, 3), prompt(7, 8)
        with self.open(tmp_path / "kv") as store:
            session = store.session(MODEL)
            session.store(plain, data(PLAIN, plain))
            session.store(prompt(5), data(PLAIN, prompt(5)))
            session.store(prompt(6), data(PLAIN, prompt(6)), ttl=0.05)
            assert session.drop(prompt(5)) == 1
            with self.hybrid(store) as other:
                other.store(hybrid, everything(HYBRID, hybrid))
        with self.open(tmp_path / "kv") as store:
            session = store.session(MODEL)
            with session.match(plain, wait=30) as match:
                assert (match.tokens, match.ready) == ((len(plain), False) if self.outlives else (0, True))
                assert match.held_tokens == 0, "what is on disk is not held"
                assert session.prefetch(plain).wait(60)
            with session.match(plain) as match:
                assert match.ready
                assert match.held_tokens == match.tokens
            assert length(session, plain) == (len(plain) if self.outlives else 0)
            assert length(session, prompt(5)) == 0, "what was dropped does not come back"
            until(lambda: length(session, prompt(6)) == 0)
            with self.hybrid(store) as other:
                assert length(other, hybrid) == (len(hybrid) if self.outlives else 0)
            if not self.outlives:
                session.store(plain, data(PLAIN, plain))
                assert length(session, plain) == len(plain)

    # -- statistics and events ----------------------------------------------------------------------------

    def test_statistics_say_what_is_there_and_what_happened(self, store: Store, session: Session) -> None:
        assert (store.statistics().blocks, store.statistics().held) == (0, 0)
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        assert store.flush(60)
        statistics = store.statistics()
        assert (statistics.blocks, statistics.tiers["dram"].blocks, statistics.counts["blocks stored"]) == (2, 2, 2)
        assert statistics.tiers["dram"].bytes_used >= 2 * PLAIN.geometry["full"].footprint
        with session.match(tokens):
            assert held(store) == 2
        assert held(store) == 0

    def test_whoever_follows_is_told_of_blocks_until_he_stops(self, store: Store, session: Session) -> None:
        tokens = prompt(1, 2)
        keys = tuple(session.chain(tokens).keys(b"full"))
        seen: list[object] = []
        stop = store.follow(seen.append)
        session.store(tokens, data(PLAIN, tokens))
        until(lambda: BlockStored("dram", keys) in seen)
        assert store.flush(60)
        session.drop(tokens)
        until(lambda: sum(len(e.keys) for e in seen if isinstance(e, BlockRemoved) and e.tier == "dram") == 2)
        removed = [e for e in seen if isinstance(e, BlockRemoved) and e.tier == "dram"]
        assert {k for e in removed for k in e.keys} == set(keys)
        assert {e.reason for e in removed} == {"dropped"}
        stop()
        count = len(seen)
        session.store(prompt(3), data(PLAIN, prompt(3)))
        assert store.flush(60)
        assert len(seen) == count

    # -- asyncio ------------------------------------------------------------------------------------------

    def test_a_durable_store_can_be_awaited(self, session: Session) -> None:
        async def store() -> Persisted:
            return await session.store(prompt(1), data(PLAIN, prompt(1)), durable=True)

        assert bool(asyncio.run(store())) == self.outlives

    def test_the_same_in_asyncio(self, session: Session) -> None:
        tokens = prompt(1, 2, 3)
        session.store(tokens, data(PLAIN, tokens))

        async def main() -> None:
            assert await session.prefetch(tokens)
            buffers = [bytearray(PLAIN.geometry["full"].nbytes) for _ in range(3)]
            with session.match(tokens) as match:
                loaded = await session.load(match)
                assert loaded.tokens == len(tokens)
                check(PLAIN, loaded, tokens)
                assert (await session.load(match, buffers)).tokens == len(tokens)
            assert [bytes(b) for b in buffers] == [b.tobytes() for b in data(PLAIN, tokens)]
            with session.match(prompt(9)) as match:
                assert (await session.load(match)).tokens == 0

        asyncio.run(main())

    # -- threads ------------------------------------------------------------------------------------------

    def test_threads_do_not_get_in_each_others_way(self, tmp_path: Path) -> None:
        errors: list[BaseException] = []
        with self.open(tmp_path / "kv", dram={"budget": "2MiB", "segment": "1MiB"}) as store:

            def work(seed: int) -> None:
                numbers = np.random.default_rng(seed)
                try:
                    with store.session(MODEL) as session:
                        for _ in range(25):
                            tokens = prompt(*numbers.integers(0, 4, numbers.integers(1, 6)).tolist())
                            session.store(tokens, data(PLAIN, tokens))
                            length(session, tokens)
                            if numbers.random() < 0.1:
                                session.drop(tokens)
                except BaseException as e:
                    errors.append(e)
                    raise

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert held(store) == 0

    # -- misuse -------------------------------------------------------------------------------------------

    def test_a_closed_session_says_so_and_its_rights_are_gone(self, store: Store) -> None:
        session = store.session(MODEL)
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        match, reservation = session.match(tokens), session.reserve(prompt(5))
        session.close()
        session.close()
        assert (match.held, reservation.open) == (False, False)
        assert held(store) == 0
        for verb in (session.match, session.prefetch, session.pin, session.unpin, session.drop, session.reserve):
            with pytest.raises(ClosedError, match="session is closed"):
                verb(tokens)
        with pytest.raises(ClosedError):
            session.store(tokens, data(PLAIN, tokens))
        with pytest.raises(ClosedError):
            session.load(match)
        with store.session(MODEL) as other:
            assert length(other, tokens) == len(tokens)

    def test_a_closed_store_says_so(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "kv")
        session = store.session(MODEL)
        session.store(prompt(1), data(PLAIN, prompt(1)))
        match = session.match(prompt(1))
        store.close()
        store.close()
        with pytest.raises(ClosedError, match="store is closed"):
            store.session(MODEL)
        with pytest.raises(ClosedError):
            session.match(prompt(1))
        assert not match.held

    def test_a_released_match_cannot_be_loaded(self, session: Session) -> None:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        match = session.match(prompt(1))
        load = session.load(match)
        match.release()
        match.release()
        with pytest.raises(RightError, match="match again"):
            session.load(match)
        with pytest.raises(RightError, match="released"):
            load.wait()

    def test_a_match_of_another_session_cannot_be_loaded(self, store: Store, session: Session) -> None:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        with store.session(MODEL) as other, other.match(prompt(1)) as match, pytest.raises(LayoutError) as caught:
            session.load(match)
        assert "another session" in str(caught.value)

    def test_buffers_that_do_not_fit_are_refused_before_anything_happens(self, session: Session) -> None:
        tokens, nbytes = prompt(1, 2), PLAIN.geometry["full"].nbytes
        good = data(PLAIN, tokens)
        bad: list[tuple[Any, str]] = [
            (bytes(nbytes - 1), f"buffer 1 of group 'full' has {nbytes - 1} bytes; a block has {nbytes}"),
            (np.zeros(2 * nbytes, np.uint8)[::2], "not contiguous; copy it first"),
        ]
        for block, says in bad:
            with pytest.raises(LayoutError, match=says):
                session.store(tokens, [good[0], block])
        assert length(session, tokens) == 0
        session.store(tokens, good)
        with session.match(tokens) as match:
            targets: list[tuple[list[Any], str]] = [
                ([bytearray(nbytes)], "1 buffers for 2 blocks"),
                ([bytearray(nbytes), bytes(nbytes)], "buffer 1 of group 'full' is read-only"),
                ([bytearray(nbytes), bytearray(1)], "has 1 bytes"),
                ([bytearray(nbytes), np.zeros(2 * nbytes, np.uint8)[::2]], "not contiguous"),
            ]
            for buffers, says in targets:
                with pytest.raises(LayoutError, match=says):
                    session.load(match, buffers)

    def test_a_group_without_buffers_is_refused(self, store: Store) -> None:
        tokens = prompt(1, 2)
        with self.hybrid(store) as session:
            session.store(tokens, everything(HYBRID, tokens))
            with session.match(tokens) as match:
                full = [bytearray(HYBRID.geometry["full"].nbytes) for _ in range(2)]
                with pytest.raises(LayoutError, match="group 'near' has 0 buffers for 2 blocks"):
                    session.load(match, {"full": full})

    def test_more_blocks_than_the_prompt_has_are_refused_before_anything_is_stored(self, store: Store) -> None:
        tokens = prompt(1, 2)
        with self.hybrid(store) as session:
            blocks = everything(HYBRID, tokens)
            blocks["mamba"] = data(HYBRID, prompt(1, 2, 3), "mamba")
            with pytest.raises(LayoutError, match="blocks 0 to 3 are not all in a prompt of 2 full blocks"):
                session.store(tokens, blocks)
            assert store.statistics().blocks == 0

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"start": -1}, "blocks -1 to 0"),
            ({"start": 2}, "blocks 2 to 3"),
            ({"priority": 101}, "priority 101 is not between"),
            ({"priority": -101}, "priority -101 is not between"),
            ({"ttl": 0}, "cannot live 0 seconds"),
            ({"ttl": -1.0}, "cannot live -1.0 seconds"),
            ({"ttl": float("nan")}, "cannot live nan seconds"),
        ],
    )
    def test_options_that_cannot_be_are_refused(self, session: Session, options: dict[str, Any], says: str) -> None:
        with pytest.raises(LayoutError, match=says):
            session.store(prompt(1, 2), data(PLAIN, prompt(1)), **options)
        if "start" not in options:
            with pytest.raises(LayoutError, match=says):
                session.reserve(prompt(1, 2), **options)

    def test_having_less_than_nothing_is_refused(self, session: Session) -> None:
        with pytest.raises(LayoutError, match="have is -1"):
            session.match(prompt(1), have=-1)

    def test_every_error_is_one_of_ours(self) -> None:
        assert {c.__mro__[-4] for c in (ClosedError, RightError)} == {KvtideError}
        assert isinstance(kvtide.__version__, str)
