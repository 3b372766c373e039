"""Extracts the prompts from a call of ``generate``, or the reason why their KV cannot be reused.

KV can be reused if it follows from the tokens alone and the cache has the usual form. So every argument of a call is in
one of three classes: those that do not affect the KV, those that do not affect it at their usual value, and the rest.
The rest is refused, whatever it is: pictures, embeddings, positions, or an argument that did not exist when this was
written.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, GenerationMixin

__all__ = ["Call", "PromptRefused", "Prompts", "arguments", "read"]

Call = dict[str, Any]
"""The arguments of one call of ``generate``, by name."""

_NAMES = [*inspect.signature(GenerationMixin.generate).parameters][1:-1]
"""Its positional arguments, without the model (first) and the keywords (last)."""

_HARMLESS = {
    "attention_mask",
    "generation_config",
    "input_ids",
    "inputs",
    "logits_processor",
    "negative_prompt_attention_mask",
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "tokenizer",
}
"""Arguments that do not affect the KV of a prompt."""

_USUAL = {
    "assistant_early_exit": None,
    "cache_implementation": "dynamic",
    "constraints": None,
    "dola_layers": None,
    "force_words_ids": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "token_healing": False,
    "use_cache": True,
    "use_mtp": False,
}
"""Generation settings that use the cache in special ways, unless they have this value or None."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A batch of prompts, padded on the left to one length."""

    rows: list[npt.NDArray[np.uint32]]
    """The tokens of each prompt, without padding."""
    pads: list[int]
    """The padding before each prompt."""

    @property
    def length(self) -> int:
        """Tokens of a row, including its padding."""
        return self.pads[0] + len(self.rows[0])


class PromptRefused(NamedTuple):
    """Nothing is reused for this reason."""

    reason: str


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The arguments of a call, by name."""
    return dict(zip(_NAMES, args, strict=False)) | dict(kwargs)


def read(call: Call, defaults: GenerationConfig) -> Prompts | PromptRefused:
    """The prompts of a call, for a model with those default settings."""
    given = call.get("generation_config")
    settings = _set(defaults.to_dict()) | _set(given.to_dict() if given else {}) | call
    for name, value in call.items():
        if value is not None and name not in _HARMLESS and not hasattr(defaults, name):
            return PromptRefused(f"{name} is given")
    for name, usual in _USUAL.items():
        if settings.get(name) not in (None, usual):
            return PromptRefused(f"{name} is {settings[name]!r}")
    ids = call.get("input_ids", call.get("inputs"))
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        return PromptRefused("the prompt is not a batch of token ids")
    return _rows(ids, call.get("attention_mask"), settings.get("pad_token_id"))


def _set(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _rows(ids: torch.Tensor, mask: torch.Tensor | None, pad: Any) -> Prompts | PromptRefused:
    tokens = ids.cpu().numpy().astype(np.uint32)
    if mask is None:
        if np.isin(tokens, [] if pad is None else pad).any():
            return PromptRefused("there is padding in the prompt, and no attention_mask that says where")
        pads = np.zeros(len(tokens), np.int64)
    else:
        kept = mask.cpu().numpy() != 0
        pads = np.argmax(kept, axis=-1)
        if kept.shape != tokens.shape or not (kept == (np.arange(tokens.shape[1]) >= pads[:, None])).all():
            return PromptRefused("the attention_mask hides tokens inside or after a prompt")
    return Prompts([row[start:] for row, start in zip(tokens, pads, strict=True)], pads.tolist())
