"""Models to test with: tiny ones of several families with random weights, and a real one that answers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from kvtide.engines.transformers.loading import SMALL, load

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # so that the next token is never a near tie
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

WINDOW = 48

FAMILIES: dict[str, Any] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "Llama4Text": {
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 4,
    },
}
"""Full attention, with and without biases; a window in every layer, or in every other; chunks in three of four."""


def tiny(family: str = "Llama", dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A small model of that family. Equal seeds make equal weights."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | settings))
    model: PreTrainedModel = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(dtype).eval()
    return model


@functools.cache
def smollm2() -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct in fp32, and its tokenizer."""
    small = load(SMALL, "float32")
    return small.model, small.tokenizer


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    """Token ids that are the same in every run; a longer one begins with a shorter one of the same seed."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(2, 512, (1, 4096), generator=numbers)[:, :length]


def padded(*prompts: torch.Tensor) -> dict[str, Any]:
    """A batch of prompts, padded on the left."""
    length = max(p.shape[1] for p in prompts)
    ids, mask = (torch.zeros((len(prompts), length), dtype=torch.long) for _ in range(2))
    for row, tokens in enumerate(prompts):
        ids[row, length - tokens.shape[1] :] = tokens
        mask[row, length - tokens.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def own(model: Any, **kwargs: Any) -> Any:
    """What the model answers without us, attached or not."""
    return type(model).generate(model, **kwargs)


def reference(model: PreTrainedModel, batch: dict[str, torch.Tensor], border: int, **kwargs: Any) -> Any:
    """What a model answers that has the first ``border`` tokens cached, without us."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = DynamicCache()
    if border:
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        with torch.no_grad():
            model(
                ids[:, :border],
                attention_mask=mask[:, :border],
                position_ids=positions[:, :border],
                past_key_values=cache,
                use_cache=True,
            )
    return own(model, **batch, past_key_values=cache, **kwargs)
