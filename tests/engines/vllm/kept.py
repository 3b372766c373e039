"""An engine with kvtide, a node that tests can kill and stop, and what its answers are compared with.

The reference for an answer is the engine without a connector and with as many tokens of the prompt in its own cache:
of prompts of a whole number of blocks and less than a page more, the first answer is that of nothing cached, and the
second that of a hit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.node.client.client import Client
from tests.engines.vllm.engines import Answer, Engine
from tests.node.serving import Process, eventually

__all__ = [
    "BLOCK",
    "READING",
    "TOLD",
    "Node",
    "Reference",
    "ask",
    "at_rest",
    "connector",
    "hit",
    "joined",
    "prompt",
    "reference",
    "same",
    "source",
    "stored",
]

BLOCK = 256
TOLD: dict[str, Any] = {"kv_transfer_params": {"max_load_ms": 30_000}}
"""Of a request that rather waits than computes, however busy the machine is; its answer says where tokens came from."""
READING: dict[str, Any] = {"kv_transfer_params": {"max_load_ms": 30_000, "no_store": True}}
"""Of one that leaves what is kept as it is, too."""


class Node(Process):
    """With room for some blocks of SmolLM2; each is on disk as soon as it can be."""

    def __init__(self, folder: Path, **settings: str) -> None:
        known = {"DRAM_BUDGET": "512MiB", "NVME_BUDGET": "1GiB", "DRAM_SEGMENT": "64MiB", "NVME_SEGMENT": "64MiB"}
        known |= {"NVME_STORE": "through", **settings}
        super().__init__(folder, **{f"KVTIDE_{name}": value for name, value in known.items()})

    def restart(self) -> None:
        """Kill it when the disk has all it was given, and start it again: nothing is in DRAM then."""
        with Client(self.path) as client:
            assert client.flush(60).complete
        self.kill()
        self.start()


def connector(node: Process | None = None, **settings: Any) -> dict[str, Any]:
    """vLLM's kv-transfer-config. Without a node the engine starts its own. Every block is stored: the nodes of tests
    have less memory than their engines."""
    if node is not None:
        settings["engine"] = {"address": f"unix:{node.path}", "store": "through", **settings.get("engine", {})}
    return {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


class Reference(NamedTuple):
    """The answers of an engine without a connector."""

    cold: Answer
    warm: Answer


def reference(plain: Engine, tokens: Sequence[int], max_tokens: int = 8) -> Reference:
    plain.reset_prefix_cache()
    found = Reference(plain.complete(tokens, max_tokens), plain.complete(tokens, max_tokens))
    assert (found.cold.cached, found.warm.cached) == (0, len(tokens) // BLOCK * BLOCK)
    return found


def same(found: Answer, true: Answer) -> None:
    """To the last bit."""
    assert (found.cached, found.reason) == (true.cached, true.reason)
    assert (found.tokens, found.logprobs) == (true.tokens, true.logprobs)


def ask(engine: Engine, tokens: Sequence[int], max_tokens: int = 8, **extra: Any) -> Answer:
    """An answer for which nothing is in the engine's own cache."""
    engine.reset_prefix_cache()
    return engine.complete(tokens, max_tokens, **extra)


def hit(engine: Engine, tokens: Sequence[int], **extra: Any) -> Answer:
    """The first answer with every whole block from the store. Where an engine's own processes spin on all cores, its
    question to the node may come back later than any request waits for that; what is computed then is stored, unless
    ``extra`` says otherwise."""
    for _ in range(12):
        if (found := ask(engine, tokens, **TOLD | extra)).cached >= len(tokens) // BLOCK * BLOCK:
            break
    return found


def stored(
    engine: Engine, client: Client, tokens: Sequence[int], blocks: int = 0, max_tokens: int = 8, **extra: Any
) -> Answer:
    """The answer to a prompt that is not there, and then is: so many blocks of it, or all that are whole. An engine
    answers before its worker has told the node; and of a node that answers late, pages may be gone by then, so that the
    prompt is computed again."""
    blocks = blocks or len(tokens) // BLOCK
    before = client.statistics().counts.get("blocks stored", 0)
    for _ in range(6):
        found = ask(engine, tokens, max_tokens, kv_transfer_params={"no_load": True}, **extra)
        at_rest(client)
        if client.statistics().counts.get("blocks stored", 0) - before >= blocks:
            break
    assert client.statistics().counts["blocks stored"] - before == blocks
    return found


def source(answer: Answer) -> tuple[int, int]:
    """Tokens from DRAM, and from disk, as the answer itself says."""
    told = answer.body["kv_transfer_params"]["kvtide"]
    return told["dram_tokens"], told["disk_tokens"]


def joined(client: Client, processes: int = 2) -> None:
    """Wait until an engine of so many processes has a node again, as we have."""
    eventually(lambda: sum(c.connected for c in client.status().node.clients) == processes + 1)


def at_rest(client: Client) -> None:
    """Wait until nothing at the node is held, reserved, used or kept from others."""

    def idle() -> bool:
        found = client.status()
        busy = [c for c in found.node.clients if c.holdings or c.reservations or c.visits or c.slots_quarantined]
        return found.node.pid != 0 and found.store.held == 0 and not busy

    eventually(idle)
