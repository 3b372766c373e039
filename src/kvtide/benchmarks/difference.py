"""Whether two samples differ: two tests that assume nothing about the distribution, and an interval.

Times have a long tail and occur in clusters, so means say little. *Mann-Whitney* detects that the values of one sample
tend to be larger; *Kolmogorov-Smirnov* detects any difference between the distributions. Both only require that values
were assigned to the samples at random, as they are if the order of the measurements was random: temporary noise then
affects both samples alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Difference", "difference", "kolmogorov_smirnov", "mann_whitney"]

Sample = npt.NDArray[np.float64]
_RESAMPLES = 1000


class Difference(NamedTuple):
    medians: tuple[float, float]
    interval: tuple[float, float]
    """95 % confidence interval of the second median minus the first, by resampling."""
    larger: float
    """Mann-Whitney: the probability of such a difference by chance alone."""
    other: float
    """Kolmogorov-Smirnov: the same."""

    @property
    def p(self) -> float:
        """The combined p-value: doubled, because there are two tests."""
        return min(1.0, 2 * min(self.larger, self.other))

    def told(self, unit: str) -> str:
        low, high = self.interval
        return (
            f"medians {self.medians[0]:.5g} and {self.medians[1]:.5g} {unit}, difference "
            f"{self.medians[1] - self.medians[0]:+.3g} ({low:+.3g} to {high:+.3g}) {unit}; "
            f"p {self.larger:.2g} (Mann-Whitney), {self.other:.2g} (Kolmogorov-Smirnov)"
        )


def difference(a: Sample, b: Sample) -> Difference:
    random = np.random.default_rng(0)
    drawn = [np.median(random.choice(b, len(b))) - np.median(random.choice(a, len(a))) for _ in range(_RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Difference(
        (float(np.median(a)), float(np.median(b))),
        (float(low), float(high)),
        mann_whitney(a, b),
        kolmogorov_smirnov(a, b),
    )


def mann_whitney(a: Sample, b: Sample) -> float:
    """Two-sided, by the normal distribution, with its correction for ties."""
    _, place, ties = np.unique(np.concatenate([a, b]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    n, m, both = len(a), len(b), len(a) + len(b)
    above = ranks[:n].sum() - n * (n + 1) / 2 - n * m / 2
    variance = n * m / 12 * (both + 1 - (ties.astype(float) ** 3 - ties).sum() / (both * (both - 1)))
    if not variance:
        return 1.0
    return math.erfc(max(0.0, abs(above) - 0.5) / math.sqrt(2 * variance))


def kolmogorov_smirnov(a: Sample, b: Sample) -> float:
    """Two-sided, by the distribution's limit, with Stephens' correction for samples that are not large."""
    both = np.concatenate([a, b])
    farthest = np.abs(
        np.searchsorted(np.sort(a), both, side="right") / len(a)
        - np.searchsorted(np.sort(b), both, side="right") / len(b)
    ).max()
    size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = float((size + 0.12 + 0.11 / size) * farthest)
    if x < 0.3:  # the sum below hardly converges there, and is 1 to five digits
        return 1.0
    return min(1.0, 2 * sum(math.copysign(math.exp(-2 * (j * x) ** 2), j % 2 - 0.5) for j in range(1, 101)))
