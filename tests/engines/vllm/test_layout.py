"""What is concluded from vLLM's configuration, and what is refused."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtide import Model
from kvtide.block import Group, Kind, Layout, Slice
from kvtide.engines.identity import settings
from kvtide.engines.paged import Copy, HostMover, packing
from kvtide.engines.vllm import layout as under_test
from kvtide.engines.vllm.identity import identity
from kvtide.engines.vllm.layout import Layouts, attention_pages, latents, layouts, pages
from kvtide.errors import ConfigError, LayoutError
from tests.engines.vllm.checkpoints import random_llama

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=128, **HEADS)


@functools.cache
def _config() -> Any:
    arguments = EngineArgs(model=str(random_llama()), dtype="float32", skip_tokenizer_init=True, enforce_eager=True)
    return arguments.create_engine_config()


@pytest.fixture
def config() -> Any:
    """The configuration of an engine for a model of 4 layers, 8 heads and 2 KV heads; to be changed at will."""
    return copy.deepcopy(_config())


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        device_name = "cuda"

        def is_cpu(self) -> bool:
            return False

        def is_cuda(self) -> bool:
            return True

    monkeypatch.setattr(under_test, "current_platform", Cuda())


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


def caches(*groups: tuple[list[str], KVCacheSpec]) -> Any:
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in groups]
    )


# -- layouts --------------------------------------------------------------------------------------------------


def test_a_model_with_full_attention(config: Any) -> None:
    found = layouts(config, caches((layers(2, 10, 1, 0), FULL)))
    assert found.own == Layout.attention(layers=4, heads=2, head_dim=64, dtype="float32", page=128, packing="vec")
    assert found.others == (Layout.attention(layers=4, heads=2, head_dim=64, dtype="float32"),)
    assert (found.groups, found.pages) == (("full",), (128,))
    assert found.layers == (tuple(layers(0, 1, 2, 10)),), "in the order of the model, not of names"


@pytest.mark.parametrize(("page", "tokens"), [(32, 256), (128, 256), (256, 256), (96, 288), (512, 512)])
def test_a_block_is_the_fewest_whole_pages_of_at_least_256_tokens(config: Any, page: int, tokens: int) -> None:
    found = layouts(config, caches((layers(0), FullAttentionSpec(block_size=page, **HEADS))))
    assert (found.own.block_tokens, found.own.groups[0].page) == (tokens, page)


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_bytes_are_plain_and_have_one_name_whatever_the_page(config: Any) -> None:
    found = [
        layouts(config, caches((layers(0, 1), FullAttentionSpec(block_size=page, **HEADS | {"dtype": torch.bfloat16}))))
        for page in (16, 32, 64)
    ]
    assert {f.own for f in found} == {Layout.attention(layers=2, heads=2, head_dim=64)}
    assert {(o.groups[0].packing, o.groups[0].page) for f in found for o in f.others} == {
        ("vec", 128),
        ("amx", 128),
        ("bfmmla", 128),
    }


def test_packings_are_told_by_what_the_kernel_writes(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops

    def writes(name: str) -> Callable[..., None]:
        def kernel(key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str) -> None:
            keys[0], values[0] = packing.pack(key[:, 0], name, False), packing.pack(value[:, 0], name, True)

        return kernel

    for name in ("vec", "amx", "bfmmla", "plain"):
        monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", writes(name))
        assert layouts(config, caches((layers(0), FULL))).own.groups[0].packing == name

    def other(key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str) -> None:
        keys[0, 0], values[0, 0] = key[:, 0].flip(0), value[:, 0]

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", other)
    found = layouts(config, caches((layers(0), FULL)))
    assert re.fullmatch(r"vllm-[\d.]+-\w+-auto", found.own.groups[0].packing)
    assert found.others == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_every_packing_of_this_machine_is_known(config: Any, dtype: torch.dtype, dim: int) -> None:
    config.model_config.dtype = dtype
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=dim, dtype=dtype)
    assert packing.known(layouts(config, caches((layers(0), spec))).own.groups[0].packing)


def test_mla_is_one_latent(config: Any) -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    config.parallel_config.tensor_parallel_size = 4
    found = layouts(config, caches((layers(0, 1), spec)))
    assert found.own == Layout((Group("mla", Kind.MLA, 2, 1, 576, "float32"),))


def test_groups_of_a_hybrid_model_are_told_apart(config: Any) -> None:
    window = SlidingWindowSpec(block_size=32, sliding_window=512, **HEADS)
    found = layouts(config, caches((layers(5), FULL), (layers(0, 2), window), (layers(1, 3), window)))
    assert [(g.name, g.kind, g.window, g.layers) for g in found.own.groups] == [
        ("full", Kind.FULL, 0, 1),
        ("window", Kind.WINDOW, 512, 2),
        ("window2", Kind.WINDOW, 512, 2),
    ]
    assert found.own.block_tokens == 256
    swapped = layouts(config, caches((layers(5), FULL), (layers(1, 3), window), (layers(0, 2), window)))
    assert swapped.own == found.own
    assert Model(swapped.own, *identity(config, swapped, "w")) != Model(found.own, *identity(config, found, "w"))


def test_a_chunk_is_kept_as_a_window_as_long(config: Any) -> None:
    chunk = ChunkedLocalAttentionSpec(block_size=128, attention_chunk_size=8192, **HEADS)
    found = layouts(config, caches((layers(3), FULL), (layers(0, 1, 2), chunk))).own.groups[1]
    assert (found.kind, found.window, found.layers) == (Kind.WINDOW, 8192, 3)


def test_heads_are_the_models_not_the_ranks(config: Any) -> None:
    for ranks, mine in ((2, 1), (4, 1)):
        config.parallel_config.tensor_parallel_size = ranks
        spec = FullAttentionSpec(block_size=128, **HEADS | {"num_kv_heads": mine})
        assert layouts(config, caches((layers(0), spec))).own.groups[0].heads == 2


def _parallel(name: str) -> Callable[[Any], None]:
    return lambda config: setattr(config.parallel_config, name, 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_parallel("pipeline_parallel_size"), "pipeline parallelism of 2"),
        (_parallel("decode_context_parallel_size"), "decode context parallelism of 2"),
        (_parallel("prefill_context_parallel_size"), "prefill context parallelism of 2"),
        (lambda c: setattr(c.cache_config, "kv_cache_dtype_skip_layers", ["0"]), "several dtypes"),
        (lambda c: setattr(c, "speculative_config", type("S", (), {"method": "eagle"})), "draft model"),
        (lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2), "2 KV heads on each of 2 ranks"),
    ],
)
def test_a_deployment_that_cannot_be_followed_is_refused(config: Any, change: Callable[[Any], None], why: str) -> None:
    change(config)
    with pytest.raises(LayoutError, match=why):
        layouts(config, caches((layers(0), FULL)))


REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "state": (MambaSpec(block_size=128, shapes=((4, 4),), dtypes=(torch.float32,)), "MambaSpec"),
    "gaps": (RSWASpec(block_size=128, rswa_window=64, **HEADS), "RSWASpec"),
    "packed": (FullAttentionSpec(block_size=128, state_content_bytes=100, **HEADS), "packed form"),
    "values": (FullAttentionSpec(block_size=128, head_size_v=32, **HEADS), "keys of 64 and values of 32"),
    "int8": (
        FullAttentionSpec(block_size=128, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, **HEADS),
        "INT8_PER_TOKEN_HEAD",
    ),
    "sparse": (
        MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, model_version="deepseek_v4"
        ),
        "index of its own",
    ),
    "later": (FullAttentionSpec(block_size=128, non_causal=True, **HEADS), "attends to what comes later"),
    "shapes": (
        UniformTypeKVCacheSpecs(
            block_size=128,
            kv_cache_specs={"a": FULL, "b": FullAttentionSpec(block_size=128, **HEADS | {"head_size": 32})},
        ),
        "several shapes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_group_that_cannot_be_kept_is_refused_by_name(config: Any, case: str) -> None:
    spec, why = REFUSED[case]
    with pytest.raises(LayoutError, match=rf"cache group 1 of vLLM .*model\.layers\.7\..*{why}"):
        layouts(config, caches((layers(0), FULL), (layers(7), spec)))


def test_mla_is_refused_where_vllm_cannot_go_on_from_a_prefix(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    assert layouts(config, caches((layers(0), spec))).groups == ("mla",)
    config.scheduler_config.enable_chunked_prefill = False
    with pytest.raises(LayoutError, match="with MLA on this processor"):
        layouts(config, caches((layers(0), spec)))


def test_a_model_without_kv_is_refused(config: Any) -> None:
    with pytest.raises(LayoutError, match="keeps no KV"):
        layouts(config, caches())


# -- pages ----------------------------------------------------------------------------------------------------


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def stored(group: Any, numbers: list[int]) -> torch.Tensor:
    """A block of those pages: ``[section, head, token, dim]``."""
    block = bytearray(group.geometry.footprint)
    HostMover().store(group, [Copy(memoryview(block), numbers)])
    whole = torch.frombuffer(block, dtype=torch.float32).view(len(group.sections), -1)
    shape = len(group.sections), group.group.heads, group.layout.block_tokens, group.group.head_dim
    return whole[:, : group.geometry.section // 4].reshape(shape)  # without the padding of sections


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["LBHNC", "LBNHC"])
def test_keys_and_values_of_a_gpu_are_neighbours(order: tuple[int, ...]) -> None:
    layout = Layout.attention(layers=1, heads=2, head_dim=4, dtype="float32", block_tokens=32)
    plain = numbered(5, 2, 16, 8)
    tensor = plain.permute(order).contiguous().permute(order)
    found = stored(attention_pages(layout, "full", [tensor], Slice(0, 0, 2), apart=False), [3, 1])
    whole = torch.cat((plain[3], plain[1]), 1)
    assert torch.equal(found[0], whole[..., :4])
    assert torch.equal(found[1], whole[..., 4:])


def test_keys_and_values_of_a_cpu_lie_apart() -> None:
    layout = Layout.attention(layers=2, heads=2, head_dim=4, dtype="float32", block_tokens=32)
    tensors = [numbered(5, 2, 16, 8), -numbered(5, 2, 16, 8)]
    found = stored(attention_pages(layout, "full", tensors, Slice(0, 0, 2), apart=True), [3, 1])
    for layer, tensor in enumerate(tensors):
        flat = tensor.reshape(5, 2, 2, 16, 4)  # page, head, K or V, token, dim
        for value in (0, 1):
            assert torch.equal(found[2 * layer + value], torch.cat((flat[3, :, value], flat[1, :, value]), 1))


@pytest.mark.parametrize("shape", [(5, 1, 16, 24), (5, 16, 24)])
def test_latents(shape: tuple[int, ...]) -> None:
    layout = Layout((Group("mla", Kind.MLA, 1, 1, 24, "float32"),), 32)
    tensor = numbered(*shape)
    found = stored(latents(layout, "mla", [tensor], Slice(0, 0, 1)), [4, 0])
    assert torch.equal(found[0, 0], torch.cat((tensor.view(5, 16, 24)[4], tensor.view(5, 16, 24)[0])))


@pytest.mark.usefixtures("on_gpu")
def test_ranks_hold_their_heads_and_replicas_know_who_writes(config: Any) -> None:
    config.parallel_config.tensor_parallel_size = 4
    spec = FullAttentionSpec(block_size=16, **HEADS | {"num_kv_heads": 1})
    found = layouts(config, caches((layers(0), spec)))
    shares = [pages(found, config, {layers(0)[0]: torch.zeros(8, 1, 16, 128)}, rank)["full"].share for rank in range(4)]
    assert shares == [Slice(0, 0, 1), Slice(0, 0, 1), Slice(2, 1, 2), Slice(2, 1, 2)]


@pytest.mark.usefixtures("on_gpu")
def test_layers_are_in_the_order_of_the_model_and_shared_ones_are_left_out(config: Any) -> None:
    spec = FullAttentionSpec(block_size=16, **HEADS)
    found = layouts(config, caches((layers(10, 9), spec)))
    tensors = dict(zip(layers(10, 9), torch.zeros(2, 8, 2, 16, 128), strict=True))
    tensors |= dict.fromkeys(layers(11), tensors[layers(10)[0]])  # reads the KV of layer 10
    first = pages(found, config, tensors, 0)["full"].sections[0]
    assert first.data_ptr() == tensors[layers(9)[0]].data_ptr()
    with pytest.raises(LayoutError, match=r"no KV tensor for model\.layers\.9"):
        pages(found, config, dict.fromkeys(layers(10), tensors[layers(10)[0]]), 0)


def test_a_worker_that_packs_otherwise_than_the_scheduler_supposes_is_refused(config: Any) -> None:
    found = layouts(config, caches((layers(0), FULL)))
    tensors = {layers(0)[0]: torch.zeros(8, 2, 128, 128)}
    layer = type("Layer", (), {"isa": "another"})()
    config.compilation_config.static_forward_context = {layers(0)[0]: layer}
    with pytest.raises(LayoutError, match="packs its pages for 'another'"):
        pages(found, config, tensors, 0)
    layer.isa = under_test._isa(config, 128, 64)
    assert pages(found, config, tensors, 0)["full"].packing == "vec"


# -- identity -------------------------------------------------------------------------------------------------


@pytest.fixture
def found(config: Any) -> Layouts:
    return layouts(config, caches((layers(0, 1, 2, 3), FULL)))


def test_one_name_for_the_weights_gives_the_namespace_that_transformers_has(config: Any, found: Layouts) -> None:
    ours = Model(found.others[0], *identity(config, found, "mine"))
    theirs = Model(found.others[0], "given:mine", settings(AutoConfig.from_pretrained(random_llama())))
    assert ours.namespace() == theirs.namespace()


def test_weights_without_a_name_are_those_of_the_files(config: Any, found: Layouts) -> None:
    assert identity(config, found).weights.startswith("files:")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "quantization", "fp8"),
        lambda c: setattr(c.model_config, "dtype", torch.bfloat16),
        lambda c: setattr(c.model_config.hf_config, "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        lambda c: c.model_config.hf_config.rope_parameters.update(rope_type="longrope"),
    ],
)
def test_what_changes_the_kv_changes_the_namespace(config: Any, found: Layouts, change: Callable[[Any], None]) -> None:
    before = identity(config, found, "mine")
    change(config)
    assert Model(found.own, *identity(config, found, "mine")).namespace() != Model(found.own, *before).namespace()


def test_a_longer_context_is_another_model_only_if_positions_depend_on_it(config: Any, found: Layouts) -> None:
    def namespace(longest: int) -> bytes:
        config.model_config.max_model_len = longest
        return Model(found.own, *identity(config, found, "mine")).namespace()

    assert namespace(4096) == namespace(8192)
    config.model_config.hf_config.rope_parameters["rope_type"] = "longrope"
    assert namespace(4096) != namespace(8192)


def test_weights_that_no_file_holds_need_a_name(config: Any, found: Layouts) -> None:
    config.load_config.load_format = "dummy"
    with pytest.raises(ConfigError, match="give kvtide a weights_id"):
        identity(config, found)
    config.load_config.load_format = "auto"
    config.model_config.model = "nobody/has-this"
    with pytest.raises(ConfigError, match="give kvtide a weights_id"):
        identity(config, found)


@pytest.mark.usefixtures("on_gpu")
def test_kv_of_8_bits_is_told_by_its_form(config: Any) -> None:
    spec = FullAttentionSpec(block_size=16, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, **HEADS | {"dtype": torch.uint8})
    found = layouts(config, caches((layers(0), spec)))
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        identity(config, found, "mine")
    scales = set()
    for form in ("fp8_e4m3", "fp8_e5m2"):
        config.cache_config.cache_dtype = form
        scales.add(identity(config, found, "mine").scales)
    assert len(scales) == 2
