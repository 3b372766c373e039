"""What a model's ``config.json`` says about its KV, its parameters and the work of a prompt; and a table of models.

Parameters are counted from the sizes of the matrices: attention (with keys and values in fewer heads, or compressed as
in MLA), a gated MLP of three matrices or its experts, the router, embedding and output layer. Biases and norms are left
out; they are less than 0.1 %. A prompt's token is multiplied with all of these except the embedding and the output
layer: the embedding is looked up, and the output layer is needed for the last token only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvtide.block import BLOCK_TOKENS, Group, Kind, Layout
from kvtide.doctor.model import config_of, folder_of, layout_from, text_of, without_shape
from kvtide.errors import LayoutError

__all__ = ["MODELS", "ModelShape", "shape_from", "shape_of"]

_HUB = "https://huggingface.co/{}/blob/main/config.json"
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256}
_QWEN = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        {
            **_LLAMA,
            "hidden_size": 16_384,
            "intermediate_size": 53_248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
    ),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        {
            **_QWEN,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
    ),
    "qwen3-32b": (
        "Qwen/Qwen3-32B",
        {
            **_QWEN,
            "hidden_size": 5120,
            "intermediate_size": 25_600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        {
            **_QWEN,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-next-80b-a3b": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {
            **_QWEN,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "mistral-7b-v0.1": (
        "mistralai/Mistral-7B-v0.1",
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32_000,
        },
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-it",
        {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "vocab_size": 262_208,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        {
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129_280,
            "quantization_config": {"quant_method": "fp8"},
        },
    ),
    "gpt-oss-120b": (
        "openai/gpt-oss-120b",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "vocab_size": 201_088,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
}
"""By our name: the name on the Hugging Face hub, and of its public config.json what matters here."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide how long its prompts take, and how many bytes their KV has."""

    name: str
    source: str
    """Where its config.json is."""
    layout: Layout
    parameters: float
    """All of them, which have to be in GPU memory."""
    multiplied: float
    """Those that a token of a prompt is multiplied with: active ones, without embedding and output layer."""
    weight_bytes: float
    """Bytes of a parameter."""
    pair_flops: float
    """Floating-point operations of attention for a token and a token before it, in one layer."""
    experts: bool = False

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        return self.parameters * self.weight_bytes

    @property
    def step_weights(self) -> float:
        """Bytes of the weights that are read to generate a token of one request."""
        return min(self.weights, 1.05 * self.multiplied * self.weight_bytes) if self.experts else self.weights

    @property
    def token_flops(self) -> float:
        """Operations for a token whatever its context. Attention in a window counts here, as if the window were
        full."""
        windows = sum(g.layers * g.window for g in self.layout.groups if g.kind is Kind.WINDOW)
        return 2 * self.multiplied + self.pair_flops * windows

    @property
    def context_flops(self) -> float:
        """Operations for a token and a token of the context before it."""
        kinds = (Kind.FULL, Kind.MLA)
        return self.pair_flops * sum(g.layers for g in self.layout.groups if g.kind in kinds)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV by which a token makes a context longer: without windows and states, which do not grow."""
        growing = (g for g in self.layout.groups if g.kind in (Kind.FULL, Kind.MLA))
        return sum(g.layers * g.parts * g.heads * g.head_bytes(1) for g in growing)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of every group."""
        return sum(geometry.nbytes for geometry in self.layout.geometry.values())


def shape_of(model: str, kv_dtype: str = "auto") -> ModelShape:
    """The shape of a model of the table, of a config.json or its folder, or of a name in the hub's cache.

    Raises LayoutError with the nearest name of the table.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return shape_from(config_of(path), model, str(path), kv_dtype)
    key = model.lower().rpartition("/")[2]
    if not path.is_dir():
        for name, (hub, config) in MODELS.items():
            if key in (name, hub.lower().rpartition("/")[2]):
                return shape_from(config, name, _HUB.format(hub), kv_dtype)
    try:
        file = folder_of(model) / "config.json"
    except LayoutError as error:
        near = get_close_matches(key, MODELS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the table has {', '.join(MODELS)}"
        raise LayoutError(f"{error}, nor in the table of models; give its config.json, or its folder; {hint}") from None
    return shape_from(config_of(file), path.name if path.is_dir() else model, str(file), kv_dtype)


def shape_from(whole: Mapping[str, Any], name: str, where: str, kv_dtype: str = "auto") -> ModelShape:
    """The shape of a model with this configuration, read from ``where``. Raises LayoutError."""
    whole = dict(whole) if any(whole.get(key) for key in ("dtype", "torch_dtype")) else {"dtype": "bfloat16", **whole}
    try:
        config = text_of(whole)
        if "linear_num_value_heads" in config:
            layout = _with_state(config, where, kv_dtype)
        else:
            layout = layout_from(whole, where, kv_dtype=kv_dtype)
        parameters, multiplied = _parameters(config)
        return ModelShape(
            name=name,
            source=where,
            layout=layout,
            parameters=parameters,
            multiplied=multiplied,
            weight_bytes=_weight_bytes(config.get("quantization_config") or {}),
            pair_flops=2.0 * config["num_attention_heads"] * sum(_head_dims(config)),
            experts=_experts(config) > 0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as e:
        if isinstance(e, LayoutError):
            raise
        raise without_shape(where, e) from e


def _weight_bytes(quantized: Mapping[str, Any]) -> float:
    """Bytes of a parameter, from a configuration's ``quantization_config``. Where only some layers are quantized, all
    are taken for it. MXFP4 has a scale of 8 bits for 32 codes of 4 bits, NVFP4 for 16."""
    match quantized.get("quant_method", ""):
        case "":
            return 2.0
        case "mxfp4":
            return 4.25 / 8
        case "gptq" | "awq":
            return int(quantized.get("bits") or 4) / 8
        case "bitsandbytes":
            return 0.5 if quantized.get("load_in_4bit") or quantized.get("_load_in_4bit") else 1.0
        case "compressed-tensors":
            groups = (quantized.get("config_groups") or {}).values()
            return max((int((group.get("weights") or {}).get("num_bits") or 8) for group in groups), default=8) / 8
        case "modelopt":
            return 4.5 / 8 if "FP4" in str(quantized.get("quant_algo", "")).upper() else 1.0
        case _:
            return 1.0


def _head_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    """The widths of a head's key and of its value, as prefill multiplies them."""
    if config.get("kv_lora_rank"):
        return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return dim, dim


def _with_state(config: Mapping[str, Any], where: str, kv_dtype: str) -> Layout:
    """The layout of a model of which some layers keep a state of linear attention (Qwen3-Next).

    The state has the dtype of the model whatever that of the KV: a matrix for each value head, and the last inputs of
    the convolution.
    """
    layers = config["num_hidden_layers"]
    every = config.get("full_attention_interval") or 4
    full = sum(kind == "full_attention" for kind in config.get("layer_types") or ()) or layers // every
    of_attention = {**config, "num_hidden_layers": full, "layer_types": ["full_attention"] * full}
    layout = layout_from(of_attention, where, kv_dtype=kv_dtype)
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    inputs = (2 * keys * key + heads * value) * (config["linear_conv_kernel_dim"] - 1)
    state = Group("state", Kind.STATE, layers - full, heads, key * value + -(-inputs // heads), "bfloat16")
    return Layout((*layout.groups, state), BLOCK_TOKENS)


def _experts(config: Mapping[str, Any]) -> int:
    found = (config.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts"))
    return int(next((count for count in found if count), 0))


def _parameters(config: Mapping[str, Any]) -> tuple[float, float]:
    """All parameters, and those that a token of a prompt is multiplied with."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attention = _attention(config)
    experts, used = _experts(config), int(config.get("num_experts_per_tok") or 0)
    width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
    shared = int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width)
    dense = layers
    if experts:
        dense = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    if (step := config.get("interleave_moe_layer_step")) is not None:  # Llama 4: every so many layers have experts
        dense, shared = layers - layers // int(step), width
    of_dense = dense * 3 * hidden * int(config.get("intermediate_size_mlp") or config.get("intermediate_size") or 0)
    always = attention + of_dense + (layers - dense) * (3 * hidden * shared + hidden * experts)
    expert = (layers - dense) * 3 * hidden * width
    embedding = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return float(always + experts * expert + embedding), float(always + used * expert)


def _attention(config: Mapping[str, Any]) -> int:
    """Parameters of attention, in all layers."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    key, value = _head_dims(config)
    if rank := config.get("kv_lora_rank"):
        queries = config.get("q_lora_rank")
        own = queries * (hidden + heads * key) if queries else hidden * heads * key
        shared = hidden * (rank + config["qk_rope_head_dim"]) + rank * heads * (config["qk_nope_head_dim"] + value)
        return int(layers * (own + shared + heads * value * hidden))
    kv_heads = config.get("num_key_value_heads") or heads
    plain = 2 * hidden * (heads + kv_heads) * key
    if "linear_num_value_heads" not in config:
        return int(layers * plain)
    every = config.get("full_attention_interval") or 4
    full = sum(kind == "full_attention" for kind in config.get("layer_types") or ()) or layers // every
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    linear = hidden * (2 * keys + 3 * values + 2 * config["linear_num_value_heads"])
    return int(full * (plain + hidden * heads * key) + (layers - full) * linear)  # queries have a gate of their size
