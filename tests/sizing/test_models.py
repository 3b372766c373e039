"""Shapes of models: parameters as published, bytes as the layout has them, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.block import Kind
from kvtide.doctor.model import nbytes
from kvtide.errors import LayoutError
from kvtide.sizing.models import MODELS, shape_from, shape_of

PUBLISHED = {
    "llama-3.1-8b": (8.03, None),  # the model's page on the hub
    "llama-3.1-70b": (70.6, None),  # the same
    "llama-3.1-405b": (405, None),  # "The Llama 3 Herd of Models", arXiv 2407.21783
    "qwen3-8b": (8.2, 6.95),  # model card: 8.2B, of them 6.95B not embedding
    "qwen3-32b": (32.8, 31.2),  # model card: 32.8B and 31.2B
    "qwen3-30b-a3b": (30.5, 3.3 - 0.62),  # model card: 30.5B, 3.3B activated, of them 2 x 151,936 x 2,048 embedding
    "qwen3-next-80b-a3b": (80, None),  # model card: 80B
    "mistral-7b-v0.1": (7.24, None),  # the model's page on the hub
    "gemma-3-27b": (27, None),  # "Gemma 3 Technical Report", arXiv 2503.19786: 25.6B and 1.4B of embedding
    "deepseek-v3": (671, 37 - 1.85),  # arXiv 2412.19437: 671B, 37B activated; 2 x 129,280 x 7,168 embedding
    "gpt-oss-120b": (116.8, 5.13 - 0.58),  # model card: 116.83B, 5.13B active, of them 201,088 x 2,880 output layer
}
"""Billions of parameters, and of those that a token of a prompt is multiplied with."""


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_were_published(name: str) -> None:
    every, multiplied = PUBLISHED[name]
    shape = shape_of(name)
    assert shape.parameters / 1e9 == pytest.approx(every, rel=0.01)
    if multiplied is not None:
        assert shape.multiplied / 1e9 == pytest.approx(multiplied, rel=0.025)


def test_a_model_is_found_by_its_name_on_the_hub() -> None:
    assert shape_of("Qwen/Qwen3-8B") == shape_of("qwen3-8b")


def test_windows_have_as_many_blocks_as_the_layout_needs() -> None:
    """Mistral's window of 4,096 tokens: 16 blocks of 32 MiB, however long the prompt is. Gemma: 10 layers of 62 have
    none."""
    mistral = shape_of("mistral-7b-v0.1")
    assert mistral.token_bytes == 0
    assert nbytes(mistral.layout, 131_072) == nbytes(mistral.layout, 4096) == 16 * (32 << 20)
    gemma = shape_of("gemma-3-27b")
    assert {group.kind: group.layers for group in gemma.layout.groups} == {Kind.FULL: 10, Kind.WINDOW: 52}
    full, window = 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2
    assert nbytes(gemma.layout, 131_072) == 131_072 * full + 1024 * window


def test_a_state_counts_once_whatever_the_length() -> None:
    """Qwen3-Next: 12 layers with 2 KV heads of 256; 36 with a matrix of 128 x 128 for each of 32 heads, and the last 3
    inputs of a convolution over 8,192 channels."""
    shape = shape_of("qwen3-next-80b-a3b")
    assert shape.token_bytes == 12 * 2 * 2 * 256 * 2
    state = 36 * (32 * 128 * 128 + 3 * 8192) * 2
    assert nbytes(shape.layout, 131_072) == 131_072 * shape.token_bytes + state


def test_fp8_halves_keys_and_values_but_no_state() -> None:
    for name in MODELS:
        assert 2 * shape_of(name, "fp8").token_bytes == shape_of(name).token_bytes
    states = [shape_of("qwen3-next-80b-a3b", dtype).layout.group("state").dtype for dtype in ("auto", "fp8")]
    assert states == ["bfloat16", "bfloat16"]


def test_a_config_file_and_its_folder_give_the_same(tmp_path: Path) -> None:
    hub, config = MODELS["qwen3-8b"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    by_file, by_folder = shape_of(str(tmp_path / "config.json")), shape_of(str(tmp_path))
    assert by_file.layout == by_folder.layout == shape_of(hub).layout
    assert by_file.multiplied == shape_of(hub).multiplied


def test_an_unknown_model_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LayoutError, match=r"did you mean llama-3\.1-8b\?"):
        shape_of("llama-3.1-8bb")
    with pytest.raises(LayoutError, match="the table has llama-3"):
        shape_of("somebody/something-else")


def test_a_published_config_may_leave_out_the_defaults_of_transformers() -> None:
    """google/gemma-3-4b-it: its text has 34 layers, and 8 heads, 4 KV heads and 256 dimensions that it does not say."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    shape = shape_from({"text_config": {**text, "sliding_window": 1024}, "torch_dtype": "bfloat16"}, "4b", "config")
    assert {g.kind: (g.layers, g.heads, g.head_dim) for g in shape.layout.groups} == {
        Kind.FULL: (5, 4, 256),
        Kind.WINDOW: (29, 4, 256),
    }
    assert shape.parameters / 1e9 == pytest.approx(3.9, rel=0.02)  # arXiv 2503.19786: 675M and 3,209M


@pytest.mark.parametrize(("experts", "step", "billions"), [(16, 1, 109), (128, 2, 400)])
def test_llama_4_has_experts_in_some_layers_and_one_that_all_tokens_use(experts: int, step: int, billions: int) -> None:
    """Scout and Maverick: 17 billion parameters are active in both, says Meta; 2.07 of them are embedding and output
    layer. The parameters of their vision are not in these sums."""
    text = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "interleave_moe_layer_step": step,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 202_048,
    }
    shape = shape_from({"text_config": text}, "llama-4", "config")
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.015)
    assert shape.multiplied / 1e9 == pytest.approx(17 - 2.07, rel=0.06)


def test_a_model_with_states_may_have_its_text_in_a_part() -> None:
    config = MODELS["qwen3-next-80b-a3b"][1]
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    nested = shape_from({"text_config": {**config, "layer_types": kinds}}, "nested", "config")
    assert nested.layout == shape_of("qwen3-next-80b-a3b").layout


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ],
)
def test_quantized_weights_have_the_bits_that_the_config_says(quantized: object, bits: float) -> None:
    shape = shape_from({**MODELS["qwen3-8b"][1], "quantization_config": quantized}, "q", "config")
    assert shape.weight_bytes == bits / 8


NO_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 64, "vocab_size": 9}


@pytest.mark.parametrize(
    "config", [{}, {"num_hidden_layers": 2}, {"num_hidden_layers": "two", "num_attention_heads": 2}, NO_HEADS, [1]]
)
def test_a_config_without_a_shape_is_refused(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError, match="does not contain the model's shape") as refused:
        shape_of(str(tmp_path))
    assert "Error" not in str(refused.value)
