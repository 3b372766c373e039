"""A follower of an engine's KV events, as a router is one: it believes what is published."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

__all__ = ["Follower"]


class Follower:
    """Follows from before the engine starts; ``options`` are the engine's."""

    def __init__(self, folder: Path) -> None:
        endpoint = f"ipc://{folder}/events"
        self.options = ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.connect(endpoint)
        self._believed: dict[str, dict[Any, dict[str, Any]]] = {}
        self.raw: list[bytes] = []
        """Every batch, as it came."""

    def pages(self, medium: str) -> dict[Any, dict[str, Any]]:
        """The pages that are there by all that was published so far, by their hashes: the events that said so."""
        while self._socket.poll(0):
            self.raw.append(self._socket.recv_multipart()[2])
            for event in msgspec.msgpack.decode(self.raw[-1])[1]:
                if event["type"] == "AllBlocksCleared":
                    self._believed["GPU"] = {}  # vLLM empties its own cache
                    continue
                there = self._believed.setdefault(event["medium"], {})
                for page in event["block_hashes"]:
                    if event["type"] == "BlockStored":
                        there[page] = event
                    else:
                        del there[page]
        return self._believed.get(medium, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close(0)
        self._context.term()
