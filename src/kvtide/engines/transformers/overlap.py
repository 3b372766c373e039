"""Compute the front of a prompt while the tail of its stored prefix is loaded, until the two meet.

Loading a prefix keeps the disk busy and leaves the model idle; computing it does the opposite. Where neither is clearly
faster, both are done at once::

    blocks   0    1    2    3    4    5    6    7
             computed ----->|<-------------- loaded
             in chunks   they meet    in pieces, the last one first

A token's KV depends on all tokens before it, so the model can only begin at the front. A stored block can be loaded
without the blocks before it: so loading begins at the back, which the model would reach last.

*The tail* is a thread. It matches, loads and copies pieces of a few blocks, ``_AHEAD`` of them at a time, and keeps
each leased until its bytes are in the model's memory: so it leases no more of the store's memory than that.

*The front* is the caller's thread. Before each chunk it skips the blocks that have arrived, and it ends when no more
blocks are missing or can arrive.

Both write into one memory area, each block to its place: nothing is moved when they meet. Under one lock the front
claims the blocks that it is about to compute, and the tail those that it is about to copy, so no block is written
twice. Blocks that the front has claimed are not loaded any more: pieces not begun are skipped, and loads under way are
cancelled.

The front never depends on the tail. A block that does not arrive, for whatever reason, is computed when the front gets
there; blocks after it that did arrive are still used. So the output is that of a prefill in the same chunks with the
same blocks loaded, whatever happens to the store. Between chunks the front waits for the tail only if the missing
blocks are expected sooner than one more chunk takes, and not longer than that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtide.engines.paged.mover import Mover
from kvtide.engines.transformers.dynamic_cache import KvMemory
from kvtide.index.keys import Chain
from kvtide.interrupts import again_if_interrupted
from kvtide.store.match import Load, Match
from kvtide.store.session import Session

__all__ = ["ChunkSizes", "Overlap", "chosen", "sizes"]

log = logging.getLogger("kvtide.transformers")

_CLEARLY = 3.0
"""Factor by which loading or computing must be faster than the other to be done alone."""
_WORTH = 0.02
"""Minimum saving in seconds."""
_PIECE = 64 << 20
"""Maximum bytes per piece."""
_AHEAD = 4
"""Pieces that are loaded concurrently."""
_PIECES, _CHUNKS = 32, 16
"""Minimum number of pieces of the prefix, and of chunks of the part that the front is expected to compute."""
_SHORTEST = 0.02
"""Minimum seconds per chunk: shorter ones are computed less efficiently."""
_LONGEST = 2048
"""Maximum tokens per chunk: a mask may take a byte for each of them and each token before."""


def chosen(load: float, compute: float) -> bool:
    """Whether to load and compute at the same time a prefix that takes ``load`` or ``compute`` seconds alone."""
    if not (load < _CLEARLY * compute and compute < _CLEARLY * load):
        return False
    return min(load, compute) - load * compute / (load + compute) >= _WORTH


class ChunkSizes(NamedTuple):
    """Sizes of the steps of both sides, in blocks."""

    piece: int
    """Blocks loaded at a time."""
    chunk: int
    """Blocks computed at a time."""


def sizes(blocks: int, tokens: int, nbytes: int, load: float, compute: float) -> ChunkSizes:
    """Step sizes for ``blocks`` of ``tokens`` and ``nbytes`` each, whose load or computation takes that many seconds in
    all."""
    piece = max(1, min(_PIECE // nbytes, blocks // _PIECES))
    computed = blocks * load / (load + compute)  # number of blocks computed when both sides meet
    chunk = min(_LONGEST // tokens, max(int(computed / _CHUNKS), int(blocks * _SHORTEST / compute)))
    return ChunkSizes(piece, max(1, chunk))


class _Piece(NamedTuple):
    """Blocks that are being loaded."""

    blocks: range
    match: Match
    load: Load


class Overlap:
    """One prompt's prefix, computed and loaded at the same time. Use it in a ``with``: at its end nothing is under
    way."""

    def __init__(
        self,
        session: Session,
        chain: Chain,
        mover: Mover,
        device: torch.device,
        blocks: int,
        held: int,
        sizes: ChunkSizes,
        seconds: Callable[[int, int], float | None],
    ) -> None:
        """Of the first ``blocks`` of a prompt ``held`` are in DRAM. ``seconds``: how long computing from one token to
        another takes."""
        self._session = session
        self._chain = chain
        self._mover = mover
        self._sizes = sizes
        self._seconds = seconds
        self._tokens = session.layout.block_tokens
        self.memory = KvMemory(session.layout, device, blocks)
        self._changed = threading.Condition()
        self._loaded = [False] * blocks
        self._copying = range(0)
        self._bottom = blocks
        """The first block that the tail has requested."""
        self._claimed = 0
        """The block after the last one that the front has computed, or is computing."""
        self._pieces: deque[_Piece] = deque()
        self._stopped = self._ended = False
        self._began = time.monotonic()
        self.arrived = 0
        """Blocks loaded by the tail."""
        self.loaded: list[tuple[float, int]] = []
        """For each piece, when it had arrived, in seconds since the beginning, and the tokens loaded by then."""
        self.computed: list[tuple[float, int]] = []
        """The same for the chunks of the front."""
        self._held = ExitStack()
        if device.type == "cuda":  # other streams must see that earlier uses of this memory have ended
            torch.cuda.current_stream(device).synchronize()
        self._thread = threading.Thread(target=self._run, args=(held,), name="kvtide-tail", daemon=True)
        try:
            match = self._lease_held(held)  # first: the tail's loads evict what is not leased
            self._thread.start()
            if match is not None:
                self._take_held(match)
        except BaseException:
            again_if_interrupted(self.close)
            raise

    # -- the tail -----------------------------------------------------------------------------------------

    def _lease_held(self, held: int) -> Match | None:
        """Lease the first blocks, which were in DRAM. Those that were evicted meanwhile are computed: a load would wait
        for the disk, which may hang."""
        match = self._held.enter_context(self._match(range(held))) if held else None
        if match is not None and not match.ready:  # those before the first evicted one stay: they are leased now
            match = self._held.enter_context(self._match(range(match.held_tokens // self._tokens)))
        return match

    def _take_held(self, match: Match) -> None:
        """Copy what is in DRAM of these blocks. Waits for no disk."""
        blocks = self._session.load(match).wait(0.0).blocks
        move = self.memory.load(self._mover, enumerate(blocks))
        self._held.callback(move.wait)
        move.wait()
        if not self._session.closed:  # else the blocks' memory may have been overwritten meanwhile
            with self._changed:
                self._loaded[: len(blocks)] = [True] * len(blocks)

    def _match(self, blocks: range) -> Match:
        chain = self._chain.first(blocks.stop)
        return self._session.match(chain, have=blocks.start * self._tokens, prefill=0, again=True)

    def _run(self, held: int) -> None:
        device = self.memory.device
        with ExitStack() as stack:
            stack.callback(self._end)
            try:
                # Modes and streams are per thread. On the front's stream a copy would wait for the front's chunk.
                stack.enter_context(torch.inference_mode(self.memory.tensor.is_inference()))
                if device.type == "cuda":
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
                while True:
                    while len(self._pieces) < _AHEAD and (blocks := self._next(held)):
                        self._begin(blocks)
                    if not self._pieces:
                        return
                    self._land(self._pieces[0])
                    self._let_go()
            except Exception as error:  # noqa: BLE001 - whatever the error, the front computes the missing blocks
                if not self._stopped:
                    log.warning("the rest of a prefix is computed, not loaded: %s: %s", type(error).__name__, error)

    def _next(self, held: int) -> range:
        """The blocks to load next; empty if the front has reached them."""
        with self._changed:
            first = max(held, self._claimed)
            if self._stopped or self._bottom <= first:
                return range(0)
            start = max(first, self._bottom - self._sizes.piece)
            blocks, self._bottom = range(start, self._bottom), start
            return blocks

    def _begin(self, blocks: range) -> None:
        match = self._match(blocks)
        try:
            piece = _Piece(blocks, match, self._session.load(match))
        except BaseException:
            match.release()
            raise
        with self._changed:
            self._pieces.append(piece)
            if self._unwanted(piece):
                piece.load.cancel()

    def _unwanted(self, piece: _Piece) -> bool:
        """Requires the lock."""
        return self._stopped or piece.blocks.stop <= self._claimed

    def _land(self, piece: _Piece) -> None:
        found = piece.load.wait()
        come = list(enumerate(found.blocks, piece.blocks.start))
        with self._changed:
            first = max(piece.blocks.start, self._claimed)
            come = [] if self._stopped else [(number, view) for number, view in come if number >= first]
            self._copying = range(come[0][0], come[-1][0] + 1) if come else range(0)
        try:
            good = False
            if come:
                self.memory.load(self._mover, come).wait()
                good = not self._session.closed  # else the blocks' memory may have been overwritten meanwhile
        finally:
            with self._changed:
                if good:
                    for number in self._copying:
                        self._loaded[number] = True
                    self.arrived += len(self._copying)
                    self.loaded.append((time.monotonic() - self._began, self.arrived * self._tokens))
                self._copying = range(0)
                self._changed.notify_all()

    def _let_go(self) -> None:
        """Release the first piece."""
        self._pieces[0].match.release()
        with self._changed:
            self._pieces.popleft()
            self._changed.notify_all()

    def _end(self) -> None:
        """Runs when the thread ends."""
        try:
            while self._pieces:
                self._pieces[0].load.cancel()
                self._let_go()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    # -- the front ----------------------------------------------------------------------------------------

    def run(self, model: PreTrainedModel, tokens: torch.Tensor) -> tuple[DynamicCache, int, int]:
        """Compute until every block of the prefix is computed or loaded. ``tokens``: the prompt, ``[1, token]``.

        Returns a cache, the number of tokens in it, and how many of those were loaded.
        """
        most = tokens.shape[1] - 1
        cache = self.memory.growing()
        # The logits of all tokens would take more memory than their KV.
        only_last = {"logits_to_keep": 1} if cast(Any, model)._supports_logits_to_keep() else {}
        with torch.no_grad():
            for chunk in self._chunks():
                start, stop = chunk.start * self._tokens, min(chunk.stop * self._tokens, most)
                if start >= stop:
                    break
                self.memory.grow(cache, start)
                model(tokens[:, start:stop], past_key_values=cache, use_cache=True, **only_last)
                if self.memory.device.type == "cuda":  # else all chunks would be queued at once
                    torch.cuda.current_stream(self.memory.device).synchronize()
                self.computed.append((time.monotonic() - self._began, self._claimed * self._tokens))
        reached = min(self._claimed * self._tokens, most)
        again_if_interrupted(self.close)
        loaded = sum(min(self._tokens, most - i * self._tokens) for i, come in enumerate(self._loaded) if come)
        return self.memory.cache(reached), reached, loaded

    def _chunks(self) -> Iterator[range]:
        """The chunks to compute, each claimed. At the end all blocks before the claim are there."""
        while chunk := self._claim():
            yield chunk

    def _claim(self) -> range:
        waited = False
        with self._changed:
            while True:
                at = self._claimed
                while at < len(self._loaded) and self._loaded[at]:
                    at += 1
                self._claimed = at
                if at in self._copying:
                    self._changed.wait()
                    continue
                if at == len(self._loaded) or (self._ended and True not in self._loaded[at:]):
                    return range(0)
                chunk = self._chunk(at)
                if not waited and (most := self._patience(chunk)):
                    waited = True
                    self._changed.wait_for(partial(self._came_or_never, at), most)
                    continue
                self._claimed = chunk.stop
                for piece in list(self._pieces):
                    if self._unwanted(piece):
                        piece.load.cancel()
                return chunk

    def _chunk(self, at: int) -> range:
        """The blocks from ``at`` on that are computed together: up to the next one that has arrived or is being
        loaded."""
        stop = min(at + self._sizes.chunk, len(self._loaded))
        if at < self._bottom:
            stop = min(stop, self._bottom)
        here = (i for i in range(at + 1, stop) if self._loaded[i] or i in self._copying)
        return range(at, next(here, stop))

    def _came_or_never(self, block: int) -> bool:
        """Whether a block that was being loaded has arrived, or will not arrive. Requires the lock."""
        if self._loaded[block] or block in self._copying:
            return True
        return not any(block in piece.blocks for piece in self._pieces)

    def _patience(self, chunk: range) -> float:
        """Seconds to wait for a chunk that is being loaded; 0 if computing it is faster. Requires the lock."""
        if not self.arrived or self._came_or_never(chunk.start):
            return 0.0
        compute = self._seconds(chunk.start * self._tokens, chunk.stop * self._tokens) or 0.0
        each = (time.monotonic() - self._began) / self.arrived
        coming = sum(block >= chunk.start for piece in self._pieces for block in piece.blocks)
        return compute if coming * each < compute else 0.0

    # -- the end ------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the tail has loaded all that it can."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)

    def close(self) -> None:
        """Stop loading. Afterwards nothing is leased, and no thread writes into the memory."""
        with self._changed:
            self._stopped = True
            pieces = list(self._pieces)
        for piece in pieces:
            piece.load.cancel()
        if self._thread.ident is not None:  # the thread was started
            self._thread.join()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        again_if_interrupted(self.close)
