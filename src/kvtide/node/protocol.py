"""The messages between a node and its clients over a unix socket; docs/protocol.md specifies them for other languages.

A frame is a u32 length, little-endian, and that many bytes of MessagePack. A client sends ``Request``: a number and a
list of operations, all of one engine step. The node sends one ``Reply``: the same number and an answer to each
operation, in order. The bytes of blocks are never sent: an answer names slots by segment and offset, and the file
descriptors of segments that the client does not have yet are sent with the reply (SCM_RIGHTS).

A second connection of the same client carries *notices*, from the node only: the ends of loads, drops and flushes, and
events.

Messages are tagged arrays; unknown fields at the end are ignored, missing ones at the end have defaults, so that
neighbouring versions understand each other. Nothing is ever unpickled.
"""

from __future__ import annotations

import operator
import struct
from typing import Annotated, Any, Final, Literal, SupportsFloat, SupportsIndex

import msgspec

from kvtide.block import Group, Kind, Layout

__all__ = [
    "ABSENT",
    "DESCRIBE",
    "DRAIN",
    "EXPECT",
    "EXPLAIN",
    "FEATURES",
    "LARGEST",
    "LENGTH",
    "MINOR",
    "MINORS",
    "NO_TENANT",
    "OPERATIONS",
    "PROTOCOL",
    "TOKENS_FROM_START",
    "Absent",
    "Answer",
    "Cancel",
    "Close",
    "Collect",
    "Collected",
    "Describe",
    "Drain",
    "Drop",
    "EndEarlierRights",
    "Ended",
    "EventsLost",
    "Expect",
    "Expire",
    "Explain",
    "Failure",
    "Fill",
    "Find",
    "Finish",
    "Flush",
    "Follow",
    "ForgetTenant",
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
    "Missed",
    "Models",
    "NotStored",
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
"""The major version: peers with different major versions cannot read each other's messages."""
MINOR: Final = 1
"""The minor version: incremented with every change that older peers can ignore."""
MINORS: Final = (MINOR - 1, MINOR + 1)
"""The oldest and the newest minor version, of the same major version, that this version works with: its neighbours."""
TOKENS_FROM_START: Final = "tokens from start"
"""The token ids of ``Reserve`` are those of its own blocks, from ``start`` on, and not from the prompt's first
block."""
EXPECT: Final = "expect"
"""The peer knows ``Expect``."""
ABSENT: Final = "absent"
"""The peer knows ``Absent`` and ``Missed``."""
EXPLAIN: Final = "explain"
"""The peer knows ``Explain``."""
DRAIN: Final = "drain"
"""The peer knows ``Drain``."""
DESCRIBE: Final = "describe"
"""The peer knows ``Describe``."""
FEATURES: Final = (TOKENS_FROM_START, EXPECT, ABSENT, EXPLAIN, DRAIN, DESCRIBE)
"""Optional features of this version. A feature is used if both peers announced it."""
LENGTH = struct.Struct("<I")
LARGEST: Final = 16 << 20
"""Maximum bytes of a frame; a longer one closes the connection."""
OPERATIONS: Final = 1000
"""Maximum number of operations of a request; more close the connection."""
GROUPS: Final = 64
"""Maximum number of groups of a layout."""
Numbers = Annotated[list[int], msgspec.Meta(max_length=1 << 14)]
"""Rights or ranks that one operation names: the limit is more than a session may have, and small enough that other
clients do not wait for it."""
Word = Annotated[str, msgspec.Meta(max_length=256)]
"""A short string: the node stores it for the client."""


class _Message(msgspec.Struct, array_like=True, gc=False):
    pass


# -- the beginning ------------------------------------------------------------------------------------------


class Hello(_Message, tag="hello"):
    """The first frame of each connection. With a new client's hello comes the pidfd of its process."""

    oldest: int
    newest: int
    version: Word
    token: Word = ""
    """Empty for a new client; for the connection that carries its notices, the token from its ``Welcome``."""
    client: Word = ""
    """A random name that the client chose, the same for this node and its successors."""
    mapped: list[str] = []
    """Names of the memory of earlier nodes that the client still has mapped."""
    minor: int = 0
    """The client's minor version."""
    minors: tuple[int, int] = (0, 1)
    """The oldest and the newest minor version of a node that the client works with."""
    features: Annotated[list[Word], msgspec.Meta(max_length=64)] = []
    """Names of the features that the client supports."""


class Welcome(_Message, tag="welcome"):
    """The node's answer to ``Hello``."""

    protocol: int
    version: str
    token: str
    deadline: float
    """The configured deadline of a load, in seconds; 0: none."""
    tokens: bool
    """Whether ``Reserve`` should include token ids."""
    largest: int
    """Maximum bytes that one reservation should have."""
    life: str = ""
    """Identifies this run of the node. Its memory is named ``life-segment`` in ``Hello`` and ``Unmapped``, also by its
    successors."""
    dram: int = 0
    """Bytes of DRAM that the node's blocks may use."""
    colder: bool = True
    """Whether the node has tiers below DRAM."""
    minor: int = 0
    """The node's minor version."""
    minors: tuple[int, int] = (0, 1)
    """The oldest and the newest minor version of a client that the node works with."""
    features: list[str] = []
    """Names of the features that the node supports. Those that both support are used."""
    describe: int = 0
    """Whether the client should send ``Describe`` for blocks that it matches or stores: 0: no; 1: with their digests
    alone; 2: with their token ids."""


class Failure(_Message, tag="failure"):
    """An operation, or a hello, that failed: the class name of the kvtide error, and its text."""

    kind: str
    text: str


# -- operations and their answers ---------------------------------------------------------------------------


class GroupFields(_Message):
    """The fields of a layout's group: see ``kvtide.Group``."""

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
    """Open a session of one model and tenant. Answer: its number."""

    groups: Annotated[list[GroupFields], msgspec.Meta(max_length=GROUPS)]
    block_tokens: int
    namespace: bytes
    tenant: bytes
    model: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""
    """A description of the model (``store/known_models.py``), for the answers to ``Models``; empty: it has none."""
    proof: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    """Made from the tenant's naming secret (``Tenant.proof``): past requests are explained only to sessions that were
    opened with the same bytes."""


class Close(_Message, tag="close"):
    """Close a session and end all its rights. Answer: nil."""

    session: int


class Match(_Message, tag="match"):
    """Find and lease the longest stored prefix of the blocks with these digests (32 bytes each). Answer:
    ``Matched``."""

    session: int
    digests: bytes
    have: int
    prefill: float | None = None
    """Prefill speed in tokens per second."""
    cost: tuple[float, float] | None = None
    """Prefill cost instead of ``prefill``: seconds per token, and seconds per token for each token before it. A node
    that does not know this field uses ``prefill``."""
    again: bool = False
    """Whether this use of the blocks was counted before: then nothing is counted."""
    tokens: int = 0
    """Tokens of the prompt, including those after its last full block; 0: unknown. For recordings."""
    record: bool = True
    """Whether it is a request of its own in a recording: see ``Session.match``."""
    request: Word = ""
    """The engine's name of the request, for ``Explain``."""


class Find(_Message, tag="find"):
    """Find which of the blocks with these digests are stored now, each by itself. Answer: ``Found``."""

    session: int
    digests: bytes


class Absent(_Message, tag="absent"):
    """Find out whether nothing is stored of the prompt with these blocks, nothing of it is being written, and nothing
    may be in shared storage. Nothing is counted. Answer: true or false. For nodes with the feature ``ABSENT``."""

    session: int
    digests: bytes


class Missed(_Message, tag="missed"):
    """The prompt with these blocks was absent and is computed: count and record it as a match that found nothing.
    ``tokens``: see ``Match``. Answer: None. For nodes with the feature ``ABSENT``."""

    session: int
    digests: bytes
    tokens: int = 0
    request: Word = ""
    """See ``Match``."""


class Found(_Message, tag="found"):
    """For each block, whether it is stored with all required groups."""

    blocks: list[bool]


class Slots(_Message):
    """Where blocks of one group are stored; ``first`` is the index of the first of them in its prompt.

    ``places`` has 8 bytes for each block, a number in little-endian order: the segment in the upper 24 bits, the offset
    in the lower 40.
    """

    first: int
    places: bytes


class Matched(_Message, tag="matched"):
    """A prefix lease was granted. ``slots`` (by group) are given if all blocks are in memory and no workers read
    them."""

    holding: int
    blocks: int
    load_seconds: float
    compute_seconds: float | None
    counts: list[int]
    ready: bool
    pending: bool
    slots: list[Slots] | None
    held: int = -1
    """Blocks of the prefix that are available in memory now. -1 from a node that does not say: all if ``ready``."""
    slower: int = 0
    """Blocks after the prefix that some tier has, but that are quicker to compute."""
    slower_load: float = 0.0
    """Estimated seconds to load those,"""
    slower_compute: float = 0.0
    """and to compute them."""


class Load(_Message, tag="load"):
    """Load a leased prefix into memory. Answer: a number, for ``Ended`` and ``Cancel``."""

    session: int
    holding: int
    deadline: float | None


class Cancel(_Message, tag="cancel"):
    """Cancel a load: no caller waits for it any more. Answer: nil."""

    load: int


class Collect(_Message, tag="collect"):
    """Ask which blocks of a leased prefix are in memory. Answer: ``Collected``."""

    session: int
    holding: int


class Collected(_Message, tag="collected"):
    """The number of available blocks of the leased prompt, and their slots by group."""

    blocks: int
    slots: list[Slots]


class Release(_Message, tag="release"):
    """Release prefix leases: their memory is not read any more. Answer: nil."""

    session: int
    holdings: Numbers


class Reserve(_Message, tag="reserve"):
    """Reserve slots for blocks ``start`` to ``stop`` of some groups. Answer: ``Reserved``.

    ``after`` is a reservation of the preceding blocks, which is completely written. The node seals it during this
    operation, after it has protected those blocks from eviction.
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
    """Ranks of workers. If there are any, they write the slots instead of the client, and the reservation is sealed
    when each worker has reported that it is done."""
    wait: bool = True
    """Whether the node answers only when it has memory for all blocks that will get some, or at once with what is
    available."""


class Reserved(_Message, tag="reserved"):
    """The slots to write; ``places`` as in ``Slots``."""

    reservation: int
    refused: int
    groups: list[int]
    """For each slot, the index of its group in the layout."""
    depths: list[int]
    """For each slot, the index of its block in the prompt."""
    places: bytes
    pending: int = 0
    """Blocks that are not stored yet and that two other clients are writing."""
    later: int = 0
    """Of the refused blocks, those for which memory is being taken from the system. Ask again."""


DropReason = Literal["memory", "late", "pages"]
"""Why an engine did not store blocks: the node had no memory for them in time, it answered too late, or too many of the
engine's pages would have had to wait for it."""


class NotStored(_Message, tag="dropped"):
    """Report blocks that an engine could not store; the node counts them. Answer: nil."""

    reason: DropReason
    blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class Finish(_Message, tag="finish"):
    """End a reservation, sealed or aborted: its memory is not written any more. Answer: nil."""

    session: int
    reservation: int
    sealed: bool


# Operations for an engine of several processes: see workers.py.


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
    """The number of the worker, and the layout of its session."""

    member: int
    ranks: int
    groups: list[GroupFields]
    block_tokens: int


class Visit(_Message, tag="visit"):
    """A worker starts to read a prefix lease of its session. Answer: ``Collected``."""

    member: int
    holding: int


class Fill(_Message, tag="fill"):
    """A worker starts to write its slice of a reservation of its session. Answer: ``Reserved``."""

    member: int
    reservation: int


class Leave(_Message, tag="leave"):
    """A worker does not use these leases and reservations any more; ``good``: it has written all that it was to write.

    Answer: nil.
    """

    member: int
    rights: Numbers
    good: bool


class Resign(_Message, tag="resign"):
    """A worker leaves its session. Answer: nil."""

    member: int


class Pin(_Message, tag="pin"):
    """Pin or unpin blocks. Answer: the number of blocks."""

    session: int
    digests: bytes
    stop: int | None
    step: int


class Drop(_Message, tag="drop"):
    """Remove blocks permanently. Answer: a number, for ``Ended``, which has the number of blocks found."""

    session: int
    digests: bytes
    start: int


class Expire(_Message, tag="expire"):
    """Let blocks expire ``ttl`` seconds from now; None: never. Answer: a number, for ``Ended``, which has the number of
    blocks found."""

    session: int
    digests: bytes
    start: int
    ttl: float | None


class Expect(_Message, tag="expect"):
    """Report that a request with this prompt has ended, and what is known about the prompt's next use. Answer: nil.

    For nodes with the feature ``EXPECT``.
    """

    session: int
    digests: bytes
    turn: Word = ""
    """How the request's turn ended: ``tool`` or ``end``; any other value has no meaning."""
    returns_in: float | None = None
    """Seconds until the prompt is expected to be used again."""


class Explain(_Message, tag="explain"):
    """Find out why each block of the prompt with these digests is a hit or a miss. Nothing is counted, used or held.
    ``prefill`` and ``cost``: see ``Match``. Answer: a map (``store.explanation.Explanation``). For nodes with the
    feature ``EXPLAIN``.

    With ``past``: of the past request with the name ``request``, or the last one if that is empty. ``digests`` have no
    meaning then, and the answer is nil if the node does not remember it."""

    session: int
    digests: bytes
    prefill: float | None = None
    cost: tuple[float, float] | None = None
    request: Word = ""
    past: bool = False


class Models(_Message, tag="models"):
    """Answer: a map whose ``models`` are the descriptions (see ``Open``) of the models of a tenant that sessions of the
    client's trust domain were opened for, the one used last first. For nodes with the feature ``EXPLAIN``."""

    tenant: bytes


class Describe(_Message, tag="describe"):
    """Tell what consecutive blocks of a prompt consist of, which depend on nothing but their tokens and those before
    them. The node publishes them in KV events. Answer: nil. For nodes with the feature ``DESCRIBE``."""

    session: int
    parent: bytes
    """The digest of the block before the first one; 32 zeros if there is none."""
    digests: bytes
    tokens: bytes = b""
    """As u32 little-endian; empty if the node does not want them."""


class Flush(_Message, tag="flush"):
    """Wait until the colder tiers have written what they were given. Answer: a number, for ``Ended``, which reports
    what was not written.

    With ``blocks``, as (group, first, last + 1), of the prompt with these digests: wait until each of these is durable,
    or cannot become durable. ``Cancel`` ends that earlier.
    """

    session: int = 0
    digests: bytes = b""
    blocks: Annotated[list[tuple[int, int, int]], msgspec.Meta(max_length=GROUPS)] = []


NO_TENANT = -1
"""Used instead of the number of forgotten blocks: there is no such tenant."""


class ForgetTenant(_Message, tag="erase"):
    """Forget a tenant: destroy its keys, then its blocks. Answer: a number, for ``Ended``, whose count is NO_TENANT,
    with a failure, if there is no such tenant."""

    tenant: bytes


class Drain(_Message, tag="drain"):
    """Leave the cluster of nodes, and write what is hot to shared storage; with ``resume``: be a member again. Answer:
    whether the node is in a cluster; how far it is, is in its statistics. For nodes with the feature ``DRAIN``."""

    resume: bool = False


class Unmapped(_Message, tag="unmapped"):
    """Report memory, of this node or an earlier one, that the client has unmapped, by name. Answer: nil."""

    names: Annotated[list[Word], msgspec.Meta(max_length=1 << 16)]


class Statistics(_Message, tag="statistics"):
    """Answer: the statistics of the node's store and of the node, as a map (``store.node_statistics.Status``)."""


class Follow(_Message, tag="follow"):
    """Start or stop sending ``Stored``, ``Removed`` and ``EventsLost``. Answer: nil."""

    on: bool


class EndEarlierRights(_Message, tag="forget"):
    """Nothing that was granted over an earlier connection of this process is used any more. Answer: nil."""

    token: str


Operation = (
    Open
    | Close
    | Match
    | Find
    | Absent
    | Missed
    | Load
    | Cancel
    | Collect
    | Release
    | Reserve
    | Finish
    | NotStored
    | Pin
    | Drop
    | Flush
    | ForgetTenant
    | Statistics
    | Follow
    | Unmapped
    | Invite
    | Join
    | Visit
    | Fill
    | Leave
    | Resign
    | EndEarlierRights
    | Expire
    | Expect
    | Explain
    | Models
    | Drain
    | Describe
)


class Request(_Message):
    number: int
    operations: Annotated[list[Operation], msgspec.Meta(max_length=OPERATIONS)]


class RawRequest(_Message):
    """A request with operations that are not decoded yet: valid ones can be executed even if others are invalid."""

    number: int
    operations: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=OPERATIONS)]


Answer = Matched | Found | Collected | Reserved | Joined | Failure | bool | int | dict[str, Any] | None


class Reply(_Message):
    number: int
    answers: list[Answer]
    segments: list[int] = []
    """Segments whose descriptors are sent with this frame, in order. A reply with number 0 brings more of them."""
    gone: list[int] = []
    """Segments that will not be named again: unmap them."""


# -- notices ------------------------------------------------------------------------------------------------


class Ended(_Message, tag="ended"):
    """A load, a drop or a flush has ended; ``failure`` is the reason if it failed."""

    number: int
    count: int = 0
    failure: str = ""
    held: int = -1
    """Of a load: blocks of the leased prompt that are available in memory now. Of an erase: slots that are still
    leased, and are zeroed when they are released. -1: the node does not say."""
    written: int = -1
    """Of a flush: blocks in memory that colder tiers have, or blocks that are durable. -1: the node does not say."""
    unwritten: dict[str, int] = {}
    """Of a flush: blocks that colder tiers do not have, by reason (``kvtide.Unwritten``)."""
    lost: dict[str, int] = {}
    """Blocks that left memory unwritten since the client's last flush, by reason."""
    failed: list[tuple[int, int, str]] = []
    """Blocks that are not durable, as (group, index in the prompt, reason)."""
    announced: bool = False
    """Of an erase: nothing of the tenant was found, and the other users of the storage were informed."""


class Stored(_Message, tag="stored"):
    tier: str
    keys: list[bytes]


class Removed(_Message, tag="removed"):
    tier: str
    keys: list[bytes]
    reason: str


class EventsLost(_Message, tag="lost"):
    """This many events were not sent, because the client read too slowly."""

    count: int


Notice = Ended | Stored | Removed | EventsLost


def _plain(value: object) -> object:
    """Converts numpy numbers to plain ones."""
    if isinstance(value, SupportsIndex):
        return operator.index(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise NotImplementedError(f"{value!r} is no number")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as it is sent over the socket."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def speaks(minor: int, minors: tuple[int, int]) -> bool:
    """Whether this version works with a peer of minor version ``minor`` that accepts ``minors``: one side's range must
    include the other's version."""
    return MINORS[0] <= minor <= MINORS[1] or minors[0] <= MINOR <= minors[1]


def mismatch(ours: str, theirs: str, majors: tuple[int, int], minors: tuple[int, int]) -> str:
    """The error text for incompatible versions: ``ours`` and ``theirs`` name this side and the peer."""
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
    """The end of the first frame; 0 if it is incomplete. ``size``: how many bytes were received, if not all of
    ``received``."""
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
    """The layout with these groups. Raises LayoutError or ValueError if they are invalid."""
    return Layout(
        tuple(
            Group(g.name, Kind(g.kind), g.layers, g.heads, g.head_dim, g.dtype, g.window, g.page, g.packing)
            for g in groups
        ),
        block_tokens,
    )
