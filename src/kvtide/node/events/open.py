"""Begins to publish KV events, as the settings say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.store.store import Store

if TYPE_CHECKING:
    from kvtide.node.events.publisher import NodeEvents

__all__ = ["publish_events"]


def publish_events(store: Store, numbers: Path | None = None) -> NodeEvents:
    """Publish the blocks of a store whose ``events.endpoint`` is set. ``numbers``: a file for the numbers that batches
    have. Raises ConfigError."""
    try:
        from kvtide.node.events.publisher import NodeEvents
    except ImportError as e:
        raise ConfigError("events.endpoint is set, which needs pyzmq: pip install kvtide[events]") from e
    return NodeEvents(store.given.events, store, numbers)
