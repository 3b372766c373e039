"""Models that vLLM can serve, as plain checkpoints: a real one, and random ones of any shape."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engines.loading import SMALL, load

__all__ = ["checkpoint", "random_llama"]


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
        with torch.random.fork_rng():
            torch.manual_seed(layers * 10_000 + heads * 100 + kv_heads)
            model: Any = LlamaForCausalLM(config)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        for file in checkpoint().glob("tokenizer*"):
            shutil.copy(file, folder)

    return _once(f"llama-{layers}-{heads}-{kv_heads}-{dtype}", write)


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
