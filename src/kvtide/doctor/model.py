"""The KV layout of a model, from its ``config.json``, without loading it.

This suffices for sizes and for models that will certainly be refused. What only a running engine knows, such as its
packing, is checked by the connector itself, which reports in vLLM's log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtide.block import BLOCK_TOKENS, Group, Kind, Layout
from kvtide.doctor.finding import Finding, error, ok, warning
from kvtide.errors import KvtideError, LayoutError
from kvtide.formatting import size
from kvtide.index.weights_identity import SHARDS, identify

__all__ = ["check", "config_of", "folder_of", "layout_from", "layout_of", "nbytes", "text_of", "without_shape"]

_ALIKE = {"half": "float16", "float": "float32"}
_BYTES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
_KINDS = {"full_attention": Kind.FULL, "sliding_attention": Kind.WINDOW, "chunked_attention": Kind.WINDOW}
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Models whose config.json may leave out which layers have a window: every so many layers, the last one has none."""
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "tie_word_embeddings": True,
    }
}
"""What a published config.json may leave out, because it is the default of transformers."""
_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "layers_block_type", "hybrid_override_pattern")
"""Keys in the configurations of models with state layers, where they do not list their layers."""


def folder_of(model: str) -> Path:
    """The folder of a model: the given folder, or the one in the hub's cache with that name. Raises LayoutError."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser() / f"models--{model.replace('/', '--')}"
    try:
        return cache / "snapshots" / (cache / "refs" / "main").read_text().strip()
    except OSError:
        raise LayoutError(f"{model!r} is neither a folder nor in the hub's cache ({cache})") from None


def layout_of(folder: Path, dtype: str = "auto", kv_dtype: str = "auto") -> Layout:
    """The block layout of the model in ``folder``, except its packing. Raises LayoutError if the model is refused."""
    return layout_from(config_of(folder / "config.json"), f"{folder}/config.json", dtype, kv_dtype)


def config_of(file: Path) -> dict[str, Any]:
    """A model's ``config.json``. Raises LayoutError."""
    try:
        whole = json.loads(file.read_text())
    except OSError as e:
        raise LayoutError(
            f"{file} cannot be read ({e.strerror}): give a folder that has the model's config.json"
        ) from e
    except UnicodeDecodeError as e:
        raise LayoutError(f"{file} is not text, and a config.json is") from e
    except ValueError as e:
        raise LayoutError(f"{file} is not JSON ({e})") from e
    if not isinstance(whole, dict):
        raise LayoutError(f"{file} does not contain the model's shape: it is no JSON object")
    return whole


def layout_from(whole: Mapping[str, Any], where: str, dtype: str = "auto", kv_dtype: str = "auto") -> Layout:
    """The same for a configuration that was read already, from ``where``."""
    try:
        return _layout(whole, dtype, kv_dtype)
    except LayoutError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise without_shape(where, e) from e


def without_shape(where: str, error: Exception) -> LayoutError:
    """The error for a configuration that lacks something, or has something of another kind."""
    if isinstance(error, KeyError):
        return LayoutError(f"{where} does not contain the model's shape: it has no {error.args[0]}")
    return LayoutError(f"{where} does not contain the model's shape: a value in it is not of the kind it should be")


def _layout(whole: Mapping[str, Any], dtype: str, kv_dtype: str) -> Layout:
    config = text_of(whole)
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    if whole.get("is_encoder_decoder"):
        raise LayoutError("an encoder with a decoder: a prefix has no KV of its own")
    if "index_topk" in config:
        raise LayoutError("sparse attention with an index of its own is not supported yet")
    kinds = _kinds(config, layers)
    number = _dtype(whole, config, dtype, kv_dtype)
    if config.get("kv_lora_rank"):
        width = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
        return Layout((Group("mla", Kind.MLA, layers, 1, width, number),), BLOCK_TOKENS)
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    heads = int(config.get("num_key_value_heads") or heads)
    groups = []
    for kind in Kind:
        if count := kinds.count(kind):
            chunks = "chunked_attention" in (config.get("layer_types") or ())
            window = int(config["attention_chunk_size" if chunks else "sliding_window"]) if kind is Kind.WINDOW else 0
            groups.append(Group(kind.value, kind, count, heads, dim, number, window=window))
    return Layout(tuple(groups), BLOCK_TOKENS)


def text_of(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the part of a model that reads text, with what transformers takes where it says nothing."""
    config = {name: value for name, value in whole.items() if name != "text_config"}
    config |= whole.get("text_config") or {}
    return {**_LEFT_OUT.get(str(config.get("model_type")), {}), **config}


def _kinds(config: Mapping[str, Any], layers: int) -> list[Kind]:
    """The kind of KV that each layer keeps."""
    if state := next((name for name in _STATES if config.get(name)), ""):
        raise LayoutError(f"layers that keep a state ({state} in config.json) are not supported yet")
    named = config.get("layer_types")
    if named is None:
        windows = config.get("sliding_window") and config.get("use_sliding_window", True)
        named = ["sliding_attention" if windows else "full_attention"] * layers
        every = config.get("sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
        if windows and every:
            named = ["sliding_attention" if i % every else "full_attention" for i in range(1, layers + 1)]
    if other := next((name for name in named if name not in _KINDS), ""):
        raise LayoutError(f"layers of {other} are not supported; {' and '.join(_KINDS)} are")
    return [_KINDS[name] for name in named]


def _dtype(whole: Mapping[str, Any], config: Mapping[str, Any], dtype: str, kv_dtype: str) -> str:
    """The dtype of the KV, as vLLM chooses it."""
    if kv_dtype != "auto":
        if kv_dtype not in _BYTES:
            raise LayoutError(f"--kv-cache-dtype {kv_dtype} is not supported: choose auto, {', '.join(_BYTES)}")
        return _BYTES[kv_dtype]
    if dtype != "auto":
        return _ALIKE.get(dtype, dtype)
    names = (part.get(name) for part in (config, whole) for name in ("dtype", "torch_dtype"))
    saved = next((str(name).removeprefix("torch.") for name in names if name), "float32")
    return "bfloat16" if saved == "float32" else saved  # vLLM computes such a model in 16 bits


def nbytes(layout: Layout, tokens: int) -> int:
    """Bytes of a prefix of that many tokens, which is also what a load of it reads."""
    blocks = -(-tokens // layout.block_tokens)
    needed = ((len(g.needs(blocks, layout.block_tokens)), layout.geometry[g.name].footprint) for g in layout.groups)
    return sum(count * size for count, size in needed)


def check(folder: Path, layout: Layout, ranks: int, weights_id: str) -> Iterator[Finding]:
    """Findings about a model that can be served."""
    text = "; ".join(
        f"{g.layers} layers of kind {g.kind.value}, {g.heads} x {g.head_dim} of {g.dtype}" for g in layout.groups
    )
    each = sum(layout.geometry[g.name].footprint for g in layout.groups)
    sizes = f"{size(each / layout.block_tokens)} a token, blocks of {size(each)}"
    yield ok("layout", f"{text}: {sizes}; named by tokens, so vLLM's hashes and PYTHONHASHSEED do not matter")
    try:
        for group in layout.groups:
            group.slices(ranks)
    except LayoutError as e:
        yield error("tensor parallelism", str(e), "choose a size that divides the KV heads, or is a multiple of them")
    yield _weights(folder, weights_id)


def _weights(folder: Path, weights_id: str) -> Finding:
    if not weights_id and not (folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")):
        shards = [file for file in folder.rglob("*") if file.suffix.lower() in SHARDS]
        if shards:
            total = sum(file.stat().st_size for file in shards)
            return ok(
                "weights",
                f"named by a digest of their files, {size(total)} that are read once at the first start",
                "engine.weights_id, a name of your own, saves that",
            )
    try:
        return ok("weights", f"their name is {identify(folder, weights_id or None, None)}")
    except KvtideError as e:
        return warning("weights", str(e), "set engine.weights_id, the same for all engines with these weights")
