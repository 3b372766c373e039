"""Basic types: what a block is, and its layout in bytes. Imports only the canonical encoding, argument checks and
errors of this package.

A *block* is the KV of a fixed number of tokens for one *group* of layers. Its bytes are in canonical order,
``[layer][K|V][head][page]``, so that engines of any tensor-parallel size can read each other's blocks. One layer's K
(or V, or latent, or state) is a *section*: the smallest part that can be read and verified alone. Sections are padded
to 4 KiB, in memory and on disk alike, so that direct I/O moves them without a copy; for the usual models the padding is
zero.

Within a head, the bytes are in the group's *packing*. Those in ``LOSSY`` keep less than the engine computed; their
sizes are known here, and their encoding is in ``engines/paged/lossy.py``. Their keys and values may differ in size, so
a section has both of a layer, ``[head][K|V]``, and the heads of a rank are one contiguous range of bytes as in other
packings. Any other packing but "plain" is specific to an engine, and its size follows from its dtype.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass, field
from typing import NewType

from blake3 import blake3

from kvtide import arguments, canonical
from kvtide.errors import LayoutError

__all__ = [
    "ALIGN",
    "BLOCK_TOKENS",
    "DIGEST",
    "DTYPES",
    "LOSSY",
    "BlockKey",
    "Geometry",
    "Group",
    "Kind",
    "Layout",
    "Slice",
    "Span",
    "padded",
    "run_of",
]

ALIGN = 4096
"""Direct I/O works in units of this many bytes, in memory and on the device."""

BlockKey = NewType("BlockKey", bytes)
"""``DIGEST`` bytes that identify tokens and model, then the name of the group."""
DIGEST = 32

Span = memoryview
"""Memory that a tier may read or write: bytes, contiguous, aligned to ``ALIGN``."""

BLOCK_TOKENS = 256
"""Default number of tokens in a block."""

DTYPES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


LOSSY = {"fp8": (8, 8), "k8v4": (8, 4), "r4": (4, 4)}
"""The lossy packings, with the bits of their codes: of keys, and of values."""

_RUN, _SHORTEST = 64, 16
"""Maximum and minimum number of codes that share a scale."""
_LARGEST = 1 << 40
"""Maximum of every number of a group: no block has so many bytes."""
_PACKING = 64
"""Maximum length of a packing's name."""


def run_of(head_dim: int) -> int:
    """Number of codes of a lossy packing that share a scale, for vectors of length ``head_dim``: a power of two."""
    return math.gcd(head_dim, _RUN)


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


class Kind(enum.Enum):
    """What a group's layers store, which decides the blocks that a prefix needs."""

    FULL = "full"
    """Keys and values of every token. A prefix needs all its blocks."""
    MLA = "mla"
    """One latent vector per token, the same on every rank. A prefix needs all its blocks."""
    WINDOW = "window"
    """Keys and values of the last ``window`` tokens. A prefix needs the blocks that cover those. Tokens further back
    than that from a block's end may be zeros: an engine has discarded them by then."""
    STATE = "state"
    """A state of fixed size at the block's end (Mamba, linear attention). A prefix needs the last one."""
    DRAFT = "draft"
    """Keys and values of a draft model. Their absence never prevents a hit on the target."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The heads of a block that one rank writes."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The byte layout of a block: ``sections`` parts of ``section`` bytes, ``stride`` apart."""

    sections: int
    section: int
    stride: int = field(init=False)
    nbytes: int = field(init=False)
    """Bytes as an engine sees them, without padding."""
    footprint: int = field(init=False)
    """Bytes of a block in memory, with padding."""

    def __post_init__(self) -> None:
        set_once = object.__setattr__
        set_once(self, "stride", padded(self.section))
        set_once(self, "nbytes", self.sections * self.section)
        set_once(self, "footprint", self.sections * self.stride)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table and a rule for prefixes.

    ``heads`` and ``head_dim`` are the whole model's, before any tensor parallelism. For MLA ``heads`` is 1 and
    ``head_dim`` the latent width; for a state ``head_dim`` is the number of elements per head.
    """

    name: str
    kind: Kind
    layers: int
    heads: int
    head_dim: int
    dtype: str
    window: int = 0
    page: int = 16
    packing: str = "plain"

    def __post_init__(self) -> None:
        for fact in ("name", "dtype", "packing"):
            arguments.text(getattr(self, fact), f"{fact} of a group")
        arguments.kind(self.kind, Kind, f"kind of group {self.name!r}")
        for fact in ("layers", "heads", "head_dim", "window", "page"):  # Python's own integers are hashed and sent
            object.__setattr__(self, fact, arguments.integer(getattr(self, fact), f"{fact} of group {self.name!r}"))
        if not (self.name.isascii() and self.name.isidentifier() and len(self.name) <= 16):
            raise LayoutError(f"group name {self.name!r}: use a letter and then letters, digits or _, 16 at most")
        if self.dtype not in DTYPES:
            raise LayoutError(f"group {self.name!r}: dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        for fact in ("layers", "heads", "head_dim", "page"):
            if getattr(self, fact) < 1:
                raise LayoutError(f"group {self.name!r}: {fact} is {getattr(self, fact)}, not positive")
        for fact in ("layers", "heads", "head_dim", "window", "page"):
            if getattr(self, fact) > _LARGEST:
                raise LayoutError(f"group {self.name!r}: {fact} is {getattr(self, fact)}, more than any model has")
        if self.window < 0 or (self.kind is Kind.WINDOW) != (self.window > 0):
            raise LayoutError(f"group {self.name!r}: a window goes with Kind.WINDOW, and only with it")
        if self.kind is Kind.MLA and self.heads != 1:
            raise LayoutError(f"group {self.name!r}: MLA has one latent head, not {self.heads}")
        if len(self.packing) > _PACKING:
            raise LayoutError(f"group {self.name!r}: the packing's name has {len(self.packing)} letters of {_PACKING}")
        if self.lossy:
            self._check_lossy()

    def _check_lossy(self) -> None:
        what = f"group {self.name!r}: packing {self.packing!r}"
        if self.parts != 2:
            raise LayoutError(f"{what} is for keys and values; a group of kind {self.kind.value!r} has none")
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise LayoutError(f"{what} is for float32, float16 and bfloat16; {self.dtype} is small already")
        if self.head_dim % _SHORTEST:
            raise LayoutError(f"{what} needs a head_dim that is a multiple of {_SHORTEST}, not {self.head_dim}")

    @property
    def parts(self) -> int:
        """Number of tensors per layer in an engine: K and V, or only one."""
        return 1 if self.kind in (Kind.MLA, Kind.STATE) else 2

    @property
    def lossy(self) -> bool:
        """Whether the packing keeps less than the engine computed."""
        return self.packing in LOSSY

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a section: of the engine's dtype, or of a code."""
        return 1 if self.lossy else DTYPES[self.dtype]

    @property
    def suffix(self) -> bytes:
        """The suffix of the key of every block of this group."""
        return self.name.encode()

    @property
    def required(self) -> bool:
        """Whether a prefix without this group's blocks is useless."""
        return self.kind is not Kind.DRAFT

    def head_bytes(self, tokens: int) -> int:
        """Bytes of one head in one section."""
        if self.lossy:
            codes, scales = self.head_dim * sum(LOSSY[self.packing]) // 8, 2 * self.head_dim // run_of(self.head_dim)
            return tokens * (codes + 2 * scales)  # a scale is a bfloat16 number
        per_token = self.head_dim * DTYPES[self.dtype]
        return per_token if self.kind is Kind.STATE else per_token * tokens

    def geometry(self, tokens: int) -> Geometry:
        """The byte layout of a block of ``tokens`` tokens of this group."""
        sections = self.layers * (1 if self.lossy else self.parts)
        return Geometry(sections, self.heads * self.head_bytes(tokens))

    def needs(self, blocks: int, tokens: int, have: int = 0) -> range:
        """The blocks that a prefix of ``blocks`` blocks of ``tokens`` tokens needs, after the first ``have``."""
        match self.kind:
            case Kind.WINDOW:
                first = blocks - -(-self.window // tokens)
            case Kind.STATE:
                first = blocks - 1
            case _:
                first = 0
        return range(max(0, have, first), blocks)

    def slices(self, ranks: int) -> tuple[Slice, ...]:
        """The heads that each rank writes when ``ranks`` ranks share the model: one writer for each slice.

        With more ranks than heads, several ranks have the same heads; the lowest of them writes. The latent of MLA is
        the same on all ranks, so rank 0 writes it.
        """
        if self.kind is Kind.MLA:
            return (Slice(0, 0, 1),)
        few, many = sorted((ranks, self.heads))
        if ranks < 1 or many % few:
            raise LayoutError(f"group {self.name!r}: {self.heads} heads cannot be cut for {ranks} ranks")
        each, copies = max(1, self.heads // ranks), max(1, ranks // self.heads)
        return tuple(Slice(i * copies, i * each, (i + 1) * each) for i in range(self.heads // each))

    def share(self, rank: int, ranks: int) -> Slice:
        """The heads that a rank has, with the rank that writes them."""
        slices = self.slices(ranks)
        return slices[rank * len(slices) // ranks]


LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """How the KV of one model is divided into blocks. Equal layouts have equal digests, on every host."""

    groups: tuple[Group, ...]
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(arguments.items(self.groups, Group, "groups")))
        object.__setattr__(self, "block_tokens", arguments.integer(self.block_tokens, "block_tokens"))
        names = [g.name for g in self.groups]
        if not names:
            raise LayoutError("a layout needs at least one group")
        if len(set(names)) != len(names):
            raise LayoutError(f"two groups have one name: {names}")
        if not any(g.required for g in self.groups):
            raise LayoutError("a layout of draft groups alone can never be a hit: add the target's group")
        if not 1 <= self.block_tokens <= _LARGEST:
            raise LayoutError(f"block_tokens is {self.block_tokens}, not positive, or more than any prompt has")
        for g in self.groups:
            if self.block_tokens % g.page:
                raise LayoutError(
                    f"block_tokens = {self.block_tokens} is not a multiple of group {g.name!r}'s page of {g.page}"
                )

    @classmethod
    def attention(
        cls,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        block_tokens: int = BLOCK_TOKENS,
        page: int = 16,
        packing: str = "plain",
    ) -> Layout:
        """The layout of a model with full attention in every layer (``heads`` counts KV heads)."""
        full = Group("full", Kind.FULL, layers, heads, head_dim, dtype, page=page, packing=packing)
        return cls((full,), block_tokens)

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that differ whenever two layouts' bytes could be confused."""
        groups: list[canonical.Value] = [
            [
                g.name,
                g.kind.value,
                g.layers,
                g.heads,
                g.head_dim,
                g.dtype,
                g.window,
                g.page,
                g.packing,
            ]
            for g in self.groups
        ]
        body = canonical.encode([LAYOUT_VERSION, self.block_tokens, groups])
        return blake3(body, derive_key_context="kvtide 1 layout").digest(16)

    @functools.cached_property
    def geometry(self) -> dict[str, Geometry]:
        """The byte layout of a block of each group, by the group's name."""
        return {g.name: g.geometry(self.block_tokens) for g in self.groups}

    def group(self, name: str) -> Group:
        for g in self.groups:
            if g.name == name:
                return g
        raise LayoutError(f"no group {name!r}; this layout has {', '.join(g.name for g in self.groups)}")
