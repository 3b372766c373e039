"""The front of a prompt is computed while the tail of its prefix is loaded: the same KV wherever they meet, and nothing
held afterwards, whatever fails on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvtide
from kvtide import Store, config
from kvtide.block import Span
from kvtide.engines.paged import HostMover
from kvtide.engines.transformers import Answer, Attached, attach, overlap
from kvtide.engines.transformers import attached as attached_module
from kvtide.engines.transformers.overlap import ChunkSizes, Overlap, chosen, sizes
from kvtide.errors import ClosedError
from kvtide.plan.prefill import PrefillCost
from kvtide.store.session import Session, SessionHost
from kvtide.testing.faults import Fault, FaultyDisk, How
from tests.engines.models import own, padded, prompt, smollm2, tiny
from tests.node.serving import Thread, eventually

BLOCK, BLOCKS = 16, 8
LENGTH = BLOCK * BLOCKS + 10
MORE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
BATCH = padded(prompt(LENGTH))


class PacedDisk(FaultyDisk):
    """A disk that reads only as long as fewer pieces than ``most`` have come."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 1 << 30
        self.arrived: Callable[[], int] = lambda: 0
        self.changed = threading.Condition()

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        with self.changed:
            self.changed.wait_for(lambda: self.arrived() < self.most)
        return super().read(fd, into, offset)

    def let(self, most: int) -> None:
        with self.changed:
            self.most = most
            self.changed.notify_all()


class Watch:
    """What a front computed, chunk by chunk, with something to be done in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
        self.chunks: list[tuple[int, int]] = []
        """The first token and the one after the last."""
        self.overlap: Overlap | None = None
        self.during: Callable[[int], None] = lambda number: None
        run = Overlap.run

        def watched(overlap: Overlap, model: PreTrainedModel, tokens: torch.Tensor) -> Any:
            self.overlap = overlap
            hook = model.register_forward_pre_hook(self._before, with_kwargs=True)
            try:
                return run(overlap, model, tokens)
            finally:
                hook.remove()

        monkeypatch.setattr(Overlap, "run", watched)

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start = kwargs["past_key_values"].get_seq_length()
        self.chunks.append((start, start + args[0].shape[1]))
        self.during(len(self.chunks) - 1)

    @property
    def now(self) -> Overlap:
        assert self.overlap is not None, "nothing was computed while loading"
        return self.overlap

    def until(self, arrived: int) -> None:
        """Wait until so many blocks have come."""
        with self.now._changed:
            assert self.now._changed.wait_for(lambda: self.now.arrived >= arrived, 60), f"{self.now.arrived} came"

    def over(self) -> None:
        assert not self.now._thread.is_alive()
        assert not self.now._pieces


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel) -> Watch:
    """Also makes it worth while for small models: chunks and pieces are one block."""
    monkeypatch.setattr(overlap, "_WORTH", 0.0)
    monkeypatch.setattr(overlap, "_SHORTEST", 0.0)
    monkeypatch.setattr(overlap, "_AHEAD", 1)
    monkeypatch.setattr(overlap, "_CLEARLY", 100.0)  # the disk's speed is measured anew at each read
    return Watch(monkeypatch, llama)


def settings(folder: Path) -> dict[str, Any]:
    nvme = {"path": str(folder), "budget": "64MiB", "segment": "4MiB", "store": "through"}
    return {"dram": {"budget": "16MiB", "segment": "4MiB"}, "nvme": nvme}


def on_disk(folder: Path, disk: FaultyDisk) -> Store:
    return Store(config.read(env={}, **settings(folder)), disk=disk)


def sections(output: Any) -> list[torch.Tensor]:
    return [t for layer in output.past_key_values.layers for t in (layer.keys, layer.values)]


def as_slow_as_loading(attached: Attached, blocks: int = BLOCKS, held: int = 0) -> None:
    """Let the model seem to compute a prompt as fast as the store loads it, of which it has ``held`` tokens in DRAM."""
    with (
        attached.store.session(attached.identity()) as session,
        session.match(BATCH["input_ids"][0].numpy().astype("uint32"), prefill=0) as match,
    ):
        assert match.blocks == blocks
        assert match.held_tokens == held
        attached.prefill.cost = PrefillCost(match.plan.load_seconds / (match.tokens - held))


@contextmanager
def cold(model: PreTrainedModel, folder: Path, disk: FaultyDisk) -> Iterator[tuple[Attached, Store, Any]]:
    """A store that has the prompt on disk alone, and what was stored."""
    with on_disk(folder, disk) as store, attach(model, store, block_tokens=BLOCK) as attached:
        first = attached.generate(**BATCH, **MORE).output
    with on_disk(folder, disk) as store, attach(model, store, block_tokens=BLOCK) as attached:
        as_slow_as_loading(attached)
        try:
            yield attached, store, first
        finally:
            if isinstance(disk, PacedDisk):  # closing waits for reads
                disk.let(1 << 30)
        assert store.statistics().held == 0, "a lease was not released"
        assert store.statistics().pinned == 0


def expected(model: PreTrainedModel, stored: Any, watch: Watch, stop: int) -> Any:
    """What the model answers that has computed these chunks of the first ``stop`` tokens, with what was stored in
    between and behind."""
    cache, at = DynamicCache(), 0
    with torch.no_grad():
        for start, end in [*watch.chunks, (stop, stop)]:
            if at < start:
                kept = [t[:, :, at:start] for t in sections(stored)]
                for number, (keys, values) in enumerate(zip(kept[0::2], kept[1::2], strict=True)):
                    cache.update(keys, values, number)
            if start < end:
                model(BATCH["input_ids"][:, start:end], past_key_values=cache, use_cache=True)
            at = end
    assert cache.get_seq_length() == stop
    return own(model, **BATCH, past_key_values=cache, **MORE)


def check(model: PreTrainedModel, stored: Any, watch: Watch, answer: Answer) -> None:
    """The answer, and each byte of KV, is that of a prefill in the same chunks with the same blocks loaded."""
    stop = watch.now._claimed * BLOCK
    wanted = expected(model, stored, watch, stop)
    assert torch.equal(answer.output.sequences, wanted.sequences)
    for ours, theirs in zip(sections(answer.output), sections(wanted), strict=True):
        assert torch.equal(ours, theirs)
    assert answer.report.cached == (stop - sum(end - start for start, end in watch.chunks),)
    assert torch.equal(answer.output.sequences, stored.sequences)
    watch.over()


@pytest.mark.parametrize(
    ("lets", "computed"),
    [
        ({0: 7}, 1),  # all that is not being computed comes during the first chunk
        ({0: 1, 1: 2, 2: 3, 3: 4}, 4),
        ({0: 0, 4: 2}, 6),
        ({6: 1}, 7),
        ({}, 8),  # nothing comes
    ],
)
def test_wherever_they_meet(
    llama: PreTrainedModel, tmp_path: Path, watch: Watch, lets: dict[int, int], computed: int
) -> None:
    disk = PacedDisk()

    def during(number: int) -> None:
        if number in lets:
            disk.let(lets[number])
            watch.until(lets[number])

    with cold(llama, tmp_path, disk) as (attached, store, stored):
        disk.arrived = lambda: watch.overlap.arrived if watch.overlap else 0
        disk.let(0)
        watch.during = during
        prompts = store.statistics().planner.prompts
        try:
            answer = attached.generate(**BATCH, **MORE)
        finally:
            disk.let(1 << 30)
        assert watch.chunks == [(i * BLOCK, (i + 1) * BLOCK) for i in range(computed)]
        check(llama, stored, watch, answer)
        assert store.statistics().planner.prompts == prompts + 1, "its pieces were counted as prompts"
        # What is not read yet by a disk that is stuck is read when it goes on; then nothing is held.
        assert eventually(lambda: store.statistics().held == 0)
        attached.prefill.cost = None
        assert attached.generate(**BATCH, **MORE).report.cached == (BLOCK * BLOCKS,), "blocks were lost"


def test_a_piece_that_the_front_has_reached_brings_only_what_is_behind_it(
    llama: PreTrainedModel, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PacedDisk()

    def during(number: int) -> None:
        if number == 6:  # of the piece with blocks 6 and 7, the first is being computed
            disk.let(1)
            watch.until(1)

    monkeypatch.setattr("kvtide.engines.transformers.attached.sizes", lambda *args: ChunkSizes(piece=2, chunk=1))
    with cold(llama, tmp_path, disk) as (attached, store, stored):
        disk.arrived = lambda: watch.overlap.arrived if watch.overlap else 0
        disk.let(0)
        watch.during = during
        try:
            answer = attached.generate(**BATCH, **MORE)
        finally:
            disk.let(1 << 30)
        assert len(watch.chunks) == 7
        assert answer.report.cached == (BLOCK,)
        check(llama, stored, watch, answer)
        assert eventually(lambda: store.statistics().held == 0)


@pytest.mark.parametrize("after", [0, 3, 6])
@pytest.mark.parametrize("how", [How.FAIL, How.FLIP])
def test_what_does_not_come_is_computed(
    llama: PreTrainedModel, tmp_path: Path, watch: Watch, after: int, how: How
) -> None:
    disk = FaultyDisk()

    def during(number: int) -> None:
        if number == 0:
            watch.now.wait()

    with cold(llama, tmp_path, disk) as (attached, _, stored):
        watch.during = during
        disk.arm(Fault("read", how, files="*.segment", after=after, times=1))
        answer = attached.generate(**BATCH, **MORE)
        assert len(disk.struck) == 1
        check(llama, stored, watch, answer)
        assert answer.report.cached[0] >= 6 * BLOCK


@pytest.mark.parametrize("number", [0, 2])
def test_an_error_in_the_model_ends_both(llama: PreTrainedModel, tmp_path: Path, watch: Watch, number: int) -> None:
    disk = PacedDisk()

    def during(now: int) -> None:
        if now == number:
            raise RuntimeError("this kernel failed")

    with cold(llama, tmp_path, disk) as (attached, store, stored):
        disk.let(0)
        watch.during = during
        answer = attached.generate(**BATCH, **MORE)
        watch.over()
        assert answer.report.reason == "RuntimeError: this kernel failed"
        assert torch.equal(answer.output.sequences, stored.sequences)
        disk.let(1 << 30)
        assert eventually(lambda: store.statistics().held == 0)


def test_an_interruption_ends_both(llama: PreTrainedModel, tmp_path: Path, watch: Watch) -> None:
    disk = PacedDisk()

    def during(now: int) -> None:
        raise KeyboardInterrupt

    with cold(llama, tmp_path, disk) as (attached, store, stored):
        disk.let(0)
        watch.during = during
        with pytest.raises(KeyboardInterrupt):
            attached.generate(**BATCH, **MORE)
        watch.over()
        disk.let(1 << 30)
        assert eventually(lambda: store.statistics().held == 0)
        watch.during = lambda number: None
        assert torch.equal(attached.generate(**BATCH, **MORE).output.sequences, stored.sequences)


def test_a_store_that_is_closed_meanwhile(llama: PreTrainedModel, tmp_path: Path, watch: Watch) -> None:
    disk = PacedDisk()

    def during(number: int) -> None:
        if number == 1:
            disk.let(1 << 30)
            store.close()

    with cold(llama, tmp_path, disk) as (attached, store, stored):
        disk.let(0)  # else all of it may come before the second chunk
        watch.during = during
        answer = attached.generate(**BATCH, **MORE)
        check(llama, stored, watch, answer)
        with pytest.raises(ClosedError):
            store.session(attached.identity())


@pytest.mark.parametrize("held", [0, 3])
def test_a_copy_during_which_the_session_was_closed_does_not_count(
    llama: PreTrainedModel, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """By then others may have written there."""
    with cold(llama, tmp_path, FaultyDisk()) as (attached, store, stored):
        if held:
            with store.session(attached.identity()) as session:
                session.prefetch(BATCH["input_ids"][0, : held * BLOCK].numpy().astype("uint32")).wait()
            as_slow_as_loading(attached, held=held * BLOCK)
        monkeypatch.setattr(Session, "closed", property(lambda session: True))
        watch.during = lambda number: watch.now.wait() if number == 0 else None
        answer = attached.generate(**BATCH, **MORE)
        assert answer.report.cached == (0,)
        assert watch.chunks
        assert torch.equal(answer.output.sequences, stored.sequences)


def test_what_is_in_memory_is_neither_loaded_nor_computed(llama: PreTrainedModel, tmp_path: Path, watch: Watch) -> None:
    disk = PacedDisk()

    def during(number: int) -> None:
        disk.let(1 << 30)
        watch.until(4)

    with cold(llama, tmp_path, disk) as (attached, store, stored):
        with store.session(attached.identity()) as session:
            session.prefetch(BATCH["input_ids"][0, : 3 * BLOCK].numpy().astype("uint32")).wait()
        as_slow_as_loading(attached, held=3 * BLOCK)  # the disk's speed was measured again
        disk.let(0)  # else all of it may come before the first chunk
        watch.during = during
        answer = attached.generate(**BATCH, **MORE)
        assert watch.chunks == [(3 * BLOCK, 4 * BLOCK)]
        check(llama, stored, watch, answer)


@pytest.mark.parametrize("kept", [0, 1])
def test_what_has_left_memory_meanwhile_is_computed_without_a_disk(
    llama: PreTrainedModel, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """The blocks are evicted after they were found in memory and before they are copied, and the disk hangs."""
    disk = PacedDisk()
    tokens = BATCH["input_ids"][0].numpy().astype("uint32")
    with cold(llama, tmp_path, disk) as (attached, store, stored), store.session(attached.identity()) as session:
        session.prefetch(tokens[: 3 * BLOCK]).wait()
        as_slow_as_loading(attached, held=3 * BLOCK)

        def evict(*args: Any) -> ChunkSizes:
            geometry = session.layout.geometry[session.layout.groups[0].name]
            count = store.config.dram.budget // geometry.footprint
            others = np.arange(count * BLOCK, dtype=np.uint32)
            with session.match(tokens[: kept * BLOCK], prefill=0):  # leased blocks stay
                session.store(others, [np.zeros(geometry.nbytes, np.uint8)] * count)
            assert store.flush(60)  # what waits to be written takes memory that loads need
            with session.match(tokens, prefill=0, again=True) as match:
                assert (match.blocks, match.held_tokens) == (BLOCKS, kept * BLOCK)
            return ChunkSizes(1, 1)

        monkeypatch.setattr(attached_module, "sizes", evict)
        disk.let(0)
        with ThreadPoolExecutor(1) as executor:
            try:
                answer = executor.submit(attached.generate, **BATCH, **MORE).result(60)
            finally:
                disk.let(1 << 30)
        assert answer.report.cached == (kept * BLOCK,)
        assert watch.chunks == [(i * BLOCK, (i + 1) * BLOCK) for i in range(kept, BLOCKS)]
        check(llama, stored, watch, answer)
        assert eventually(lambda: store.statistics().held == 0)


def test_a_disk_that_hangs_does_not_hang_the_model(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the whole prompt was to be loaded."""
    disk = PacedDisk()
    monkeypatch.setattr(attached_module, "_OVERDUE", 0.1)
    with cold(llama, tmp_path, disk) as (attached, store, stored):
        attached.prefill.cost = PrefillCost(1e-3)  # a thousand times as slow as loading
        disk.let(0)
        answer = attached.generate(**BATCH, **MORE)
        assert answer.report.cached == (0,)
        assert torch.equal(answer.output.sequences, stored.sequences)
        disk.let(1 << 30)
        assert eventually(lambda: store.statistics().held == 0)


def test_a_prompt_of_whole_blocks_computes_its_last_token(llama: PreTrainedModel, tmp_path: Path, watch: Watch) -> None:
    batch = padded(prompt(BLOCK * BLOCKS))
    disk = PacedDisk()

    def during(number: int) -> None:
        disk.let(1 << 30)
        watch.until(7)

    with cold(llama, tmp_path, disk) as (attached, _, _):
        disk.let(0)  # else all of it may come before the first chunk
        watch.during = during
        answer = attached.generate(**batch, **MORE)
        assert answer.report.cached == (BLOCK * (BLOCKS - 1) - 1,)
        assert torch.equal(answer.output.sequences, own(llama, **batch, **MORE).sequences)


@pytest.mark.parametrize("dies", [False, True], ids=["stays", "dies"])
def test_behind_a_node(llama: PreTrainedModel, tmp_path: Path, watch: Watch, dies: bool) -> None:
    path = tmp_path / "node.sock"

    @contextmanager
    def node() -> Iterator[tuple[Thread, SessionHost]]:
        thread = Thread(path, **settings(tmp_path / "tier"))
        try:
            with kvtide.connect(f"unix:{path}") as client:
                yield thread, client
        finally:
            if not thread.store.closed:
                thread.close()

    with node() as (_, client), attach(llama, client, block_tokens=BLOCK) as attached:
        stored = attached.generate(**BATCH, **MORE).output
    with node() as (thread, client), attach(llama, client, block_tokens=BLOCK) as attached:
        as_slow_as_loading(attached)

        def during(number: int) -> None:
            if number == 0:
                watch.until(2)
            elif number == 1 and dies:
                thread.close()

        watch.during = during
        answer = attached.generate(**BATCH, **MORE)
        check(llama, stored, watch, answer)
        assert answer.report.cached[0] >= 2 * BLOCK
        if not dies:
            attached.flush()
            assert eventually(lambda: thread.store.statistics().held == 0)
            assert thread.store.statistics().planner.prompts <= 3


def test_a_real_model_answers_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = smollm2()
    monkeypatch.setattr(overlap, "_WORTH", 0.0)
    monkeypatch.setattr(overlap, "_SHORTEST", 0.0)
    monkeypatch.setattr(overlap, "_CLEARLY", 100.0)
    watch = Watch(monkeypatch, model)
    text = " ".join(f"Valve {n} opens at {n * 3} degrees." for n in range(20))
    talk = [{"role": "user", "content": f"{text}\nAt how many degrees does valve 7 open?"}]
    batch = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    sizes = {"dram": {"budget": "256MiB", "segment": "16MiB"}}
    nvme = {"path": str(tmp_path), "budget": "1GiB", "segment": "64MiB", "store": "through"}
    with kvtide.open(**sizes, nvme=nvme) as store, attach(model, store, block_tokens=32) as attached:
        first = attached.generate(**batch, **MORE).output
    disk = PacedDisk()
    opened = Store(config.read(env={}, dram=sizes["dram"], nvme=nvme), disk=disk)
    with opened as store, attach(model, store, block_tokens=32) as attached:
        with (
            store.session(attached.identity()) as session,
            session.match(batch["input_ids"][0].numpy().astype("uint32"), prefill=0) as match,
        ):
            attached.prefill.cost = PrefillCost(match.plan.load_seconds / match.tokens)
            tokens = match.tokens

        def during(number: int) -> None:
            disk.let(1 << 30)
            watch.until(min(3, tokens // 32 - 1))

        disk.let(0)  # else all of it may come before the first chunk
        watch.during = during
        answer = attached.generate(**batch, **MORE)
        assert torch.equal(answer.output.sequences, first.sequences)
        assert watch.chunks
        assert answer.report.cached == (tokens - sum(stop - start for start, stop in watch.chunks),)
        assert answer.report.cached[0] >= 3 * 32
        watch.over()
        assert store.statistics().held == 0


def test_one_alone_where_it_is_clearly_quicker() -> None:
    assert chosen(1.0, 1.0)
    assert chosen(2.9, 1.0)
    assert chosen(1.0, 2.9)
    assert not chosen(3.0, 1.0)
    assert not chosen(1.0, 3.0)
    assert not chosen(0.0, 0.0)
    assert not chosen(0.01, 0.01), "too short to be worth it"


def test_steps_are_blocks_and_not_too_large() -> None:
    llama = 32 << 20  # bytes of a block of 256 tokens with the shape of Llama-3-8B
    assert sizes(512, 256, llama, 8.0, 8.0) == (2, 8)
    assert sizes(8, 256, llama, 8.0, 8.0) == (1, 1)
    assert sizes(4, 4096, 512 << 20, 1.0, 1.0) == (1, 1)


def test_batches_are_loaded_as_before(llama: PreTrainedModel, tmp_path: Path, watch: Watch) -> None:
    with cold(llama, tmp_path, FaultyDisk()) as (attached, _, stored):
        batch = padded(prompt(LENGTH), prompt(LENGTH))
        answer = attached.generate(**batch, **MORE)
        assert watch.overlap is None
        assert torch.equal(answer.output.sequences[:1], stored.sequences)


def test_who_may_not_copy_computes(
    llama: PreTrainedModel, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail fails in a way of its own: the front goes on alone."""

    def fail(*args: Any) -> Any:
        raise MemoryError("no staging memory")

    with cold(llama, tmp_path, FaultyDisk()) as (attached, store, stored):
        monkeypatch.setattr(HostMover, "load", fail)
        answer = attached.generate(**BATCH, **MORE)
        monkeypatch.undo()
        assert answer.report.cached == (0,)
        assert torch.equal(answer.output.sequences, stored.sequences)
        assert store.statistics().held == 0
