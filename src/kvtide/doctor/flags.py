"""Reads vLLM's ``--kv-transfer-config``, with kvtide's settings in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtide import config as configuration
from kvtide.config import Config
from kvtide.errors import ConfigError

__all__ = ["FLAG", "settings"]

_WANTED = {"kv_connector": "KvtideConnector", "kv_connector_module_path": "kvtide.engines.vllm", "kv_role": "kv_both"}
FLAG = f"--kv-transfer-config '{json.dumps(_WANTED)}'"


def settings(given: str) -> Config:
    """The settings of an engine with this option: JSON, or ``@`` and a JSON file; empty: those in force here.

    Raises ConfigError with the reason if it is invalid.
    """
    tree = _tree(given) if given else _WANTED
    for name, value in _WANTED.items():
        if tree.get(name) != value:
            raise ConfigError(f"{name} is {tree.get(name)!r}, not {value!r}; vLLM wants {FLAG}")
    extra = tree.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config is {extra!r}; it must be a tree like that of kvtide.toml")
    return configuration.read(overrides=extra)


def _tree(given: str) -> Mapping[str, Any]:
    try:
        tree = json.loads(Path(given[1:]).read_text() if given.startswith("@") else given)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{given!r} is not JSON, or @ and a file of it: {e}") from e
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{given!r} is not an object; vLLM wants {FLAG}")
    if tree.get("kv_connector") != "MultiConnector":
        return tree
    extra = tree.get("kv_connector_extra_config")
    several = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(several, list) or not all(isinstance(one, Mapping) for one in several):
        raise ConfigError(f"{given!r} has no list of connectors in its kv_connector_extra_config")
    return next((one for one in several if one.get("kv_connector") == _WANTED["kv_connector"]), tree)
