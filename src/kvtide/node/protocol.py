"""What a node and its clients say to each other over a unix socket; docs/protocol.md tells it for other languages.

A frame is a u32 length, little-endian, and that many bytes of MessagePack. A client sends ``Request``: a number and a
list of operations, all of one engine step. The node answers with one ``Reply``: the same number and an answer for each
operation, in order. Bytes of blocks never travel: an answer names slots by segment and offset, and file
descriptors of segments that the client does not have yet come along with the reply (SCM_RIGHTS).

A second connection of the same client carries *notices*, from the node only: ends of loads, drops and flushes, and
events.

Structures are arrays, tagged; unknown fields at the end are ignored, missing ones at the end have defaults, so that
neighbouring versions understand each other. Nothing is ever unpickled.
"""

from __future__ import annotations

import operator
import struct
from typing import Annotated, Any, Final, Literal, SupportsFloat, SupportsIndex

import msgspec

from kvtide.block import Group, Kind, Layout

__all__ = [
    "EXPECT",
    "FEATURES",
    "LARGEST",
    "LENGTH",
    "MINOR",
    "MINORS",
    "NO_TENANT",
    "OPERATIONS",
    "PROTOCOL",
    "TOKENS_FROM_START",
    "Answer",
    "Cancel",
    "Close",
    "Collect",
    "Collected",
    "Drop",
    "Ended",
    "Erase",
    "EventsLost",
    "Expect",
    "Expire",
    "Failure",
    "Fill",
    "Find",
    "Finish",
    "Flush",
    "Follow",
    "Forget",
    "Found",
    "GroupFields",
    "Hello",
    "Invite",
    "Join",
    "Joined",
    "Leave",
    "Load",
    "Match",
    "Matched",
    "Notice",
    "Open",
    "Operation",
    "Pin",
    "RawRequest",
    "Release",
    "Removed",
    "Reply",
    "Request",
    "Reserve",
    "Reserved",
    "Resign",
    "Slots",
    "Statistics",
    "Stored",
    "Unmapped",
    "Visit",
    "Welcome",
    "describe",
    "frame",
    "layout_of",
    "mismatch",
    "speaks",
    "whole",
]

PROTOCOL: Final = 1
"""The major version: what differs in it cannot be read by others."""
MINOR: Final = 1
"""The minor version: grows with every change that others can do without."""
MINORS: Final = (MINOR - 1, MINOR + 1)
"""Minor versions of others, of the same major one, that we work with: our neighbours."""
TOKENS_FROM_START: Final = "tokens from start"
"""The token ids of ``Reserve`` are those of its blocks alone, from ``start`` on, and not from the prompt's first."""
EXPECT: Final = "expect"
"""There is ``Expect``."""
FEATURES: Final = (TOKENS_FROM_START, EXPECT)
"""What we can do that others need not: it is done if both have said so."""
LENGTH = struct.Struct("<I")
LARGEST: Final = 16 << 20
"""A longer frame closes the connection."""
OPERATIONS: Final = 1000
"""So does one with more operations."""
GROUPS: Final = 64
"""Groups of a layout, at most."""
Numbers = Annotated[list[int], msgspec.Meta(max_length=1 << 14)]
"""Rights or ranks that one operation names: more than a session may have, and less than others would wait for."""
Word = Annotated[str, msgspec.Meta(max_length=256)]
"""What a node keeps of a client must not be long."""


class _Message(msgspec.Struct, array_like=True, gc=False):
    pass


# -- the beginning ------------------------------------------------------------------------------------------


class Hello(_Message, tag="hello"):
    """The first frame of each connection. The pidfd of the client's process comes with that of a client."""

    oldest: int
    newest: int
    version: Word
    token: Word = ""
    """Empty for a new client; that of its client for a connection for notices."""
    client: Word = ""
    """What the client calls itself, at this node and its successors: something random."""
    mapped: list[str] = []
    """Memory of earlier nodes that it still has, by name."""
    minor: int = 0
    """The client's minor version."""
    minors: tuple[int, int] = (0, 1)
    """The first and the last minor version of a node that the client works with."""
    features: Annotated[list[Word], msgspec.Meta(max_length=64)] = []
    """What the client can do, by name."""


class Welcome(_Message, tag="welcome"):
    """The node's answer to ``Hello``."""

    protocol: int
    version: str
    token: str
    deadline: float
    """The configuration's deadline of a load; 0: none."""
    tokens: bool
    """Whether ``Reserve`` should bring token ids."""
    largest: int
    """Bytes that one reservation should have at most."""
    life: str = ""
    """Of this node. Its memory is called ``life-segment`` in ``Hello`` and ``Unmapped``, by its successors too."""
    dram: int = 0
    """Bytes of DRAM that the node's blocks may take."""
    colder: bool = True
    """Whether the node has tiers below DRAM."""
    minor: int = 0
    """The node's minor version."""
    minors: tuple[int, int] = (0, 1)
    """The first and the last minor version of a client that the node works with."""
    features: list[str] = []
    """What the node can do, by name. What both can do is done."""


class Failure(_Message, tag="failure"):
    """An operation, or a hello, that could not be done: which error of ours, and its text."""

    kind: str
    text: str


# -- operations and their answers ---------------------------------------------------------------------------


class GroupFields(_Message):
    """A group of a layout, as ``kvtide.Group`` has it."""

    name: str
    kind: str
    layers: int
    heads: int
    head_dim: int
    dtype: str
    window: int
    page: int
    packing: str


class Open(_Message, tag="open"):
    """Begin a session of one model and tenant. Answer: its number."""

    groups: Annotated[list[GroupFields], msgspec.Meta(max_length=GROUPS)]
    block_tokens: int
    namespace: bytes
    tenant: bytes


class Close(_Message, tag="close"):
    """End a session, and all its rights. Answer: nil."""

    session: int


class Match(_Message, tag="match"):
    """The longest prefix of the blocks with these digests (32 bytes each). Answer: ``Matched``."""

    session: int
    digests: bytes
    have: int
    prefill: float | None = None
    """Tokens a second."""
    cost: tuple[float, float] | None = None
    """Instead of it: seconds of a token, and of a token for each one before it. A node that does not know of this goes
    by ``prefill``."""
    again: bool = False
    """Whether it is part of a use of these blocks that was counted before: nothing is counted then."""
    tokens: int = 0
    """Of the prompt, those after its last full block too; 0: unknown. For recordings."""
    record: bool = True
    """Whether it is a request of its own in a recording: see ``Session.match``."""


class Find(_Message, tag="find"):
    """Which of the blocks with these digests are there now, each by itself. Answer: ``Found``."""

    session: int
    digests: bytes


class Found(_Message, tag="found"):
    """Yes or no for each block, with all groups that are required."""

    blocks: list[bool]


class Slots(_Message):
    """Where blocks of one group lie; ``first`` is the number of the first in its prompt.

    ``places`` has 8 bytes for each, a number in little-endian order: the segment in the upper 24 bits, the offset in
    the lower 40.
    """

    first: int
    places: bytes


class Matched(_Message, tag="matched"):
    """A prefix is held. ``slots`` (by group) if all of it is in memory, and no workers were invited to read it."""

    holding: int
    blocks: int
    load_seconds: float
    compute_seconds: float | None
    counts: list[int]
    ready: bool
    pending: bool
    slots: list[Slots] | None
    held: int = -1
    """So many blocks of the prefix can be had from memory now. -1 from a node that does not say: all if it is ready."""
    slower: int = 0
    """Blocks after these that are in some tier, but quicker to compute."""


class Load(_Message, tag="load"):
    """Bring a holding to memory. Answer: a number, for ``Ended`` and ``Cancel``."""

    session: int
    holding: int
    deadline: float | None


class Cancel(_Message, tag="cancel"):
    """Nobody waits for a load any more. Answer: nil."""

    load: int


class Collect(_Message, tag="collect"):
    """What is in memory of a holding. Answer: ``Collected``."""

    session: int
    holding: int


class Collected(_Message, tag="collected"):
    """So many blocks of a holding's prompt can be had, from these slots, by group."""

    blocks: int
    slots: list[Slots]


class Release(_Message, tag="release"):
    """Holdings are given back: their memory is not looked at any more. Answer: nil."""

    session: int
    holdings: Numbers


class Reserve(_Message, tag="reserve"):
    """Slots for blocks ``start`` to ``stop`` of some groups. Answer: ``Reserved``.

    ``after`` is a reservation of the blocks before, which is written: it is sealed in between, when its blocks are kept
    from leaving already.
    """

    session: int
    groups: Annotated[list[int], msgspec.Meta(max_length=GROUPS)]
    digests: bytes
    start: int
    stop: int
    ttl: float | None
    priority: int
    tokens: bytes = b""
    after: int | None = None
    writers: Numbers = []
    """Ranks of workers. If there are any they fill it, not the client, and it is sealed when each has said so."""
    wait: bool = True
    """Whether to answer only when there is memory for all that will get some, or at once, with what there is."""


class Reserved(_Message, tag="reserved"):
    """Slots to be written; ``places`` as in ``Slots``."""

    reservation: int
    refused: int
    groups: list[int]
    """For each slot, the number of its group in the layout."""
    depths: list[int]
    """And of its block in the prompt."""
    places: bytes
    pending: int = 0
    """Blocks that are not here yet, and that two others are writing."""
    later: int = 0
    """Of those refused: blocks for which memory is just being taken from the system. Ask again."""


DropReason = Literal["memory", "late", "pages"]
"""Why an engine did not store blocks: the node had no memory for them in time, it answered too late, or too many of the
engine's pages would have had to wait for it."""


class Dropped(_Message, tag="dropped"):
    """An engine could not store blocks, which is counted. Answer: nil."""

    reason: DropReason
    blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class Finish(_Message, tag="finish"):
    """A reservation is written, or given up: its memory is not written any more. Answer: nil."""

    session: int
    reservation: int
    sealed: bool


# An engine of several processes: see workers.py.


class Invite(_Message, tag="invite"):
    """Let workers with this token, which the client has chosen, join a session of ``ranks`` ranks. Answer: nil."""

    session: int
    token: Word
    ranks: int


class Join(_Message, tag="join"):
    """Become a worker of another client's session. Answer: ``Joined``."""

    token: str
    rank: int


class Joined(_Message, tag="joined"):
    """The number of the worker, and what it is to work on."""

    member: int
    ranks: int
    groups: list[GroupFields]
    block_tokens: int


class Visit(_Message, tag="visit"):
    """A worker is going to read a holding of its session. Answer: ``Collected``."""

    member: int
    holding: int


class Fill(_Message, tag="fill"):
    """A worker is going to write its slice of a reservation of its session. Answer: ``Reserved``."""

    member: int
    reservation: int


class Leave(_Message, tag="leave"):
    """A worker does not use these holdings and reservations any more; ``good``: what it was to write is written.

    Answer: nil.
    """

    member: int
    rights: Numbers
    good: bool


class Resign(_Message, tag="resign"):
    """A worker leaves its session. Answer: nil."""

    member: int


class Pin(_Message, tag="pin"):
    """Pin or unpin blocks. Answer: how many."""

    session: int
    digests: bytes
    stop: int | None
    step: int


class Drop(_Message, tag="drop"):
    """Remove blocks for good. Answer: a number, for ``Ended``, which says how many there were."""

    session: int
    digests: bytes
    start: int


class Expire(_Message, tag="expire"):
    """Let blocks live ``ttl`` seconds from now on; None: for ever. Answer: a number, for ``Ended``, which says how many
    there were."""

    session: int
    digests: bytes
    start: int
    ttl: float | None


class Expect(_Message, tag="expect"):
    """A request with this prompt is over, and this is known of the prompt's next use. Answer: nil.

    For nodes with the feature ``EXPECT``.
    """

    session: int
    digests: bytes
    turn: Word = ""
    """How its turn ended: ``tool`` or ``end``; anything else says nothing."""
    returns_in: float | None = None
    """In how many seconds it is expected to be used again."""


class Flush(_Message, tag="flush"):
    """Answer: a number, for ``Ended`` when colder tiers have what they were given, which says what they have not.

    With ``blocks``, as (group, first, last + 1), of the prompt with these digests: when each of those is durable, or
    cannot become so. ``Cancel`` ends that earlier.
    """

    session: int = 0
    digests: bytes = b""
    blocks: Annotated[list[tuple[int, int, int]], msgspec.Meta(max_length=GROUPS)] = []


NO_TENANT = -1
"""Instead of a number of blocks that were forgotten: there is no such tenant."""


class Erase(_Message, tag="erase"):
    """Forget a tenant: destroy its keys, then its blocks. Answer: a number, for ``Ended``, whose count is
    NO_TENANT, beside a failure, if there is no such tenant."""

    tenant: bytes


class Unmapped(_Message, tag="unmapped"):
    """The client has let go of memory, of this node or an earlier one, by name. Answer: nil."""

    names: Annotated[list[Word], msgspec.Meta(max_length=1 << 16)]


class Statistics(_Message, tag="statistics"):
    """Answer: the statistics of the node's store and of the node, as a map (``node.statistics.Status``)."""


class Follow(_Message, tag="follow"):
    """Send ``Stored``, ``Removed`` and ``EventsLost``, or no longer. Answer: nil."""

    on: bool


class Forget(_Message, tag="forget"):
    """Nothing that was held over an earlier connection of this process is used any more. Answer: nil."""

    token: str


Operation = (
    Open
    | Close
    | Match
    | Find
    | Load
    | Cancel
    | Collect
    | Release
    | Reserve
    | Finish
    | Dropped
    | Pin
    | Drop
    | Flush
    | Erase
    | Statistics
    | Follow
    | Unmapped
    | Invite
    | Join
    | Visit
    | Fill
    | Leave
    | Resign
    | Forget
    | Expire
    | Expect
)


class Request(_Message):
    number: int
    operations: Annotated[list[Operation], msgspec.Meta(max_length=OPERATIONS)]


class RawRequest(_Message):
    """A request of which not every operation is understood: those that are can still be done."""

    number: int
    operations: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=OPERATIONS)]


Answer = Matched | Found | Collected | Reserved | Joined | Failure | int | dict[str, Any] | None


class Reply(_Message):
    number: int
    answers: list[Answer]
    segments: list[int] = []
    """Segments whose descriptors come with this frame, in order. A reply of number 0 brings more of them."""
    gone: list[int] = []
    """Segments that will not be named again: unmap them."""


# -- notices ------------------------------------------------------------------------------------------------


class Ended(_Message, tag="ended"):
    """A load, a drop or a flush is over; ``failure`` says why it did not go well."""

    number: int
    count: int = 0
    failure: str = ""
    held: int = -1
    """Of a load: so many blocks of the holding's prompt can be had from memory now. Of an erase: so many slots are held
    by somebody, and are zeroed when he lets go. -1: the node does not say."""
    written: int = -1
    """Of a flush: blocks in memory that colder tiers have, or blocks that are durable. -1: the node does not say."""
    unwritten: dict[str, int] = {}
    """How many they have not, by reason (``kvtide.Unwritten``)."""
    lost: dict[str, int] = {}
    """How many have left memory unwritten since the client's last flush, by reason."""
    failed: list[tuple[int, int, str]] = []
    """Blocks that are not durable, as (group, number in the prompt, reason)."""
    announced: bool = False
    """Of an erase: nothing of the tenant was found, and others who use the storage were told."""


class Stored(_Message, tag="stored"):
    tier: str
    keys: list[bytes]


class Removed(_Message, tag="removed"):
    tier: str
    keys: list[bytes]
    reason: str


class EventsLost(_Message, tag="lost"):
    """So many events were not sent: the client read too slowly."""

    count: int


Notice = Ended | Stored | Removed | EventsLost


def _plain(value: object) -> object:
    """What numpy has for a number is one to us too."""
    if isinstance(value, SupportsIndex):
        return operator.index(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise NotImplementedError(f"{value!r} is no number")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the socket."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def speaks(minor: int, minors: tuple[int, int]) -> bool:
    """Whether we work with somebody of that minor version, who works with those: one of the two must know the other."""
    return MINORS[0] <= minor <= MINORS[1] or minors[0] <= MINOR <= minors[1]


def mismatch(ours: str, theirs: str, majors: tuple[int, int], minors: tuple[int, int]) -> str:
    """What to say to those whose versions do not meet: ``ours`` and ``theirs`` are who we and they are."""
    if majors[0] == majors[1]:
        spoken = f"{majors[0]}.{minors[0]} to {majors[0]}.{minors[1]}"
    else:
        spoken = f"{majors[0]} to {majors[1]}"
    first, last = MINORS
    return (
        f"{ours} speaks protocol {PROTOCOL}.{first} to {PROTOCOL}.{last}, {theirs} {spoken}: run versions of kvtide "
        "that are at most one minor version apart; upgrade the older one"
    )


def whole(received: bytes | bytearray, size: int = -1) -> int:
    """Where the first frame ends; 0 if not all of it is there. ``size``: how much was received, if not all of it."""
    if size < 0:
        size = len(received)
    if size < LENGTH.size:
        return 0
    end: int = LENGTH.size + LENGTH.unpack_from(received)[0]
    return end if size >= end else 0


def describe(layout: Layout) -> list[GroupFields]:
    """A layout's groups, as ``Open`` carries them."""
    return [
        GroupFields(g.name, g.kind.value, g.layers, g.heads, g.head_dim, g.dtype, g.window, g.page, g.packing)
        for g in layout.groups
    ]


def layout_of(groups: list[GroupFields], block_tokens: int) -> Layout:
    """The layout that was described. Raises LayoutError or ValueError for what is none."""
    return Layout(
        tuple(
            Group(g.name, Kind(g.kind), g.layers, g.heads, g.head_dim, g.dtype, g.window, g.page, g.packing)
            for g in groups
        ),
        block_tokens,
    )
