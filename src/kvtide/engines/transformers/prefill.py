"""Measures how fast a model computes prompts; loading must be faster than that.

``generate`` calls its stopping criteria after every token; the criterion added here never stops it, and records when
the first token is complete.
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
"""Minimum tokens for a measurement. Fewer are computed as fast as one."""


class _FirstToken(StoppingCriteria):
    """Records when the first token is complete, and calls ``tell``."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.began, self.seconds = time.perf_counter(), 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        if not self.seconds:
            input_ids[0, -1].item()  # waits for the GPU's queued work, as the next operation would anyway
            self.seconds = time.perf_counter() - self.began
            self._tell()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Prefill:
    """A model's prefill cost, learned from calls that computed enough tokens."""

    def __init__(self) -> None:
        self._fit = PrefillFit()
        self._lock = threading.Lock()
        self.cost: PrefillCost | None = None
        """None until it is known."""

    def seconds(self, start: int, stop: int) -> float | None:
        """Seconds to compute a prompt from one token to another; None if unknown."""
        return self.cost.seconds(start, stop) if self.cost is not None else None

    def tells(self, tokens: int) -> bool:
        """Whether a call that computes that many tokens before the first output token can be measured."""
        return tokens >= _ENOUGH

    def watch(self, call: dict[str, Any], tell: Callable[[], None]) -> _FirstToken:
        """Watch a call of ``generate``; ``tell`` is called at its first token."""
        watch = _FirstToken(tell)
        call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or ()), watch])
        return watch

    def seen(self, watch: _FirstToken, rows: int, start: int, stop: int) -> None:
        """Record that tokens ``start`` to ``stop`` of that many ``rows`` were computed for the first output token."""
        if watch.seconds and self.tells(rows * (stop - start)):
            with self._lock:
                self._fit.add(rows * (stop - start), rows * reach(start, stop), watch.seconds)
                self.cost = self._fit.cost
