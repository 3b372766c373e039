"""Rows of bytes under names of another's making: what vLLM's tiers keep, in blocks of ours.

vLLM has named a chunk of KV already, by a hash of all tokens up to its end. So here a chunk is a prompt of one block
and of one token, which stands for nothing: what tells it from others is vLLM's name, as an extra, hashed under the
namespace's key. What a row means is vLLM's business; to us it is one section, checked as a whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide import canonical
from kvtide.block import Group, Kind, Layout
from kvtide.index.keys import Chain, Extra, Model
from kvtide.match import Match
from kvtide.session import Session

__all__ = ["Chunks", "Row", "model_of"]

Row = npt.NDArray[np.uint8]


def model_of(nbytes: int, weights: str, facts: Mapping[str, canonical.Value]) -> Model:
    """Rows of ``nbytes`` bytes. They are shared where the weights, and all ``facts``, are the same."""
    row = Group("row", Kind.STATE, layers=1, heads=1, head_dim=nbytes, dtype="uint8", page=1, packing="vllm")
    return Model(Layout((row,), block_tokens=1), weights, facts)


class Chunks:
    """The chunks in a session's store. Safe from any thread; nothing is raised for what the store has not or does not
    take, nor for want of a node."""

    def __init__(self, session: Session, deadline: float) -> None:
        """``deadline``: seconds after which a load is given up."""
        self._session = session
        self._deadline = deadline
        self._nbytes = session.layout.geometry["row"].footprint

    def _chain(self, key: bytes) -> Chain:
        return self._session.chain([0], [Extra("vllm", key)])

    def _match(self, key: bytes) -> Match:
        return self._session.match(self._chain(key), prefill=0)  # whether to load at all, vLLM has decided

    def has(self, key: bytes) -> bool:
        """Whether it is there now."""
        with self._match(key) as match:
            return match.blocks == 1

    def load(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Copy chunks into rows. Which came whole, and in time; the rows of others are as they were."""
        # In parts: a client may hold only so much, and what is more would be a miss.
        step = max(1, self._session.desk.largest // self._nbytes)
        parts = [slice(first, first + step) for first in range(0, len(keys), step)]
        end = time.monotonic() + self._deadline
        return [came for part in parts for came in self._load(keys[part], rows[part], end)]

    def _load(self, keys: Sequence[bytes], rows: Sequence[Row], end: float) -> list[bool]:
        left = max(0.0, end - time.monotonic())
        with contextlib.ExitStack() as held:
            matches = [held.enter_context(self._match(key)) for key in keys]
            loads = [
                self._session.load(match, [row], deadline=left) if match.blocks else None
                for match, row in zip(matches, rows, strict=True)
            ]
            return [load is not None and load.wait().tokens == 1 for load in loads]

    def store(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Copy rows into the store. Which are there now."""
        return [not self._session.store(self._chain(key), [row]).dropped for key, row in zip(keys, rows, strict=True)]
