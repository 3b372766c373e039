"""The addresses of slots, and slots as tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvtide.block import Span

__all__ = ["address", "memory"]


def address(span: Span) -> int:
    """The address of a span, which may be read-only."""
    if not span.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(span))
    found: int = np.frombuffer(span, np.uint8).__array_interface__["data"][0]  # six times slower
    return found


def memory(span: Span, nbytes: int) -> torch.Tensor:
    """A slot as a tensor of bytes. It is made from the address, because torch warns about read-only memory; so a lease
    or a reservation must protect the slot while the tensor is used."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address(span)), dtype=torch.uint8)
