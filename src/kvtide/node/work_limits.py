"""Limits on the work that a client may request at a time, counted in units, so that no client waits long for another's
request.

A node serves all clients in one thread. A unit is the cost of looking up one block of one group, about half a
microsecond; all other work is counted in these. A client's requests are executed in turns of ``TURN`` units: then the
other clients have their turns, also between two operations of one request.

One operation names at most ``BLOCKS`` blocks of all groups together. Operations that cost much more per block (pins,
drops, loads) are executed in slices, with turns of other clients between them, and a reservation, which cannot be
divided, has at most ``RESERVED`` blocks. All operations of one request have ``FRAME`` units together, which also limits
the size of its reply.
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
"""Units that all operations of one request may take together, unless it has only one."""
BLOCKS: Final = 1 << 17
"""Maximum number of blocks of all groups together that one operation may name."""
MOVE: Final = 16
"""Units for a block that is reserved, sealed, loaded, pinned or dropped."""
RESERVED: Final = BLOCKS // MOVE
"""Maximum number of blocks of all groups together in one reservation; more are refused, as if there were no space."""
SLICE: Final = TURN // MOVE
"""Blocks of all groups together that are loaded, pinned or dropped before the other clients have their turns."""
STEP: Final = 1 << 10
"""Units up to which the end of the turn is not checked: they are too few to matter."""
MESSAGE: Final = 64
"""Units for each frame."""
DECODED: Final = 256
"""Bytes of a frame that count as a unit, because they must be decoded."""
NUMBERS: Final = 16
"""Bytes of an operation in a long frame that count as a unit: they may be a list of numbers of one byte each."""
OPERATION: Final = 16
"""Units for each operation, besides those for its blocks."""
PAUSE: Final = -1
"""Yielded by a step instead of units when it waits for memory that is being taken from the system: continue a little
later. Other clients are served meanwhile, and this client's next requests wait."""
GROUP: Final = 64
"""Units for each group of a layout that is opened or described."""
ANSWER_BYTES: Final = 8
"""Bytes of an answer that count as a unit: the address of one block has that many."""
