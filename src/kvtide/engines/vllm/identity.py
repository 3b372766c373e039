"""The identity of a vLLM deployment's KV: everything besides the layout that determines the bytes of its blocks.

The weights are named by ``weights_id`` if given, else by the hub's commit, else by the digest of the shards. The
configuration is that of the model after overrides, in the same form as for transformers, so that equal weight names
give one namespace in both. What only vLLM does to a model is added where it applies: quantization while loading, a KV
dtype that is not the model's, a rotary embedding that depends on the longest context, layers split over cache groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from kvtide.canonical import Value
from kvtide.engines.identity import settings
from kvtide.engines.vllm.layout import Layouts
from kvtide.errors import ConfigError
from kvtide.index.weights_identity import WeightsId, identify

__all__ = ["ModelIdentity", "identity"]

_BY_LENGTH = ("longrope", "su", "dynamic")
"""Rotary embeddings that vLLM scales by the maximum context length."""
_FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "mistral", "npcache", "pt", "gguf", "instanttensor")
"""Load formats that read all weights from a checkpoint."""


class ModelIdentity(NamedTuple):
    """Use as ``Model(layout, *identity)``."""

    weights: WeightsId
    config: dict[str, Value]
    scales: bytes


def identity(vllm_config: Any, found: Layouts, weights_id: str | None = None, digests: str = "") -> ModelIdentity:
    """The identity of the served model. Raises ConfigError if its weights cannot be identified."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = settings(model.hf_config)
    own: dict[str, Value] = {}
    if model.quantization is not None:
        own["quantization"] = str(model.quantization)
    dtype = str(model.dtype).removeprefix("torch.")
    if any(group.dtype != dtype for group in found.own.groups):
        own["dtype"] = dtype
    if getattr(model, "override_attention_dtype", None) is not None:
        own["attention_dtype"] = str(model.override_attention_dtype)
    if any(kind in _rotary(model.hf_text_config) for kind in _BY_LENGTH):
        own["max_model_len"] = int(model.max_model_len)
    if len(found.layers) > 1:
        own["layers"] = [list(names) for names in found.layers]
    if own:
        config["vllm"] = own
    return ModelIdentity(_weights(vllm_config, weights_id, digests), config, _scales(cache.cache_dtype, found))


def _weights(vllm_config: Any, weights_id: str | None, digests: str) -> WeightsId:
    model, load = vllm_config.model_config, vllm_config.load_config
    if weights_id is not None:
        return identify(weights_id=weights_id)
    if str(load.load_format) not in _FROM_FILES:
        raise ConfigError(
            f"weights that are loaded as {load.load_format!r} have no identity of their own: give kvtide a weights_id"
        )
    if Path(model.model).exists():
        return identify(model.model, cache=digests)
    try:
        folder = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"the weights of {model.model!r} are neither a folder nor in the hub's cache: give kvtide a weights_id"
        ) from error
    return identify(folder, cache=digests)


def _rotary(config: Any) -> str:
    """The configuration's rotary embedding settings, as text."""
    return repr([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])


def _scales(cache_dtype: str, found: Layouts) -> bytes:
    """Identifies the scaling of 8-bit KV. The factors belong to the checkpoint, whose identity is known; the format is
    not part of that identity."""
    if all(group.dtype not in ("uint8", "int8", "float8_e4m3fn", "float8_e5m2") for group in found.own.groups):
        return b""
    if cache_dtype == "auto":
        raise ConfigError(
            "the checkpoint alone says how its KV is quantized: say it with --kv-cache-dtype, fp8_e4m3 say"
        )
    return f"vllm {cache_dtype}, factors of the checkpoint".encode()
