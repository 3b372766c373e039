"""A store attached to a model: the same answers, from less work, whatever happens to blocks, weights and callers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

import kvtide
from kvtide import Store, Tenant, config
from kvtide.block import LOSSY
from kvtide.engines.paged import HostMover, Move, Pages
from kvtide.engines.transformers import Attached, Report, attach
from kvtide.engines.transformers.dynamic_cache import fill, sections_of
from kvtide.engines.transformers.prompts import Prompts
from kvtide.errors import LayoutError, RightError
from kvtide.plan.prefill import PrefillCost
from kvtide.testing.faults import Fault, FaultyDisk, How
from tests.engines.models import FAMILIES, own, padded, prompt, reference, smollm2, tiny

MORE: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
OTHER = Tenant("other", b"0123456789abcdef0123456789abcdef")


def plain(model: PreTrainedModel, batch: dict[str, Any], **kwargs: Any) -> Any:
    """What the model answers without us."""
    return own(model, **batch, **(MORE | kwargs))


def sections(output: Any) -> list[torch.Tensor]:
    return [t for layer in output.past_key_values.layers for t in (layer.keys, layer.values)]


@pytest.fixture
def store() -> Iterator[Store]:
    with kvtide.open(dram={"budget": "256MiB", "segment": "16MiB"}) as store:
        yield store
        assert store.statistics().held == 0, "a lease was not released"


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """For tests that do not change it."""
    return tiny()


# -- the same answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [255, 256, 257, 512, 513])
def test_prompts_around_the_borders_of_blocks(family: str, length: int, store: Store) -> None:
    model, batch = tiny(family), padded(prompt(length))
    with attach(model, store) as attached:
        first = attached.generate(**batch, **MORE, return_dict_in_generate=True)
        again = attached.generate(**batch, **MORE, return_dict_in_generate=True)
    border = min(length // 256 * 256, length - 1)
    assert first.report == Report((length,), (0,))
    assert again.report == Report((length,), (border,))
    for computed, loaded in zip(sections(first.output), sections(again.output), strict=True):
        assert torch.equal(computed[:, :, :border], loaded[:, :, :border]), "not the bytes that were stored"
    cold = plain(model, batch)
    assert torch.equal(first.output.sequences, cold)
    assert torch.equal(again.output.sequences, reference(model, batch, border, **MORE))
    assert torch.equal(again.output.sequences, cold)


def test_a_turn_finds_the_turns_before_it_and_what_was_answered(llama: PreTrainedModel, store: Store) -> None:
    with attach(llama, store, block_tokens=16) as attached:
        talk = prompt(40)
        for turn in range(4):
            batch = padded(torch.cat([talk, prompt(5, seed=turn + 2)], dim=1))
            answer = attached.generate(**batch, **MORE)
            # The KV of the last token that was generated is not known before the next call.
            assert answer.report.cached == ((talk.shape[1] - 1) // 16 * 16 if turn else 0,)
            assert torch.equal(answer.output, plain(llama, batch))
            talk = answer.output
        assert attached.statistics().cached_tokens == sum((40 + 17 * turn - 1) // 16 * 16 for turn in (1, 2, 3))


def test_a_batch_reuses_of_each_row_what_the_worst_row_allows(llama: PreTrainedModel, store: Store) -> None:
    with attach(llama, store, block_tokens=32) as attached:
        known, longer = prompt(70), torch.cat([prompt(64), prompt(30, seed=3)], dim=1)
        attached.generate(**padded(known), **MORE)
        batch = padded(known, longer, prompt(20, seed=4))  # 64 of 70, 64 of 94, and nothing of the last
        answer = attached.generate(**batch, **MORE)
        border = min(24 + 64, 0 + 64, 74 + 0)
        assert answer.report == Report((70, 94, 20), (border - 24, border, 0))
        assert torch.equal(answer.output, reference(llama, batch, border, **MORE))
        assert torch.equal(answer.output, plain(llama, batch))


def test_what_a_padded_row_computed_serves_the_prompt_alone(llama: PreTrainedModel, store: Store) -> None:
    with attach(llama, store, block_tokens=32) as attached:
        attached.generate(**padded(prompt(70), prompt(200, seed=2)), **MORE)
        alone = padded(prompt(70))
        answer = attached.generate(**alone, **MORE)
        assert answer.report.cached == (64,)
        assert torch.equal(answer.output, plain(llama, alone))


def test_rows_that_ended_are_not_stored_with_what_follows(store: Store) -> None:
    model, batch = tiny(), padded(prompt(40), prompt(40, seed=2))
    end = plain(model, batch)[0, 44].item()  # the fifth token of one answer ends that answer
    long = {"max_new_tokens": 60, "eos_token_id": end, "pad_token_id": 0}
    with attach(model, store, block_tokens=16) as attached:
        output = attached.generate(**batch, **(MORE | long)).output
        assert torch.equal(output, plain(model, batch, **long))
        attached.flush()
        with store.session(attached.identity()).match(output[0].numpy().astype("uint32")) as match:
            assert match.tokens == (40 + 5) // 16 * 16


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 3), st.integers(0, 90)), min_size=1, max_size=4),
    calls=st.integers(2, 3),
)
def test_any_batch_after_any_other(rows: list[tuple[int, int, int]], calls: int) -> None:
    """Prompts of a shared beginning and an end of their own, asked for in batches that change from call to call."""
    model = tiny()
    with (
        kvtide.open(dram={"budget": "64MiB", "segment": "4MiB"}) as store,
        attach(model, store, block_tokens=16) as attached,
    ):
        for call in range(calls):
            chosen = rows[call % len(rows) :] or rows
            batch = padded(*(torch.cat([prompt(a, seed), prompt(b, seed + 7)], 1) for a, seed, b in chosen))
            answer = attached.generate(**batch, **MORE)
            assert torch.equal(answer.output, plain(model, batch))
        assert answer.report.reason == ""
        assert store.statistics().held == 0


def test_a_real_model_answers_the_same_from_memory_and_from_disk(tmp_path: Path) -> None:
    model, tokenizer = smollm2()
    text = " ".join(f"The {n}th lighthouse of the coast was lit in the year {1700 + 3 * n}." for n in range(1, 40))
    talk = [{"role": "user", "content": f"{text}\nWhich lighthouse was lit in 1721?"}]
    batch = dict(tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True))
    length = batch["input_ids"].shape[1]
    assert length > 768
    cold = plain(model, batch)
    border = length // 256 * 256
    where: dict[str, Any] = {
        "dram": {"budget": "256MiB"},
        "nvme": {"path": str(tmp_path), "budget": "512MiB", "store": "through"},
    }
    with kvtide.open(**where) as store, attach(model, store) as attached:
        for cached in (0, border):
            answer = attached.generate(**batch, **MORE)
            assert answer.report.cached == (cached,)
            assert torch.equal(answer.output, cold)
    with kvtide.open(**where) as store, attach(model, store) as attached:
        answer = attached.generate(**batch, **MORE)
        assert answer.report.cached == (border,)
        assert torch.equal(answer.output, cold)
        assert torch.equal(answer.output, reference(model, batch, border, **MORE))
        assert store.statistics().counts["blocks read from nvme"] == border // 256


# -- as before --------------------------------------------------------------------------------------------


def test_the_model_is_used_as_before(store: Store) -> None:
    model, batch = tiny(), padded(prompt(300))
    own = model.generate
    attached = attach(model, store)
    assert torch.equal(model.generate(batch["input_ids"], **MORE), plain(model, batch))  # type: ignore[operator]
    assert torch.equal(model.generate(**batch, **MORE), plain(model, batch))  # type: ignore[operator]
    assert attached.statistics().last == Report((300,), (256,))
    with pytest.raises(RightError, match="has a store already"):
        attach(model, store)
    attached.detach()
    attached.detach()
    assert model.generate == own
    assert "generate" not in vars(model)


def test_a_streamer_gets_every_token_once(llama: PreTrainedModel, store: Store) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    batch = padded(prompt(300))
    with attach(llama, store) as attached:
        for _ in range(2):
            streamer = Streamer()
            output = attached.generate(**batch, **MORE, streamer=streamer).output
            assert streamer.tokens == [*output[0].tolist(), -1]


def test_sampling_draws_the_same(llama: PreTrainedModel, store: Store) -> None:
    batch, how = padded(prompt(300)), {"do_sample": True, "temperature": 0.7}
    torch.manual_seed(7)
    expected = plain(llama, batch, **how)
    with attach(llama, store) as attached:
        for _ in range(2):
            torch.manual_seed(7)
            assert torch.equal(attached.generate(**batch, **(MORE | how)).output, expected)


@pytest.mark.parametrize("where", ["call", "settings", "model"])
def test_who_asks_for_the_usual_cache_gets_ours(
    llama: PreTrainedModel, store: Store, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    batch, settings = padded(prompt(300)), copy(llama.generation_config)
    settings.update(cache_implementation="dynamic", **MORE)
    how: dict[str, Any] = {
        "call": MORE | {"cache_implementation": "dynamic"},
        "settings": {"generation_config": settings},
    }
    if where == "model":
        monkeypatch.setattr(llama, "generation_config", settings)
    expected = own(llama, **batch, **how.get(where, {}))
    with attach(llama, store) as attached:
        for cached in (0, 256):
            answer = attached.generate(**batch, **how.get(where, {}))
            assert answer.report.cached == (cached,)
            assert torch.equal(answer.output, expected)
    assert settings.cache_implementation == "dynamic", "it is the caller's"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        ({"use_cache": False}, "use_cache is False"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"prefill_chunk_size": 64}, "prefill_chunk_size is 64"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3"),
        ({"position_ids": torch.arange(300)[None]}, "position_ids is given"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values is given"),
        ({"generation_config": transformers.GenerationConfig(num_beams=2, max_new_tokens=3)}, "num_beams is 2"),
    ],
)
def test_a_call_that_is_not_for_us_is_passed_on(
    llama: PreTrainedModel, store: Store, extra: dict[str, Any], reason: str
) -> None:
    batch, more = padded(prompt(300)), {} if "generation_config" in extra else MORE
    with attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        torch.manual_seed(0)
        answer = attached.generate(**batch, **(more | extra))
        assert answer.report == Report((), (), reason)
        assert attached.statistics().passed_on == {reason: 1}
    if isinstance(extra.get("past_key_values"), transformers.DynamicCache):
        extra = {"past_key_values": transformers.DynamicCache()}
    torch.manual_seed(0)
    assert torch.equal(answer.output, own(llama, **batch, **(more | extra)))


def test_embeddings_and_odd_masks_are_passed_on(llama: PreTrainedModel, store: Store) -> None:
    ids, holes = prompt(300), torch.ones((1, 300), dtype=torch.long)
    holes[0, 7] = 0
    right = torch.ones((2, 300), dtype=torch.long)
    right[0, 250:] = 0
    embeds = llama.get_input_embeddings()(ids).detach()
    with attach(llama, store) as attached:
        assert attached.generate(inputs_embeds=embeds, **MORE).report.reason == "inputs_embeds is given"
        odd: list[dict[str, Any]] = [
            {"input_ids": ids, "attention_mask": holes},
            {"input_ids": ids.expand(2, -1), "attention_mask": right},
        ]
        for batch in odd:
            answer = attached.generate(**batch, **MORE)
            assert answer.report.reason == "the attention_mask hides tokens inside or after a prompt"
            assert torch.equal(answer.output, plain(llama, batch))
        with_padding = torch.cat([torch.zeros((1, 3), dtype=torch.long), ids], dim=1)
        answer = attached.generate(with_padding, **MORE)
        assert "no attention_mask" in answer.report.reason
        assert torch.equal(answer.output, plain(llama, {"input_ids": with_padding}))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bf16
def test_no_reuse_in_training_or_under_autocast(store: Store) -> None:
    model, batch = tiny(), padded(prompt(300))
    with attach(model, store) as attached:
        with torch.autocast("cpu", torch.bfloat16):
            assert attached.generate(**batch, **MORE).report.reason == "autocast is on"
        model.train()
        assert "model.eval()" in attached.generate(**batch, **MORE).report.reason


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("T5", {"vocab_size": 64, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16}, "has an encoder"),
        ("Mamba", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}, "does not keep keys and values"),
        (
            "Llama",
            {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
            | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "RoPE of type 'dynamic'",
        ),
    ],
)
def test_a_model_whose_kv_does_not_last_is_refused(name: str, sizes: dict[str, Any], reason: str, store: Store) -> None:
    kind = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    model = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**sizes))
    with pytest.raises(LayoutError, match=reason):
        attach(model, store)
    assert "generate" not in vars(model)


# -- whose KV it is ---------------------------------------------------------------------------------------


def cached(attached: Attached, **kwargs: Any) -> int:
    """How much of the same prompt is reused now; the answer must be the model's own."""
    batch = padded(prompt(300))
    answer = attached.generate(**batch, **MORE, **kwargs)
    assert torch.equal(answer.output, plain(attached.model, batch))
    return sum(answer.report.cached)


def test_tenants_share_nothing(llama: PreTrainedModel, store: Store) -> None:
    with attach(llama, store) as attached:
        assert [cached(attached, tenant=t) for t in (OTHER, OTHER)] == [0, 256]
        assert [cached(attached) for _ in range(2)] == [0, 256]


def test_weights_that_change_in_place_share_nothing(store: Store) -> None:
    model = tiny()
    with attach(model, store) as attached, torch.no_grad():
        assert [cached(attached), cached(attached)] == [0, 256]
        weight: Any = model.model.layers[1].self_attn.k_proj.weight
        weight.mul_(1.5)
        assert [cached(attached), cached(attached)] == [0, 256]
        weight.data.mul_(1.5)  # which torch does not count
        assert [cached(attached), cached(attached)] == [0, 256]
        weight[1, 1] += 1  # which samples are likely to miss
        assert [cached(attached), cached(attached)] == [0, 256]


def test_equal_weights_share_and_others_do_not(store: Store) -> None:
    for seed, expected in ((0, 0), (0, 256), (1, 0)):
        with attach(tiny(seed=seed), store) as attached:
            assert cached(attached) == expected


def test_another_configuration_shares_nothing(store: Store) -> None:
    with attach(tiny(), store) as attached:
        cached(attached)
    with attach(tiny(rms_norm_eps=1e-3), store) as attached:
        assert cached(attached) == 0


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bf16
def test_dtypes_and_fidelities_share_nothing(store: Store) -> None:
    model = tiny()
    with attach(model, store) as attached:
        assert [cached(attached), cached(attached)] == [0, 256]
        tokens = prompt(300)[0].numpy().astype("uint32")
        lossy = replace(attached.identity(), fidelity="fp8")
        with store.session(lossy).match(tokens) as match:
            assert match.tokens == 0
        model.bfloat16()
        batch = padded(prompt(300))
        assert attached.generate(**batch, **MORE).report.cached == (0,)
        answer = attached.generate(**batch, **MORE)
        assert answer.report.cached == (256,)
        assert torch.equal(answer.output, reference(model, batch, 256, **MORE))


@pytest.mark.parametrize("fidelity", LOSSY)
def test_a_lossy_form_is_smaller_and_no_other_fidelity_finds_it(fidelity: str, store: Store) -> None:
    model, batch = tiny(), padded(prompt(300))
    with attach(model, store, fidelity=fidelity) as attached:
        first = attached.generate(**batch, **MORE, return_dict_in_generate=True)
        assert first.report.cached == (0,)
        again = attached.generate(**batch, **MORE, return_dict_in_generate=True)
        assert again.report.cached == (256,)
        for exact, coded in zip(sections(first.output), sections(again.output), strict=True):
            assert not torch.equal(exact[:, :, :256], coded[:, :, :256])
            assert torch.allclose(exact[:, :, :256], coded[:, :, :256], atol=float(0.2 * exact.abs().max()))
        small = attached.identity().layout.geometry["full"].nbytes
    with attach(model, store) as attached:
        assert cached(attached) == 0
        assert small < attached.identity().layout.geometry["full"].nbytes / 3
    with pytest.raises(LayoutError, match="no fidelity 'fp9'; choose of exact, fp8"):
        attach(model, store, fidelity="fp9")


def test_adapters_share_nothing(store: Store) -> None:
    """Layers as PEFT makes them: which adapter is at work is no parameter of the model."""
    model = tiny()
    layer: Any = model.model.layers[0].self_attn.q_proj
    layer._active_adapter, layer._disable_adapters, layer.merged_adapters, layer.scaling = ["a"], False, [], {"a": 1.0}
    with attach(model, store) as attached:
        assert [cached(attached), cached(attached)] == [0, 256]
        layer._active_adapter = ["b"]
        assert cached(attached) == 0
        layer._active_adapter = ["a"]
        assert cached(attached) == 256
        layer.scaling = {"a": 0.5}
        assert cached(attached) == 0


# -- when things go wrong ---------------------------------------------------------------------------------


def on_disk(folder: Path, disk: FaultyDisk, **plan: Any) -> Store:
    nvme = {"path": str(folder), "budget": "64MiB", "segment": "4MiB", "store": "through"}
    return Store(config.read(env={}, dram={"budget": "16MiB", "segment": "4MiB"}, nvme=nvme, plan=plan), disk=disk)


@pytest.mark.parametrize("how", [How.FAIL, How.FLIP, How.SHORT])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_block_that_does_not_come_back_is_computed(
    llama: PreTrainedModel, tmp_path: Path, how: How, after: int
) -> None:
    disk, batch = FaultyDisk(), padded(prompt(300))
    with on_disk(tmp_path, disk) as store, attach(llama, store, block_tokens=64) as attached:
        attached.generate(**batch, **MORE)
    with on_disk(tmp_path, disk) as store, attach(llama, store, block_tokens=64) as attached:
        disk.arm(Fault("read", how, files="*.segment", after=after, times=1))
        answer = attached.generate(**batch, **MORE)
        assert len(disk.struck) == 1
        (border,) = answer.report.cached
        assert border in (0, 64, 128, 192)
        assert torch.equal(answer.output, reference(llama, batch, border, **MORE))
        assert torch.equal(answer.output, plain(llama, batch))
        assert attached.generate(**batch, **MORE).report.cached == (256,), "it was stored again"
        assert store.statistics().held == 0


def test_blocks_that_are_late_are_computed(llama: PreTrainedModel, tmp_path: Path) -> None:
    disk, batch = FaultyDisk(), padded(prompt(300))
    with on_disk(tmp_path, disk) as store, attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
    with (
        on_disk(tmp_path, disk, deadline_seconds=0.05) as store,
        attach(llama, store) as attached,
        disk.gate("read"),
    ):
        answer = attached.generate(**batch, **MORE)
        assert answer.report.cached == (0,)
        assert torch.equal(answer.output, plain(llama, batch))


def test_what_is_computed_sooner_is_not_loaded(llama: PreTrainedModel, tmp_path: Path) -> None:
    """The model's own speed decides, as soon as it is known."""
    disk, batch = FaultyDisk(), padded(prompt(300))
    with on_disk(tmp_path, disk) as store, attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        assert attached.prefill.cost
    for speed, cached in [(1e12, 0), (1e-3, 256)]:
        with on_disk(tmp_path, disk) as store, attach(llama, store) as attached:
            attached.prefill.cost = PrefillCost(1 / speed)
            answer = attached.generate(**batch, **MORE)
            assert answer.report.cached == (cached,)
            assert torch.equal(answer.output, plain(llama, batch))


def test_whatever_goes_wrong_in_a_load_is_not_the_callers(
    llama: PreTrainedModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without memory, a compiler that is missing: errors that are not ours."""

    class Broken(HostMover):
        def load(self, pages: Pages, copies: Any) -> Move:
            raise torch.OutOfMemoryError

    batch = padded(prompt(300))
    with attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        monkeypatch.setattr(attached, "_movers", {torch.device("cpu"): Broken()})
        answer = attached.generate(**batch, **MORE)
        assert "OutOfMemoryError" in answer.report.reason
        assert torch.equal(answer.output, plain(llama, batch))


def test_blocks_are_held_until_the_copies_are_over(
    llama: PreTrainedModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU copies while ``generate`` begins: the blocks are let go at the first token, or when it fails before."""

    class Late(HostMover):
        waited = 0

        def load(self, pages: Pages, copies: Any) -> Move:
            super().load(pages, copies)
            late = Move()
            vars(late)["wait"] = self._wait
            return late

        def _wait(self) -> None:
            assert held(), "a block was let go while it was copied"
            Late.waited += 1

    def held() -> int:
        return sum(len(session._rights) for session in attached._sessions.values())

    seen = []

    def look(input_ids: torch.Tensor, *_: Any, **more: Any) -> torch.Tensor:
        seen.append(held())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def fail(*_: Any, **more: Any) -> torch.Tensor:
        raise ZeroDivisionError

    batch = padded(prompt(300))
    with attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        monkeypatch.setattr(attached, "_movers", {torch.device("cpu"): Late()})
        answer = attached.generate(**batch, **MORE, stopping_criteria=[look])
        assert answer.report.cached == (256,)
        assert torch.equal(answer.output, plain(llama, batch))
        assert seen[:2] == [1, 0], "held until the first token, and no longer"
        with pytest.raises(ZeroDivisionError):
            attached.generate(**batch, **MORE, stopping_criteria=[fail])
        assert (Late.waited, held()) == (2, 0)


def test_prompt_tuning_is_passed_on_and_stores_nothing(store: Store) -> None:
    """As PEFT does it: what it prepares has other tokens before the prompt, which belong to no weight of the model."""
    model, batch = tiny(), padded(prompt(300))
    with attach(model, store) as attached:
        vars(model)["prepare_inputs_for_generation"] = model.prepare_inputs_for_generation
        assert "prepares" in attached.generate(**batch, **MORE).report.reason
        del vars(model)["prepare_inputs_for_generation"]
        assert attached.generate(**batch, **MORE).report.cached == (0,)


def test_a_cache_that_holds_more_than_the_sequence_is_not_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = tiny(), padded(prompt(300))
    monkeypatch.setattr(transformers.DynamicCache, "get_seq_length", lambda self, layer_idx=0: 1000)
    with attach(model, store) as attached:
        session = attached.store.session(attached.identity())
        attached._keep(session, [], Prompts([], []), DynamicCache(), batch["input_ids"], session.expect)
    assert "not stored" in caplog.text


def test_no_past_is_no_past_of_the_callers(llama: PreTrainedModel, store: Store) -> None:
    batch = padded(prompt(300))
    with attach(llama, store) as attached:
        for cached in (0, 256):
            answer = attached.generate(**batch, **MORE, past_key_values=None)
            assert answer.report.cached == (cached,)


def test_adapters_of_each_row_are_passed_on(store: Store) -> None:
    model = tiny()
    layer: Any = model.model.layers[0].self_attn.q_proj
    layer._active_adapter, layer._disable_adapters, layer.merged_adapters, layer.scaling = ["a"], False, [], {"a": 1.0}
    with attach(model, store) as attached:
        hook = layer.register_forward_pre_hook(lambda *_: None)
        assert "another adapter for each row" in attached.generate(**padded(prompt(300)), **MORE).report.reason
        hook.remove()
        assert [cached(attached), cached(attached)] == [0, 256]


def test_more_tenants_than_are_remembered(llama: PreTrainedModel, store: Store) -> None:
    """The oldest sessions are closed; their blocks are found again."""
    batch = padded(prompt(300))
    tenants = [Tenant(f"{i}", bytes([i]) * 32) for i in range(1, 70)]
    with attach(llama, store) as attached:
        for tenant in tenants:
            assert attached.generate(**batch, tenant=tenant, max_new_tokens=1).report.cached == (0,)
        attached.flush()
        assert store.statistics().sessions <= 65
        assert attached.generate(**batch, tenant=tenants[0], max_new_tokens=1).report.cached == (256,)


def test_a_store_that_was_closed_changes_no_answer(llama: PreTrainedModel) -> None:
    store, batch = kvtide.open(dram={"budget": "64MiB"}), padded(prompt(300))
    with attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        attached.flush()
        store.close()
        answer = attached.generate(**batch, **MORE)
        assert answer.report.reason.startswith("ClosedError")
        assert torch.equal(answer.output, plain(llama, batch))


def test_a_store_that_is_closed_while_blocks_are_copied_changes_no_answer(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write to the memory of the blocks from then on, so what was copied is not used."""
    store, batch = kvtide.open(dram={"budget": "64MiB"}), padded(prompt(300))

    def fill_and_close(*given: Any) -> tuple[DynamicCache, Any]:
        cache, copies = fill(*given)
        store.close()
        for tensor in sections_of(cache):
            tensor.zero_()
        return cache, copies

    with attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        attached.flush()
        monkeypatch.setattr("kvtide.engines.transformers.attached.fill", fill_and_close)
        answer = attached.generate(**batch, **MORE)
        assert answer.report.reason.startswith("ClosedError: the store was closed while")
        assert torch.equal(answer.output, plain(llama, batch))


def test_an_error_in_generate_is_the_callers_and_holds_nothing(llama: PreTrainedModel, store: Store) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    batch = padded(prompt(300))
    with attach(llama, store) as attached:
        attached.generate(**batch, **MORE)
        with pytest.raises(ZeroDivisionError):
            attached.generate(**batch, **MORE, logits_processor=[fail])
        assert store.statistics().held == 0
        assert attached.generate(**batch, **MORE).report.cached == (256,)


def test_a_store_without_room_drops_and_counts(llama: PreTrainedModel) -> None:
    batch = padded(prompt(2000))
    with kvtide.open(dram={"budget": "1MiB", "segment": "1MiB"}) as store, attach(llama, store) as attached:
        for _ in range(2):
            assert torch.equal(attached.generate(**batch, **MORE).output, plain(llama, batch))
        attached.flush()
        assert attached.statistics().dropped_blocks > 0
        assert store.statistics().held == 0


def test_answers_are_dropped_when_too_many_wait(llama: PreTrainedModel, store: Store) -> None:
    go = threading.Event()

    def others_come_first(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        while attached._background.put(lambda: None if go.wait(60) else pytest.fail("nobody opened")):
            pass
        return scores

    batch = padded(prompt(300))
    with attach(llama, store) as attached:
        answer = attached.generate(**batch, **MORE, logits_processor=[others_come_first])
        assert torch.equal(answer.output, plain(llama, batch))
        assert attached.statistics().dropped_blocks == 1
        go.set()
        assert attached.generate(**batch, **MORE).report.cached == (0,)


def test_threads_get_the_report_of_their_own_call(llama: PreTrainedModel, store: Store) -> None:
    with attach(llama, store, block_tokens=16) as attached, ThreadPoolExecutor(4) as pool:
        batches = {length: padded(prompt(length, seed=length)) for length in range(40, 200, 20)}
        expected = {length: plain(llama, batch) for length, batch in batches.items()}

        def ask(length: int) -> tuple[int, Any]:
            return length, attached.generate(**batches[length], **MORE)

        for cold in (True, False):
            for length, answer in pool.map(ask, batches):
                assert answer.report == Report((length,), (0 if cold else min(length // 16 * 16, length - 1),))
                assert torch.equal(answer.output, expected[length])


SCRIPT = """
import torch
from kvtide.engines.transformers import attach
from tests.engines.models import padded, prompt, tiny
model = tiny()
attached = attach(model)
model.generate(**padded(prompt(300)), max_new_tokens=2, do_sample=False)
print(sum(attached.statistics().last.cached))
"""


def test_a_store_by_the_settings_in_force_outlives_a_process_that_just_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_DRAM_BUDGET", "64MiB")
    monkeypatch.setenv("KVTIDE_NVME_PATH", str(tmp_path / "kv"))
    monkeypatch.setenv("KVTIDE_NVME_BUDGET", "64MiB")
    for expected in ("0", "256"):
        root = Path(__file__).parent.parent.parent
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [expected]
