"""Benchmarks of the path between a GPU and the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kvtide.benchmarks.decode import decode
from kvtide.benchmarks.first_token import first_token, first_token_nvme
from kvtide.benchmarks.pages import pages
from kvtide.benchmarks.record import BenchRecord
from kvtide.benchmarks.settings import Settings, chosen
from kvtide.errors import ConfigError

__all__ = ["GPU_FIGURES", "gpu"]

GPU_FIGURES: dict[str, Callable[[Settings], Iterator[BenchRecord]]] = {
    "pages": pages,
    "decode": decode,
    "first-token": first_token,
    "first-token-nvme": first_token_nvme,
}


def gpu(settings: Settings, only: Sequence[str] = ()) -> Iterator[BenchRecord]:
    """Run all benchmarks, or only the named ones."""
    if not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU that torch can use")
    for measure in chosen(GPU_FIGURES, only):
        yield from measure(settings)
