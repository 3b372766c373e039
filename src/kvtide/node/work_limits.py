"""How much work a client may ask of the node at a time, counted in units, so that nobody waits for another's request.

A node serves all clients in one thread. A unit is what it costs to look up one block of one group, about half a
microsecond; everything else is counted in these. What a client sends is done in turns of ``TURN`` units: then the other
clients have theirs, between two operations of one request too. One operation names at most ``BLOCKS`` blocks of all
groups together. Those that cost much more for each block (pins, drops, loads) are done in slices, with turns between
them, and a reservation, which cannot be cut, has at most ``RESERVED`` blocks. All operations of one request have
``FRAME`` units together, which also bounds the size of its reply.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ANSWER_BYTES",
    "BLOCKS",
    "DECODED",
    "FRAME",
    "GROUP",
    "MESSAGE",
    "MOVE",
    "NUMBERS",
    "OPERATION",
    "PAUSE",
    "RESERVED",
    "SLICE",
    "TURN",
]

TURN: Final = 1 << 14
"""Units of one client after which the others are served."""
FRAME: Final = 1 << 19
"""Units that all operations of one request have together, unless it has only one."""
BLOCKS: Final = 1 << 17
"""Blocks of all groups together that one operation may name."""
MOVE: Final = 16
"""Units of a block that is reserved, sealed, loaded, pinned or dropped."""
RESERVED: Final = BLOCKS // MOVE
"""Blocks of all groups together that one reservation may have; those beyond are refused, as if there were no room."""
SLICE: Final = TURN // MOVE
"""Blocks of all groups together that are loaded, pinned or dropped before the others have their turn."""
STEP: Final = 1 << 10
"""Units that are too few to ask whether the turn is over."""
MESSAGE: Final = 64
"""Units of each frame."""
DECODED: Final = 256
"""Bytes of a frame that count as a unit, because they must be decoded."""
NUMBERS: Final = 16
"""Bytes of an operation in a long frame that count as a unit: they may be a list of numbers of one byte each."""
OPERATION: Final = 16
"""Units of each operation, besides those of its blocks."""
PAUSE: Final = -1
"""What a step says instead of units, when it waits for memory that is being taken: go on a little later. Others are
served meanwhile, and this client's next requests wait."""
GROUP: Final = 64
"""Units of each group of a layout that is opened or described."""
ANSWER_BYTES: Final = 8
"""Bytes of an answer that count as a unit: what tells where one block lies has so many."""
