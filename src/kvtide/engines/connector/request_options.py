"""What a request may ask of the store, beside its prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtide.errors import ConfigError
from kvtide.plan.usage import Turn

__all__ = ["NOTHING", "RequestOptions", "read_options"]

log = logging.getLogger("kvtide.engines")


class _Hints(msgspec.Struct, frozen=True):
    """What a request says of its prompt's next use. A hint that cannot be is worth a warning, and nothing else."""

    turn: Turn | None = None
    returns_in: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``kv_transfer_params`` of a request."""

    ttl: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds that its blocks live."""
    pin: bool = False
    """Keep its blocks from eviction while the engine runs."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Blocks of higher priority outlast all of lower."""
    no_store: bool = False
    no_load: bool = False
    max_load_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """After which it is computed instead."""
    tenant: str = ""
    """Whose it is, where the engine's front door is trusted to say so."""
    turn: Turn | None = None
    """How its turn ends, if the caller knows: see ``Session.expect``."""
    returns_in: float | None = None
    """In how many seconds after its end its prompt is expected to be used again."""


NOTHING = RequestOptions(no_store=True, no_load=True)
"""Of a request that asked for what it may not have: it is computed, and leaves no trace."""


_SHOWN = 200
"""Letters of what a client sent that a warning tells."""
_OTHERS = ("do_remote_", "remote_", "tp_size")
"""What begins so is for connectors that hand requests from one engine to another; they may stand beside us."""


def read_options(given: Mapping[str, object] | None) -> RequestOptions:
    """What a request asked for. Raises ConfigError for what nobody can ask for, so that no misspelt wish is lost."""
    ours = {name: value for name, value in (given or {}).items() if not name.startswith(_OTHERS)}
    hints = {name: ours.pop(name) for name in _Hints.__struct_fields__ if name in ours}
    for name, value in hints.items():
        try:
            msgspec.convert({name: value}, _Hints)
            ours[name] = value
        except msgspec.ValidationError as e:
            shown = repr({name: value})[:_SHOWN]
            log.warning('kv_transfer_params: %s is ignored: %s; turn is "tool" or "end", returns_in seconds', shown, e)
    try:
        return msgspec.convert(ours, RequestOptions)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"kv_transfer_params {given!r}: {e}; there is {', '.join(RequestOptions.__struct_fields__)}"
        ) from None
