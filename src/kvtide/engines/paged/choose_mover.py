"""The mover for a device."""

from __future__ import annotations

import torch

from kvtide.engines.paged.mover import HostMover, Mover
from kvtide.errors import LayoutError

__all__ = ["mover"]


def mover(device: torch.device, staging: int | None = None) -> Mover:
    """The mover for tensors on ``device``. On a GPU, copies use at most ``staging`` bytes of its memory (default: 1/256
    of it, at most 512 MiB)."""
    if device.type == "cpu":
        return HostMover()
    if device.type != "cuda":
        raise LayoutError(f"tensors on {device} cannot be moved: there are copies for cpu and cuda")
    from kvtide.engines.paged.gpu import GpuMover

    return GpuMover(device, staging)
