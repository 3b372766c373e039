"""Checks of vLLM: the version that is installed here, or a running engine over HTTP."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException

from kvtide.doctor.finding import Finding, error, ok, warning
from kvtide.doctor.flags import FLAG
from kvtide.doctor.host import has_gpu
from kvtide.errors import TierError

__all__ = ["Running", "ask", "check"]

_TESTED = "0.32"
_SECONDS = 5.0
_ENOUGH = 2048
"""Minimum prompt tokens that an engine must have computed for an estimate of its speed."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Running:
    """Version, metrics and settings of a running engine."""

    version: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """Its metrics, each summed over its labels."""
    cache: Mapping[str, str] = field(default_factory=dict)
    """The settings of its KV cache."""

    @property
    def prefill(self) -> float | None:
        """Prompt tokens computed per second, as seen by a request."""
        tokens = self.figures.get("vllm:request_prefill_kv_computed_tokens_sum", 0.0)
        seconds = self.figures.get("vllm:request_prefill_time_seconds_sum", 0.0)
        return tokens / seconds if tokens >= _ENOUGH and seconds > 0 else None

    @property
    def pool(self) -> int | None:
        """Capacity of its own KV cache in tokens."""
        try:
            return int(self.cache["num_gpu_blocks"]) * int(self.cache["block_size"])
        except (KeyError, ValueError):
            return None


def ask(url: str) -> Running:
    """Query the engine at that URL. Raises TierError if none answers."""
    try:
        version = json.loads(_get(f"{url.rstrip('/')}/version"))["version"]
        text = _get(f"{url.rstrip('/')}/metrics")
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as e:
        raise TierError(f"no vLLM answers at {url} ({e})") from e
    figures: dict[str, float] = {}
    cache: dict[str, str] = {}
    for name, labels, value in _SAMPLE.findall(text):
        figures[name] = figures.get(name, 0.0) + float(value)
        if name == "vllm:cache_config_info":
            cache = dict(_LABEL.findall(labels))
    return Running(str(version), figures, cache)


def _get(url: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=_SECONDS) as answer:
        return str(answer.read().decode())


def check(running: Running | None) -> Iterator[Finding]:
    """Check a running engine, or else the vLLM installed in this environment."""
    yield _version(running.version if running is not None else _installed())
    if running is not None:
        yield from _flags(running)
    elif not has_gpu() and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        yield warning(
            "threads",
            "on CPUs vLLM takes another number of cores for computing as soon as it has any connector",
            "set VLLM_CPU_OMP_THREADS_BIND to the cores that it is to have",
        )


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""


def _version(version: str) -> Finding:
    if not version:
        return warning("vLLM", "not found here", "give --url of a running engine, or install it beside kvtide")
    if version.split("+")[0].split(".")[:2] != _TESTED.split("."):
        return warning("vLLM", f"{version}; kvtide is tested with {_TESTED}", f"use {_TESTED}, or try it out first")
    return ok("vLLM", version)


def _flags(running: Running) -> Iterator[Finding]:
    figures = running.figures
    if "vllm:kvtide_loads_total" not in figures:
        yield error("connector", "the engine runs without kvtide", f"start it with {FLAG}")
    else:
        loads, stores = (int(figures.get(f"vllm:kvtide_{what}_total", 0)) for what in ("loads", "stores"))
        asked = figures.get("vllm:prompt_tokens_total", 0.0)
        yield (
            ok("connector", f"{loads:,} loads and {stores:,} stores so far")
            if loads or stores or asked < _ENOUGH
            else warning(
                "connector",
                f"nothing was loaded or stored in {asked:,.0f} tokens of prompts",
                "see 'store' below, and the engine's log for a line with 'kvtide': it says what is off, and why",
            )
        )
        failed, missed = (int(figures.get(f"vllm:kvtide_{what}_total", 0)) for what in ("failed", "missed"))
        if failed or missed:
            yield warning(
                "failures",
                f"{failed:,} loads failed and {missed:,} stores were given up; all of that was computed",
                "see whether the node hangs or was restarted: kvtide status, and the engine's log",
            )
    skipped = running.cache.get("kv_cache_dtype_skip_layers", "[]")
    if skipped not in ("[]", "None", ""):
        yield error("flags", f"layers {skipped} have KV of another dtype", "leave kv_cache_dtype_skip_layers empty")
