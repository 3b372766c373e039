"""The models that sessions were opened for, so that ``explain`` can tell that tokens are stored for another model.

A namespace is a digest and does not tell what it was made of, so a session brings a description of its model. A caller
gets the descriptions of one tenant and trust domain, and names its tokens for those models itself: the store does not
have the secret that this takes. A description is encrypted with a key made from that secret, because a tenant's tag,
with which a caller asks for them, is no secret. What was written without the tenant's secret is not read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from kvtide.block import Group, Kind, Layout
from kvtide.errors import KvtideError
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant

__all__ = ["DESCRIPTION", "KnownModels", "KnownModelsStatistics", "describe", "differences", "read"]

DESCRIPTION = 16 << 10
"""The most bytes of a description. A model with a longer one is not remembered."""
_SEAL = 32
"""Bytes before an encrypted description."""
_OF_A_TENANT = 32
"""The most models of a tenant that are remembered: the ones used last."""
_ENTRY = 400
"""Bytes of memory of a description, besides its own."""


class _Description(msgspec.Struct, array_like=True):
    block_tokens: int
    groups: list[tuple[str, str, int, int, int, str, int, int, str]]
    weights: str
    config: dict[str, Any]
    scales: bytes
    adapter: str
    fidelity: str


def describe(model: Model, tenant: Tenant = DEFAULT_TENANT) -> bytes:
    """A model as bytes that ``read`` understands for the same tenant; empty if it is too long."""
    groups = [
        (g.name, g.kind.value, g.layers, g.heads, g.head_dim, g.dtype, g.window, g.page, g.packing)
        for g in model.layout.groups
    ]
    fields = model.weights, dict(model.config), model.scales, model.adapter, model.fidelity
    try:
        made = msgspec.msgpack.encode(_Description(model.layout.block_tokens, groups, *fields))
    except (TypeError, OverflowError):  # a value of the configuration that has no form in MessagePack
        return b""
    sealed = _seal(made, tenant)
    same = len(sealed) <= DESCRIPTION and (found := read(sealed, tenant)) and found.namespace() == model.namespace()
    return sealed if same else b""


def _seal(made: bytes, tenant: Tenant) -> bytes:
    """Encrypt and authenticate a description. Equal ones become equal: the mark at the front follows from the text, and
    the key stream from the mark."""
    key = _key(tenant)
    mark = blake3(made, key=key).digest(_SEAL)
    return mark + _applied(made, key, mark)


def _opened(sealed: bytes, tenant: Tenant) -> bytes:
    key, mark = _key(tenant), sealed[:_SEAL]
    made = _applied(sealed[_SEAL:], key, mark)
    if blake3(made, key=key).digest(_SEAL) != mark:
        raise ValueError("the description was not made with this tenant's secret")
    return made


def _key(tenant: Tenant) -> bytes:
    return blake3(tenant.secret, derive_key_context="kvtide 1 model description").digest()


def _applied(text: bytes, key: bytes, mark: bytes) -> bytes:
    stream = blake3(b"stream" + mark, key=key).digest(len(text))
    return (np.frombuffer(text, np.uint8) ^ np.frombuffer(stream, np.uint8)).tobytes()


def read(description: bytes, tenant: Tenant = DEFAULT_TENANT) -> Model | None:
    """The model with that description of this tenant; None if it is none."""
    try:
        about = msgspec.msgpack.decode(_opened(description, tenant), type=_Description)
        groups = tuple(Group(g[0], Kind(g[1]), *g[2:]) for g in about.groups)
        layout = Layout(groups, about.block_tokens)
        model = Model(layout, about.weights, about.config, about.scales, about.adapter, about.fidelity)
        model.namespace()  # a configuration may have values that no namespace can be made of
        return model
    except (msgspec.MsgspecError, KvtideError, ValueError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class KnownModelsStatistics:
    """Descriptions of models."""

    models: int = 0
    bytes: int = 0
    """Memory that they take, approximately."""
    limit: int = 0


class KnownModels:
    """Of a store. Thread-safe. What does not fit is forgotten: the models used longest ago first."""

    def __init__(self, limit: int) -> None:
        """``limit``: the most bytes; 0 switches it off."""
        self.limit = limit
        self._known: OrderedDict[tuple[bytes, bytes, bytes], bytes] = OrderedDict()
        """Descriptions by tenant, trust domain and namespace."""
        self._lock = threading.Lock()

    def note(self, tenant: bytes, domain: bytes, namespace: bytes, description: bytes) -> None:
        """A session of a tenant was opened. ``domain``: the suffix of the names of its trust domain's blocks."""
        if not 0 < len(description) <= min(DESCRIPTION, self.limit - _ENTRY):
            return
        with self._lock:
            self._known[tenant, domain, namespace] = description
            self._known.move_to_end((tenant, domain, namespace))
            mine = [key for key in self._known if key[:2] == (tenant, domain)]
            for key in mine[: max(0, len(mine) - _OF_A_TENANT)]:
                del self._known[key]
            while self._nbytes() > self.limit:
                self._known.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(_ENTRY + len(description) for description in self._known.values())

    def of(self, tenant: bytes, domain: bytes) -> list[bytes]:
        """The descriptions of a tenant's models, the last one used first."""
        with self._lock:
            return [about for key, about in reversed(self._known.items()) if key[:2] == (tenant, domain)]

    def forget(self, tenant: bytes) -> None:
        """Forget a tenant's models."""
        with self._lock:
            for key in [key for key in self._known if key[0] == tenant]:
                del self._known[key]

    def statistics(self) -> KnownModelsStatistics:
        with self._lock:
            return KnownModelsStatistics(len(self._known), self._nbytes(), self.limit)


def differences(mine: Model, other: Model) -> tuple[str, ...]:
    """In what two models differ, in words: each as ``what: the other's value, here mine``."""
    found = [
        f"{what}: {_short(theirs)}, here {_short(ours)}"
        for what, ours, theirs in [
            ("weights", mine.weights, other.weights),
            ("adapter", mine.adapter, other.adapter),
            ("fidelity", mine.fidelity, other.fidelity),
            ("block size", mine.layout.block_tokens, other.layout.block_tokens),
            ("dtype", _of_groups(mine, "dtype"), _of_groups(other, "dtype")),
        ]
        if ours != theirs
    ]
    if mine.scales != other.scales:
        found.append("scales of the KV dtype")
    if keys := sorted(_changed(mine.config, other.config)):
        found.append(f"configuration: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}")
    found += _layout(mine, other)
    return tuple(found)


def _layout(mine: Model, other: Model) -> Iterator[str]:
    """The other differences of two layouts."""
    for what in ("name", "kind", "layers", "heads", "head_dim", "window", "page", "packing"):
        ours, theirs = _of_groups(mine, what), _of_groups(other, what)
        if ours != theirs:
            yield f"layout, {what}: {_short(theirs)}, here {_short(ours)}"


def _of_groups(model: Model, what: str) -> str:
    values = [getattr(group, what) for group in model.layout.groups]
    return ", ".join(dict.fromkeys(str(value.value if isinstance(value, Kind) else value) for value in values))


def _changed(mine: Any, other: Any) -> set[str]:
    missing = object()
    return {str(key) for key in {*mine, *other} if mine.get(key, missing) != other.get(key, missing)}


def _short(value: object) -> str:
    text = str(value) or "none"
    return text if len(text) <= 60 else f"{text[:57]}..."
