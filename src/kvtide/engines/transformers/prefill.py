"""How fast a model computes prompts: what loading must beat.

``generate`` asks its stopping criteria after every token; ours never stops it, and notes when the first one is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtide.plan.prefill import PrefillCost, PrefillFit, reach

__all__ = ["Prefill"]

_ENOUGH = 128
"""Tokens. Fewer are computed as fast as one, and tell nothing."""


class _FirstToken(StoppingCriteria):
    """Notes when the first token is there, and tells."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.began, self.seconds = time.perf_counter(), 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        if not self.seconds:
            input_ids[0, -1].item()  # a GPU has only been told what to do so far; the next thing waits for it anyway
            self.seconds = time.perf_counter() - self.began
            self._tell()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Prefill:
    """What computing prompts costs one model, by its calls that computed enough to tell."""

    def __init__(self) -> None:
        self._fit = PrefillFit()
        self._lock = threading.Lock()
        self.cost: PrefillCost | None = None
        """As soon as it is known."""

    def seconds(self, start: int, stop: int) -> float | None:
        """How long it takes to compute a prompt from one token to another; None if that is not known."""
        return self.cost.seconds(start, stop) if self.cost is not None else None

    def tells(self, tokens: int) -> bool:
        """Whether it can be learned from a call that computes so many for the first token."""
        return tokens >= _ENOUGH

    def watch(self, call: dict[str, Any], tell: Callable[[], None]) -> _FirstToken:
        """A call of ``generate`` is watched, and ``tell`` called at its first token."""
        watch = _FirstToken(tell)
        call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or ()), watch])
        return watch

    def seen(self, watch: _FirstToken, rows: int, start: int, stop: int) -> None:
        """The tokens from ``start`` to ``stop`` of so many ``rows`` were computed for the first one."""
        if watch.seconds and self.tells(rows * (stop - start)):
            with self._lock:
                self._fit.add(rows * (stop - start), rows * reach(start, stop), watch.seconds)
                self.cost = self._fit.cost
