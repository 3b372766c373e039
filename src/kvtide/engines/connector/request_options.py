"""Options that a request may pass to the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtide.errors import ConfigError
from kvtide.plan.usage_tracker import Turn

__all__ = ["NOTHING", "RequestOptions", "read_options"]

log = logging.getLogger("kvtide.engines")


class _Hints(msgspec.Struct, frozen=True):
    """Hints about the next use of a request's prompt. An invalid hint is ignored with a warning."""

    turn: Turn | None = None
    returns_in: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``kv_transfer_params`` of a request."""

    ttl: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Lifetime of the request's blocks in seconds."""
    pin: bool = False
    """Protect the request's blocks from eviction while the engine runs."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Blocks of lower priority are evicted before all blocks of higher priority."""
    no_store: bool = False
    no_load: bool = False
    max_load_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Milliseconds that loading may take; after that the prompt is computed instead."""
    tenant: str = ""
    """The tenant of the request, if the engine's front end is trusted to name it."""
    turn: Turn | None = None
    """How the request's turn ends, if the caller knows: see ``Session.expect``."""
    returns_in: float | None = None
    """Seconds after the request's end until its prompt is expected to be used again."""
    explain: bool = False
    """Say in the answer why blocks of the prompt were hits or misses."""


NOTHING = RequestOptions(no_store=True, no_load=True)
"""Options of a request with invalid options: it is computed, and nothing is loaded or stored."""


_SHOWN = 200
"""Characters of a client's input that a warning shows."""
_OTHERS = ("do_remote_", "remote_", "tp_size")
"""Prefixes of options for connectors that transfer requests between engines. Those may run beside this one, so their
options are ignored."""


def read_options(given: Mapping[str, object] | None) -> RequestOptions:
    """Parse the options of a request. Raises ConfigError for unknown options, so that a misspelt one is not ignored."""
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
