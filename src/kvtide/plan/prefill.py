"""The cost of computing a prompt, with which loading competes.

A token costs its share of the matrix products, which is the same for all, and its attention, which grows with the
tokens before it. So the tokens from ``start`` to ``stop`` take::

    a * (stop - start)  +  b * (stop^2 - start^2) / 2

seconds; the factor of ``b`` is the *reach*, the sum of all these tokens' context lengths. At 128k tokens the second
term is several times the first, and a plain speed in tokens per second is wrong by that much, in one direction for
short prompts and in the other for long ones.

``PrefillFit`` learns ``a`` and ``b`` from an engine's measured times. It sees only wall time, so the engine's other
work in that time (decoding for others) is included: the next prompt will meet the same speed. Now and then a step takes
a hundred times as long, because something is compiled. Therefore the fit minimizes absolute errors, so that an outlier
counts as one observation, however large.

``b`` is used only if it explains the observations: it needs ``_FEW`` of them, and the typical error with it must be at
most ``_BETTER`` times the error without it; otherwise noise among short prompts would be extrapolated to long ones.
Neither is ever below 0.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.errors import LayoutError

__all__ = ["Prefill", "PrefillCost", "PrefillFit", "cost_of", "reach"]

_LAST = 64
"""Number of observations kept."""
_FORGET = 0.95
"""The weight of an observation relative to the next one."""
_FEW = 8
_BETTER = 0.9
_ROUNDS = 12
_SLOWEST = 1e18
"""Maximum seconds per token, so that sums are finite."""

Floats = npt.NDArray[np.float64]


@overload
def reach(start: float, stop: float) -> float: ...
@overload
def reach(start: npt.NDArray[Any], stop: float) -> Floats: ...
def reach(start: Any, stop: float) -> Any:
    """The sum of the context lengths of a prompt's tokens from ``start`` to ``stop``."""
    return (stop * float(stop) - start * 1.0 * start) / 2


class PrefillCost(msgspec.Struct, frozen=True):
    """The cost of computing tokens of a prompt, in seconds: per token, and per token and token of context before it."""

    per_token: float
    per_token_context: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_token", "per_token_context"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise LayoutError(f"{name} is {value!r}, not seconds; give a number that is 0 or more")

    @overload
    def seconds(self, start: float, stop: float) -> float: ...
    @overload
    def seconds(self, start: npt.NDArray[Any], stop: float) -> Floats: ...
    def seconds(self, start: Any, stop: float) -> Any:
        """Seconds for the tokens from ``start`` to ``stop``; for each start, if there are several."""
        return self.per_token * (stop - start) + self.per_token_context * reach(start, stop)

    def speed(self, start: int, stop: int) -> float:
        """Tokens per second, from ``start`` to ``stop``."""
        seconds = self.seconds(start, stop)
        return (stop - start) / seconds if seconds > 0 else math.inf


Prefill = float | PrefillCost
"""What callers give: a plain speed in tokens per second (0: unknown), or a cost."""


def cost_of(prefill: Prefill) -> PrefillCost | None:
    """The cost for a caller's value; None if unknown."""
    if isinstance(prefill, PrefillCost):
        return prefill
    return PrefillCost(min(1 / prefill, _SLOWEST)) if prefill > 0 else None


class PrefillFit:
    """Learns the cost of an engine's prefill. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=_LAST)
        """Tokens, reach, seconds."""
        self._cost: PrefillCost | None = None
        self._fitted = True

    def add(self, tokens: float, reached: float, seconds: float) -> None:
        """Record that ``tokens``, with the sum of context lengths ``reached``, took ``seconds``."""
        if tokens > 0 and reached >= 0 and 0 < seconds < math.inf:
            self._seen.append((tokens, reached, seconds))
            self._fitted = False

    @property
    def cost(self) -> PrefillCost | None:
        """None as long as nothing was recorded."""
        if not self._fitted:
            self._cost, self._fitted = _fit(np.array(self._seen, np.float64)), True
        return self._cost


def _fit(seen: Floats) -> PrefillCost:
    tokens, reached, seconds = seen.T
    weights = _FORGET ** np.arange(len(seen) - 1, -1, -1.0)
    plain = _ratio(tokens, seconds, weights)
    if len(seen) < _FEW or not reached.any():
        return PrefillCost(plain)
    curve = _curve(tokens, reached, seconds, weights, plain)
    typical = [float(np.median(np.abs(seconds - a * tokens - b * reached))) for a, b in ((plain, 0.0), curve)]
    return PrefillCost(*curve) if typical[1] <= _BETTER * typical[0] else PrefillCost(plain)


def _ratio(given: Floats, seconds: Floats, weights: Floats) -> float:
    """The factor with the least absolute error: a weighted median; of two the lower, because outliers are slow."""
    each = seconds / given
    order = np.argsort(each)
    weight = np.cumsum((weights * given)[order])
    return float(each[order][np.searchsorted(weight, weight[-1] / 2)])


def _curve(tokens: Floats, reached: Floats, seconds: Floats, weights: Floats, plain: float) -> tuple[float, float]:
    """The two factors with the least absolute errors, by iteratively reweighted least squares."""
    a, b = plain, 0.0
    scale = float(np.max(reached))
    x, y = tokens, reached / scale
    least = max(1e-9, 1e-4 * float(np.median(seconds)))
    for _ in range(_ROUNDS):
        w = weights / np.maximum(np.abs(seconds - a * x - b * y), least)
        xx, xy, yy, xt, yt = (float(np.dot(w, p)) for p in (x * x, x * y, y * y, x * seconds, y * seconds))
        determinant = xx * yy - xy * xy
        if determinant <= 1e-6 * xx * yy:  # all have the same context
            return plain, 0.0
        a, b = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        if b < 0:
            return plain, 0.0
        if a < 0:
            a, b = 0.0, max(0.0, yt / yy)
    return a, b / scale
