"""The seconds and bytes of a prompt on given hardware: computing it, loading it, both at once, and decoding.

Every formula is in docs/planning.md, with its assumptions. Lengths are in tokens, and bytes are those of whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.block import Group, Kind
from kvtide.doctor.model import nbytes
from kvtide.plan.prefill import PrefillCost
from kvtide.sizing.hardware import Gpu, TransferLink
from kvtide.sizing.models import ModelShape

__all__ = ["ENGINES", "LONGEST", "Assumptions", "Host", "StorageTier"]

LONGEST = 1 << 24
"""The longest prompt, in tokens, for which a break-even is sought."""


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What no data sheet says. The first four are chosen to fit our measurements of Llama-3-8B on an H200; these are
    those of vLLM."""

    matmul: float = 0.64
    """The part of the GPU's operations per second that matrix products of a prompt reach."""
    attention: float = 0.61
    """The same for attention."""
    engine_seconds: float = 0.025
    """What an engine takes for a request besides its computing: scheduling, launches, sampling."""
    while_loading: float = 0.7
    """How fast a prompt is computed while the rest of it is loaded, as a part of its usual speed: it is computed in
    chunks then."""
    memory: float = 0.8
    """The part of the GPU's memory bandwidth that decoding reaches."""
    usable: float = 0.9
    """The part of the GPU's memory that weights and KV may take."""
    overlaps: bool = False
    """Whether the engine can compute the front of a prompt while the rest is loaded. vLLM cannot."""


ENGINES = {
    "vllm": Assumptions(),
    "transformers": Assumptions(matmul=0.5, attention=0.55, engine_seconds=0.030, overlaps=True),
}
"""The assumptions for engines."""


@dataclass(frozen=True)
class StorageTier:
    """A place for KV outside GPU memory."""

    name: str
    link: TransferLink
    count: int = 1
    """How many of them are read in parallel: drives, ports."""
    capacity: float | None = None
    """Bytes; None: not limited."""

    @property
    def speed(self) -> float:
        return self.link.speed * self.count


@dataclass(frozen=True)
class Host:
    """A model on some GPUs of one host. Tensor parallelism divides work, weights and KV heads among them."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    bus: TransferLink
    """Each GPU has one."""
    cost: PrefillCost
    assume: Assumptions = field(default_factory=Assumptions)

    @staticmethod
    def prefill(shape: ModelShape, gpu: Gpu, gpus: int, assume: Assumptions) -> PrefillCost:
        """The cost of a prompt from the model's operations and the GPUs' operations per second."""
        flops = gpu.flops * gpus
        return PrefillCost(
            shape.token_flops / (flops * assume.matmul), shape.context_flops / (flops * assume.attention)
        )

    def compute(self, tokens: int) -> float:
        """Seconds to compute a prompt."""
        return self.cost.seconds(0, tokens)

    def kv(self, tokens: int) -> int:
        """Bytes of a prefix that a load reads."""
        return nbytes(self.shape.layout, tokens)

    def stored(self, tokens: int) -> int:
        """Bytes of a prefix that a tier keeps: more than ``kv`` with windows and states, of which it has every block's,
        so that any part of the prefix can be found, until the policy evicts them."""
        layout = self.shape.layout
        return -(-tokens // layout.block_tokens) * sum(each.footprint for each in layout.geometry.values())

    def kv_on_gpus(self, tokens: int) -> float:
        """Bytes of a prefix in the memory of all GPUs: what cannot be divided is in each of them."""
        layout = self.shape.layout
        blocks = -(-tokens // layout.block_tokens)
        return sum(
            len(g.needs(blocks, layout.block_tokens)) * layout.geometry[g.name].footprint * self._copies(g)
            for g in layout.groups
        )

    def _copies(self, group: Group) -> float:
        return self.gpus if group.kind is Kind.MLA else max(1.0, self.gpus / group.heads)

    def load(self, tokens: int, tier: StorageTier) -> float:
        """Seconds to load a prefix: read once from the tier, and over the bus of every GPU what that GPU needs."""
        return max(self.kv(tokens) / tier.speed, self.kv_on_gpus(tokens) / (self.bus.speed * self.gpus))

    def speed(self, tokens: int, tier: StorageTier) -> float:
        """Bytes of KV per second at which a prefix of that length is loaded."""
        return self.kv(tokens) / self.load(tokens, tier)

    def decode(self, tokens: int, tier: StorageTier | None = None) -> float:
        """Seconds to generate one token for one request, reading weights and all KV; KV from the tier, if one is
        given, and else from GPU memory."""
        memory = self.gpu.bandwidth * self.gpus * self.assume.memory
        weights = self.shape.step_weights / memory
        return weights + (self.kv_on_gpus(tokens) / memory if tier is None else self.load(tokens, tier))

    def first_token(self, tokens: int, seconds: float, found: bool) -> float:
        """The time to the first token if the prompt's KV is there after ``seconds``; if it was ``found``, one more
        token has to be computed."""
        return self.assume.engine_seconds + seconds + (self.decode(tokens) if found else 0.0)

    def both(self, tokens: int, tier: StorageTier) -> tuple[float, int]:
        """Seconds for computing from the front while loading from the back, and the tokens that are loaded.

        Computing begins at the front, where tokens are cheapest; what is loaded are the last tokens.
        """
        layout = self.shape.layout
        block = layout.block_tokens
        blocks = -(-tokens // block)
        fronts = np.arange(blocks + 1)
        computed = np.minimum(fronts * block, tokens)
        compute = self.cost.per_token * computed + self.cost.per_token_context * computed.astype(np.float64) ** 2 / 2
        once, copied = self._after(fronts, blocks)
        compute[:-1] /= self.assume.while_loading  # but for the last place, where nothing is loaded
        load = np.maximum(once / tier.speed, copied / (self.bus.speed * self.gpus))
        best = int(np.argmin(np.maximum(compute, load)))
        return float(max(compute[best], load[best])), tokens - int(computed[best])

    def _after(
        self, fronts: npt.NDArray[np.int64], blocks: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """For each number of blocks in front that are computed, the bytes that a prefix of ``blocks`` needs after
        them: stored once, and on all GPUs."""
        layout = self.shape.layout
        once, copied = np.zeros(len(fronts)), np.zeros(len(fronts))
        for group in layout.groups:
            needed = group.needs(blocks, layout.block_tokens)
            count = np.clip(needed.stop - np.maximum(fronts, needed.start), 0, None)
            part = count * float(layout.geometry[group.name].footprint)
            once += part
            copied += part * self._copies(group)
        return once, copied

    def break_even(self, tier: StorageTier) -> int | None:
        """The length in tokens, in whole blocks, from which on loading is at least as fast as computing. None: not up
        to ``LONGEST``.

        A token costs more to compute the later it comes, and never more to load: there is one such length.
        """
        block = self.shape.layout.block_tokens
        low, high = 0, LONGEST // block
        if self.load(high * block, tier) > self.compute(high * block):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self.load(middle * block, tier) <= self.compute(middle * block):
                high = middle
            else:
                low = middle
        return high * block

    def break_even_speed(self, tokens: int) -> float:
        """Bytes of KV per second at which loading a prompt of that length is as fast as computing it."""
        return self.kv(tokens) / self.compute(tokens)

    @property
    def kv_memory(self) -> float:
        """Bytes for KV in the memory of all GPUs; negative: the weights do not fit."""
        return self.gpu.memory * self.gpus * self.assume.usable - self.shape.weights

    def fit_in_gpu(self, tokens: int) -> int:
        """How many contexts of that length fit in GPU memory."""
        return max(0, math.floor(self.kv_memory / self.kv_on_gpus(tokens)))

    def fit(self, tokens: int, tier: StorageTier) -> int | None:
        """How many contexts of that length fit in the tier; None: not limited."""
        return None if tier.capacity is None else math.floor(tier.capacity / self.stored(tokens))
