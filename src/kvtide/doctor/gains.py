"""What a change brings on recorded traffic, in tokens found and in seconds of prefill, and how sure that is.

Tokens are counted as ``kvtide status`` counts them: those that the engine had in its own cache belong to neither side.
Found blocks of a colder tier save the time to compute them less the time to read them; if reading them takes longer
than computing, they are computed, and save nothing.

*How sure.* Two replays of the same requests are compared request by request. Requests are not independent: one popular
prompt brings many hits in a row. So the counted requests are divided into parts, and the standard error is that of the
parts' sums. A gain is above the noise if it is more than twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.plan.prefill import PrefillCost
from kvtide.replay.outcome import Outcome
from kvtide.replay.trace import Trace

__all__ = ["LEAST_SHARE", "Gain", "Traffic"]

_PARTS = 20
_SURE = 2.0
"""Standard errors that a gain must have."""
LEAST_SHARE = 0.005
"""The least gain of interest: half a point of the tokens, or of the time that computing all of them takes."""
_SECONDS_A_DAY = 86400.0

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gain:
    points: float
    """Of 100 tokens that the engine lacks, how many more are found."""
    points_error: float
    seconds_per_hour: float | None
    """Seconds of prefill saved in an hour of this traffic; None: the cost of computing is not known."""
    seconds_error: float | None
    written_per_day: float
    """More bytes written to the colder tier in a day."""
    matters: bool
    """Whether it is above the noise, and large enough to matter."""


class Traffic:
    """The counted requests of a recording, and what it takes to compute or to read their blocks."""

    def __init__(
        self, trace: Trace, start: int, block_bytes: int, cost: PrefillCost | None, read_speed: float | None
    ) -> None:
        """``start``: the number of the first counted request. ``read_speed``: bytes per second that the colder tier is
        read at; None: not known, so that reading seems to take no time."""
        self.start = start
        self.cost = cost
        self.read_speed = read_speed
        self._block_bytes = block_bytes
        self._tokens = trace.block_tokens or 1
        counted = trace.blocks[start:]
        self._lengths = np.array([len(blocks) for blocks in counted], np.int64)
        have = np.array(trace.have[start:], np.int64) if trace.have else np.zeros(len(counted), np.int64)
        self._have = np.minimum(have, self._lengths)
        self.asked = int((self._lengths - self._have).sum()) * self._tokens
        """Tokens of full blocks that engines lacked."""
        self.seconds = float(trace.seconds[-1] - trace.seconds[start]) if len(counted) else 0.0
        known = set[int]()
        unlimited = []
        for number, blocks in enumerate(trace.blocks):
            if number >= start:
                unlimited.append(next((i for i, b in enumerate(blocks.tolist()) if b not in known), len(blocks)))
            known.update(blocks.tolist())
        self.unlimited = self._share(np.maximum(0, np.array(unlimited, np.int64) - self._have))
        """The share of those tokens that a cache finds from which nothing is ever evicted."""

    def _share(self, blocks: npt.NDArray[np.int64]) -> float:
        return int(blocks.sum()) * self._tokens / self.asked if self.asked else 0.0

    def hit_rate(self, found: Outcome) -> float:
        """The share of the tokens that the engines lacked and the store had."""
        return self._share(self._more(found))

    def _more(self, found: Outcome) -> npt.NDArray[np.int64]:
        """For each request, the blocks found that its engine lacked."""
        more: npt.NDArray[np.int64] = np.maximum(0, (found.dram + found.cold)[self.start :] - self._have)
        return more

    def saved(self, found: Outcome) -> Values:
        """For each request, seconds of prefill saved."""
        assert self.cost is not None
        dram, more = found.dram[self.start :], self._more(found)
        whole = self._compute(self._have + more)
        if self.read_speed is not None:
            whole -= np.minimum(found.cold[self.start :], more) * (self._block_bytes / self.read_speed)
        saved: Values = np.maximum(whole, self._compute(np.maximum(dram, self._have)))
        return saved

    def _compute(self, upto: npt.NDArray[np.int64]) -> Values:
        """Seconds to compute from what the engine has up to so many blocks."""
        assert self.cost is not None
        first, last = self._have * float(self._tokens), upto * float(self._tokens)
        return self.cost.per_token * (last - first) + self.cost.per_token_context * (last**2 - first**2) / 2

    @property
    def compute_seconds(self) -> float | None:
        """Seconds to compute all that the engines lacked."""
        return None if self.cost is None else float(self._compute(self._lengths).sum())

    def gain(self, before: Outcome, after: Outcome) -> Gain:
        """What the settings of ``after`` bring, compared with those of ``before``."""
        tokens = (self._more(after) - self._more(before)) * float(self._tokens)
        total, error = _sum(tokens)
        points, points_error = (100 * n / self.asked if self.asked else 0.0 for n in (total, error))
        seconds = seconds_error = None
        matters = points > _SURE * points_error and points >= 100 * LEAST_SHARE
        if self.cost is not None:
            hours = max(self.seconds, 1.0) / 3600
            saved, doubt = _sum(self.saved(after) - self.saved(before))
            seconds, seconds_error = saved / hours, doubt / hours
            whole = self.compute_seconds or 0.0
            matters = saved > _SURE * doubt and saved >= LEAST_SHARE * whole
        written = (after.written - before.written) * self._block_bytes * _SECONDS_A_DAY / max(self.seconds, 1.0)
        return Gain(points, points_error, seconds, seconds_error, written, matters)


def _sum(each: npt.NDArray[np.floating[Any]]) -> tuple[float, float]:
    """The sum, and its standard error."""
    parts = [part.sum() for part in np.array_split(each, min(_PARTS, len(each)))] if len(each) else [0.0]
    spread = float(np.std(parts, ddof=1)) if len(parts) > 1 else 0.0
    return float(each.sum()), spread * float(np.sqrt(len(parts)))
