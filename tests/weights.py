"""The identity of parameters that are numpy arrays, by the samples that engines take from tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from kvtide.index.weights_identity import WeightsId, from_samples, places


def from_parameters(parameters: Iterable[tuple[str, npt.NDArray[Any]]]) -> WeightsId:
    return from_samples((name, array.shape, array.flat[places(array.size)]) for name, array in parameters)
