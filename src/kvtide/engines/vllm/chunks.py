"""Rows of bytes under names of another's making: what vLLM's own tiers keep, in blocks of ours.

vLLM has named a chunk of KV already, by a hash of all tokens up to its end. So a block's key is made of that name
alone, under the key of the namespace, and any chunks can stand side by side in a prompt: those of one job go to the
store in few messages. What a row means is vLLM's business; to us it is one section, checked as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide import canonical
from kvtide.block import Group, Kind, Layout
from kvtide.index.keys import Chain, Model
from kvtide.store.session import Session

__all__ = ["Chunks", "Row", "model_of"]

Row = npt.NDArray[np.uint8]


def model_of(nbytes: int, weights: str, facts: Mapping[str, canonical.Value]) -> Model:
    """Rows of ``nbytes`` bytes. They are shared where the weights, and all ``facts``, are the same."""
    row = Group("row", Kind.MLA, layers=1, heads=1, head_dim=nbytes, dtype="uint8", page=1, packing="vllm")
    return Model(Layout((row,), block_tokens=1), weights, facts)


class Chunks:
    """The chunks in a session's store. Safe from any thread. Without a node there are none, and none is taken."""

    def __init__(self, session: Session, deadline: float) -> None:
        """``deadline``: seconds after which a load is given up."""
        self._session = session
        self._deadline = deadline
        self._nbytes = session.layout.geometry["row"].footprint

    def prompt(self, keys: Sequence[bytes]) -> Chain:
        """The blocks of these chunks, in this order."""
        return self._session.chain().namer.apart("vllm", keys)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are there now."""
        return self._session.find(self.prompt(keys))

    @property
    def _step(self) -> int:
        """Chunks that go at a time: a client may hold only so much, and what is more would be a miss."""
        return max(1, self._session.backend.largest // self._nbytes)

    def load(self, keys: Sequence[bytes], rows: Sequence[Row], since: float) -> list[bool]:
        """Copy chunks into rows. Which came whole, and in time; the rows of others are as they were.

        ``since``: when they were asked for, on the monotonic clock. The deadline is counted from then.
        """
        end, came = since + self._deadline, list[bool]()
        while len(came) < len(keys) and (left := end - time.monotonic()) > 0:
            part = slice(len(came), len(came) + self._step)
            # vLLM has decided to load them. They are no prompt, but what it knows to be here of one.
            with self._session.match(self.prompt(keys[part]), prefill=0, record=False) as match:
                load = self._session.load(match, rows[part][: match.blocks], deadline=left)
                came += [True] * load.wait().tokens
            if len(came) < min(part.stop, len(keys)):
                came.append(False)  # here the prefix ended; what comes after it may be there
        return came + [False] * (len(keys) - len(came))

    def store(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Copy rows into the store, all or some. Which are there now; if some are not, it is not known which are."""
        step = self._step
        parts = [slice(first, first + step) for first in range(0, len(keys), step)]
        dropped = sum(self._session.store(self.prompt(keys[part]), rows[part]).dropped for part in parts)
        return [not dropped] * len(keys)
