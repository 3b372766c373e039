"""Models that vLLM can serve, as plain checkpoints: a real one, and random ones of any shape."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvtide.engines.transformers.loading import SMALL, load

__all__ = ["checkpoint", "random_llama", "random_model"]


def checkpoint() -> Path:
    """SmolLM2-135M with its tokenizer, in bfloat16. Made once and kept in the user's cache."""

    def write(folder: Path) -> None:
        found = load(SMALL, "bfloat16")
        model: Any = found.model
        vars(model.config).pop("quantization_config", None)  # the file was quantized; what is saved is not
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(folder)
        found.tokenizer.save_pretrained(folder)

    return _once("smollm2-135m", write)


def random_llama(layers: int = 4, heads: int = 8, kv_heads: int = 2, dtype: str = "bfloat16") -> Path:
    """A Llama with random weights, always the same ones, and SmolLM2's tokenizer: for shapes that the real one does not
    have."""

    def write(folder: Path) -> None:
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=64 * heads,
            intermediate_size=128 * heads,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
        _save(folder, LlamaForCausalLM, config, layers * 10_000 + heads * 100 + kv_heads, dtype)

    return _once(f"llama-{layers}-{heads}-{kv_heads}-{dtype}", write)


_SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,  # so that what a layer sees matters to the answer
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "window-and-full": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 64, "sliding_window": 100, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "window": (MistralForCausalLM, MistralConfig, {"head_dim": 64, "sliding_window": 385}),
    "chunk-and-full": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "head_dim": 64,
            "attention_chunk_size": 512,
            "intermediate_size_mlp": 512,
            "moe_layers": [],
            "interleave_moe_layer_step": 100,
        },
    ),
    "state-and-full": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 512,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
    ),
    "mla": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            "head_dim": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def random_model(kind: str) -> Path:
    """A model with random weights whose layers keep what ``kind`` says, and SmolLM2's tokenizer."""
    cls, config, more = _KINDS[kind]
    return _once(kind, lambda folder: _save(folder, cls, config(**_SIZES | more), 1, "float32"))


def _save(folder: Path, cls: Any, config: Any, seed: int, dtype: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for file in checkpoint().glob("tokenizer*"):
        shutil.copy(file, folder)


def _once(name: str, write: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache, whole or not there: many processes may ask at once."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvtide" / "models"
    place = home / name
    if not place.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=home))
        try:
            write(made)
            made.rename(place)
        except OSError:
            if not place.is_dir():  # another process was first
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return place
