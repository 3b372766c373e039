"""Chooses which of several nodes to read each block of a prompt from.

Each node has a cost that does not depend on the number of blocks (a round trip, what is queued there, perhaps a new
connection), and one for each block. So the blocks are given to the node that is cheapest for each block it can take,
then the rest to the next one: that keeps a prompt together on few nodes, unless those are much slower than others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

__all__ = ["assign_blocks"]

N = TypeVar("N", bound=Hashable)


def assign_blocks(holders: Sequence[Sequence[N]], seconds: Callable[[N, int], float], most: int) -> dict[N, list[int]]:
    """The blocks, by their number in ``holders``, that each chosen node is to be asked for, of ``most`` nodes at most.

    ``holders`` has the nodes of each block, and ``seconds`` the expected time to read that many blocks from a node. A
    block is given to one node, or to none if no chosen one has it. A node that takes for ever is not chosen.
    """
    left = {number: nodes for number, nodes in enumerate(holders) if nodes}
    chosen: dict[N, list[int]] = {}
    while left and len(chosen) < most:
        counts = Counter(node for nodes in left.values() for node in dict.fromkeys(nodes))
        best = min(counts, key=lambda node: seconds(node, counts[node]) / counts[node])
        if math.isinf(seconds(best, counts[best])):
            break
        chosen[best] = [number for number, nodes in left.items() if best in nodes]
        for number in chosen[best]:
            del left[number]
    return chosen
