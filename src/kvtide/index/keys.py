"""Derives block keys from tokens.

A key is a chained hash: each block's digest covers its parent's, so one key identifies every token before it. The hash
is keyed with a key derived from the tenant's naming secret and the namespace (model, weights, dtype, layout, adapter,
fidelity, tenant), so that blocks of another model or tenant cannot be requested even by accident. Nothing here depends
on the process, the host, PYTHONHASHSEED or an engine's own hashes.

The hash input of a block: parent digest (32 bytes), u32 token count, the tokens as u32 little-endian, then each extra
that overlaps the block, sorted: kind, value (both length-prefixed, type-tagged) and its start and stop, as two i64
little-endian counted from the block's first token (negative if an image began in an earlier block).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide import arguments, canonical
from kvtide.block import BlockKey, Layout
from kvtide.errors import LayoutError

__all__ = ["DEFAULT_TENANT", "EXACT", "Chain", "Extra", "Model", "Namer", "Tenant", "Tokens", "parse_tag"]

Tokens = Sequence[int] | npt.NDArray[np.uint32] | memoryview | array  # type: ignore[type-arg]
"""Token ids: a list must be converted (about 16 ns a token); a uint32 buffer is used as it is."""

ROOT = bytes(32)
EXACT = "exact"
"""The fidelity of blocks that are bit for bit what an engine computed."""
FOREVER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of blocks. Two tenants' names for the same tokens have nothing in common.

    ``secret`` names blocks; it encrypts nothing and is never rotated, only destroyed.
    """

    name: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        arguments.text(self.name, "a tenant's name")
        arguments.kind(self.secret, bytes, f"the secret of tenant {self.name!r}")
        if len(self.secret) < 32:
            raise LayoutError(
                f"tenant {self.name!r}: a naming secret of {len(self.secret)} bytes can be guessed; use 32 or more"
            )

    @property
    def tag(self) -> bytes:
        """16 opaque bytes that mark this tenant's blocks at rest."""
        return blake3(self.secret, derive_key_context="kvtide 1 tenant").digest(16)

    @property
    def proof(self) -> bytes:
        """16 bytes that only those with the secret can make, and from which nothing else follows: with these a store
        tells a caller of the tenant's past requests, as the tag is no secret."""
        return blake3(self.secret, derive_key_context="kvtide 1 past requests").digest(16)


DEFAULT_TENANT = Tenant("", b"kvtide: the tenant of those who named none")


def parse_tag(text: str) -> bytes:
    """A tenant's tag from settings and commands: 32 hexadecimal digits, or ``default``. Raises ValueError."""
    tag = DEFAULT_TENANT.tag if text == "default" else bytes.fromhex(text)
    if len(tag) != 16:
        raise ValueError(f"{text!r} is not a tag of 32 hexadecimal digits")
    return tag


@dataclass(frozen=True)
class Model:
    """Everything that decides the bytes of a block, besides its tokens.

    ``weights`` is a weights identity (see ``Store.weights``); ``config`` the model's configuration after overrides, as
    plain values; ``scales`` the scales of the KV dtype. ``fidelity`` is "exact" or the name of a lossy form, which is a
    different block and is never returned for an exact request.
    """

    layout: Layout
    weights: str
    config: Mapping[str, canonical.Value] = field(default_factory=dict)
    scales: bytes = b""
    adapter: str = ""
    fidelity: str = EXACT

    def __post_init__(self) -> None:
        arguments.kind(self.layout, Layout, "layout")
        for name in ("weights", "adapter", "fidelity"):
            arguments.text(getattr(self, name), name)
        arguments.kind(self.scales, bytes, "scales")
        if not self.weights:
            raise LayoutError(
                "a model needs a weights identity: blocks of other weights must never be taken for its own"
            )
        lossy = next((g for g in self.layout.groups if g.lossy), None)
        if lossy is not None and self.fidelity == EXACT:
            raise LayoutError(
                f"group {lossy.name!r} is packed as {lossy.packing!r}, which is lossy, but the model's fidelity is "
                f"'exact': give it fidelity={lossy.packing!r}"
            )

    def namespace(self, tenant: Tenant = DEFAULT_TENANT) -> bytes:
        """32 bytes that are equal only where blocks may be shared."""
        body = canonical.encode(
            {
                "layout": self.layout.digest,
                "weights": self.weights,
                "config": self.config,
                "scales": self.scales,
                "adapter": self.adapter,
                "fidelity": self.fidelity,
                "tenant": tenant.tag,
            }
        )
        return blake3(body, derive_key_context="kvtide 1 namespace").digest()

    def namer(self, tenant: Tenant = DEFAULT_TENANT) -> Namer:
        """The namer with the derived naming key, which a session gets instead of the tenant's secret."""
        key = blake3(tenant.secret + self.namespace(tenant), derive_key_context="kvtide 1 name").digest()
        return Namer(key, self.layout.block_tokens)


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides token ids on which the KV of tokens ``start`` to ``stop`` depends.

    ``Extra("lora", name)`` applies to the whole prompt; ``Extra("image", digest, 100, 676)`` to an image's placeholder
    tokens; ``Extra("salt", s, 0, 1)`` to the first block and, through the chain, to all after it.
    """

    kind: str
    value: bytes | str | int
    start: int = 0
    stop: int = FOREVER

    def __post_init__(self) -> None:
        for name in ("start", "stop"):  # also integers of other libraries: Python's own are hashed
            object.__setattr__(self, name, arguments.integer(getattr(self, name), f"{name} of an extra"))
        if not 0 <= self.start < self.stop <= FOREVER:
            raise LayoutError(f"extra {self.kind!r} covers no token: {self.start} to {self.stop}")
        if not isinstance(self.kind, str) or not isinstance(self.value, bytes | str | int):
            raise LayoutError(f"extra {self.kind!r}: a value is bytes, str or int, not {type(self.value).__name__}")
        try:
            canonical.encode([self.kind, self.value])
        except UnicodeEncodeError as e:
            raise LayoutError(f"extra {self.kind!r} cannot be encoded as UTF-8: {e}") from e


def _token_bytes(tokens: Tokens) -> bytes:
    """``tokens`` as u32 little-endian."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise LayoutError(f"token ids are one row of integers, not {tokens.dtype} {tokens.shape}")
        if tokens.dtype != np.dtype("<u4"):
            if tokens.size and (tokens.min() < 0 or tokens.max() > 0xFFFFFFFF):
                raise LayoutError("token ids must lie between 0 and 2**32 - 1")
            tokens = tokens.astype("<u4")
        return tokens.tobytes()
    if isinstance(tokens, memoryview):
        if tokens.format not in ("I", "<I", "=I") or tokens.itemsize != 4 or tokens.ndim != 1:
            raise LayoutError(f"a token buffer must be one row of uint32, not format {tokens.format!r} {tokens.shape}")
        return tokens.tobytes()
    if isinstance(tokens, bytes | bytearray):
        raise LayoutError("token ids in bytes are ambiguous: give memoryview(tokens).cast('I') for uint32")
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as e:
        raise LayoutError(f"token ids must be integers between 0 and 2**32 - 1: {e}") from e
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _placed(kind: str, value: bytes | str | int, start: int, stop: int) -> bytes:
    """An extra as hashed with a block, from whose first token ``start`` and ``stop`` are counted."""
    place = start.to_bytes(8, "little", signed=True) + stop.to_bytes(8, "little", signed=True)
    return canonical.encode(kind) + canonical.encode(value) + place


class Namer:
    """Names blocks for one model and tenant. Immutable and thread-safe."""

    __slots__ = ("_key", "block_tokens")

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self._key = key
        self.block_tokens = block_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namer) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<Namer block_tokens={self.block_tokens}>"

    def chain(self, tokens: Tokens = (), extras: Sequence[Extra] = ()) -> Chain:
        """The chain of a prompt. Keep it and ``extend`` it: a prompt that grows by one turn costs only that turn."""
        chain = Chain(self)
        chain.extend(tokens, extras)
        return chain

    def apart(self, kind: str, names: Sequence[bytes]) -> Chain:
        """A prompt of blocks that were named elsewhere: each has the key that it would have alone, with tokens that are
        all 0 and its name as an extra. The key does not depend on the blocks before it, so they may be in any order."""
        if len(set(names)) != len(names):
            raise LayoutError("a prompt cannot have one block twice")
        chain = Chain(self)
        nothing = bytes(4 * self.block_tokens)
        hasher, start = blake3(key=self._key), ROOT + self.block_tokens.to_bytes(4, "little") + nothing
        for name in names:
            hasher.reset()
            hasher.update(start + _placed(kind, name, 0, FOREVER))
            chain.digests.append(hasher.digest())
            chain._named += nothing
        chain._apart = True
        return chain


class Chain:
    """The names of a growing prompt's full blocks. For one thread at a time."""

    __slots__ = ("_apart", "_extras", "_joined", "_keys", "_named", "_tail", "digests", "namer")

    def __init__(self, namer: Namer) -> None:
        self.namer = namer
        self._tail = b""
        self._extras: list[Extra] = []
        self._keys: dict[bytes, list[BlockKey]] = {}
        self.digests: list[bytes] = []
        """One digest per full block."""
        self._named = bytearray()
        self._joined = b""
        self._apart = False

    def __repr__(self) -> str:
        return f"<Chain {self.blocks} blocks + {len(self._tail) // 4} tokens>"

    @property
    def blocks(self) -> int:
        """Number of full blocks in the prompt."""
        return len(self.digests)

    @property
    def block_tokens(self) -> int:
        return self.namer.block_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens in the prompt, including a last partial block."""
        return self.blocks * self.block_tokens + len(self._tail) // 4

    def extend(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> None:
        """Append ``tokens``. ``extras`` are positioned from the prompt's start, and may start only in blocks that are
        not full yet."""
        named = self.blocks * self.block_tokens
        if type(extras) is not tuple or extras:
            extras = arguments.items(extras, Extra, "extras")
        for extra in extras:
            if extra.start < named:
                raise LayoutError(
                    f"extra {extra.kind!r} starts at token {extra.start}, but {named} tokens are named already"
                )
        # Rejected tokens leave the chain unchanged, so that the caller can extend it again.
        raw = self._tail + _token_bytes(tokens) if self._tail else _token_bytes(tokens)
        self._extras.extend(extras)
        size = self.block_tokens * 4
        end = len(raw) - len(raw) % size
        self._tail = raw[end:]
        self._named += raw[:end]
        head = self.block_tokens.to_bytes(4, "little")
        hasher = blake3(key=self.namer._key)  # one for all blocks: creating one costs as much as half a block
        digests = self.digests
        parent = digests[-1] if digests else ROOT
        # Nearly all of the cost of naming is here, so each attribute lookup counts.
        reset, update, digest, append = hasher.reset, hasher.update, hasher.digest, digests.append
        if not self._extras:
            for at in range(0, end, size):
                reset()
                update(parent + head + raw[at : at + size])
                parent = digest()
                append(parent)
            return
        for at in range(0, end, size):
            reset()
            update(parent + head + raw[at : at + size] + self._extra_bytes(len(digests)))
            parent = digest()
            append(parent)

    @property
    def plain(self) -> bool:
        """Whether the names follow from the model, the tenant and the tokens alone."""
        return not self._extras and not self._apart

    @property
    def extras(self) -> Sequence[Extra]:
        """The extras of the prompt."""
        return tuple(self._extras)

    def first(self, blocks: int) -> Chain:
        """An independent chain of the first ``blocks`` full blocks."""
        chain = Chain(self.namer)
        chain.digests = self.digests[:blocks]
        chain._named = self._named[: 4 * self.block_tokens * blocks]
        chain._extras = list(self._extras)
        chain._apart = self._apart
        return chain

    def _extra_bytes(self, block: int) -> bytes:
        first = block * self.block_tokens
        last = first + self.block_tokens
        touching = [
            _placed(e.kind, e.value, e.start - first, e.stop - first)
            for e in self._extras
            if e.start < last and e.stop > first
        ]
        return b"".join(sorted(touching))

    @property
    def joined(self) -> bytes:
        """All digests, concatenated."""
        if len(self._joined) < 32 * len(self.digests):
            self._joined = b"".join(self.digests)
        return self._joined

    def keys(self, suffix: bytes) -> list[BlockKey]:
        """The keys of the prompt's full blocks in the group with that suffix."""
        keys = self._keys.setdefault(suffix, [])
        if len(keys) < len(self.digests):
            keys.extend(BlockKey(d + suffix) for d in self.digests[len(keys) :])
        return keys

    @property
    def named(self) -> memoryview:
        """The tokens of all full blocks, to name them for another model or tenant."""
        return memoryview(bytes(self._named)).cast("I")

    def tokens_of(self, block: int, blocks: int = 1) -> bytes:
        """The tokens of some consecutive full blocks, as u32 little-endian."""
        size = self.block_tokens * 4
        return bytes(memoryview(self._named)[block * size : (block + blocks) * size])

    def parent(self, block: int) -> bytes:
        """The digest of the parent of block ``block``."""
        return self.digests[block - 1] if block else ROOT
