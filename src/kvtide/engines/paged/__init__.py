"""An engine's KV tensors as pages, and the copies between them and blocks, on a CPU or a GPU."""

from kvtide.engines.paged.mover import HostMover, Move, Mover
from kvtide.engines.paged.pages import Copy, Pages
from kvtide.engines.paged.select import mover

__all__ = ["Copy", "HostMover", "Move", "Mover", "Pages", "mover"]
