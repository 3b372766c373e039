"""Rows of bytes with keys chosen by vLLM: the chunks of vLLM's own tiers, stored as kvtide blocks.

vLLM has already named a chunk of KV, by a hash of all tokens up to its end. So a block's key is derived from that name
alone, under the namespace's key, and any chunks can be combined in one prompt: those of one job are sent to the store
in few messages. vLLM alone defines the contents of a row; here it is one section, verified as a whole.
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
    """A model with rows of ``nbytes`` bytes. Rows are shared between deployments with the same weights and
    ``facts``."""
    row = Group("row", Kind.MLA, layers=1, heads=1, head_dim=nbytes, dtype="uint8", page=1, packing="vllm")
    return Model(Layout((row,), block_tokens=1), weights, facts)


class Chunks:
    """The chunks in a session's store. Thread-safe. Without a node every lookup is a miss, and nothing is stored."""

    def __init__(self, session: Session, deadline: float) -> None:
        """``deadline``: seconds after which a load is abandoned."""
        self._session = session
        self._deadline = deadline
        self._nbytes = session.layout.geometry["row"].footprint

    def prompt(self, keys: Sequence[bytes]) -> Chain:
        """The chain of these chunks' blocks, in this order."""
        return self._session.chain().namer.apart("vllm", keys)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether the store has it now."""
        return self._session.find(self.prompt(keys))

    @property
    def _step(self) -> int:
        """Chunks per request: a client may lease only so much memory, and chunks beyond that would be misses."""
        return max(1, self._session.backend.largest // self._nbytes)

    def load(self, keys: Sequence[bytes], rows: Sequence[Row], since: float) -> list[bool]:
        """Copy chunks into rows. Returns for each whether it was loaded completely and in time; other rows are
        unchanged.

        ``since``: when the load was requested, on the monotonic clock. The deadline is counted from then.
        """
        end, came = since + self._deadline, list[bool]()
        while len(came) < len(keys) and (left := end - time.monotonic()) > 0:
            part = slice(len(came), len(came) + self._step)
            # vLLM has decided to load these chunks, so it is not recorded as a lookup of a prompt.
            with self._session.match(self.prompt(keys[part]), prefill=0, record=False) as match:
                load = self._session.load(match, rows[part][: match.blocks], deadline=left)
                came += [True] * load.wait().tokens
            if len(came) < min(part.stop, len(keys)):
                came.append(False)  # the prefix ended here; the chunks after it may still be there
        return came + [False] * (len(keys) - len(came))

    def store(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Copy rows into the store. Returns for each whether it is stored now: all False if any was dropped, because it
        is not known which."""
        step = self._step
        parts = [slice(first, first + step) for first in range(0, len(keys), step)]
        dropped = sum(self._session.store(self.prompt(keys[part]), rows[part]).dropped for part in parts)
        return [not dropped] * len(keys)
