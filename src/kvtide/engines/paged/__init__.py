"""An engine's KV tensors as pages, and the copies between them and blocks, on a CPU or a GPU."""

from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.paged.memory import address
from kvtide.engines.paged.mover import HostMover, Move, Mover
from kvtide.engines.paged.pages import Copy, Pages, runs

__all__ = ["Copy", "HostMover", "Move", "Mover", "Pages", "address", "mover", "runs"]
