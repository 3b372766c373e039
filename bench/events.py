"""What KV events cost: at a node's step, with and without a consumer, and at 50,000 blocks per second.

    python -m bench.events [--pairs 30]

The step is what an engine's scheduler asks of the node for one request: a match, and a reservation that is written and
sealed. Three nodes run side by side, without events, with events and no consumer, and with one; each round times the
same steps at all three, in a random order. The rate is measured in one process without a node: descriptions and events
of the store go in at 50,000 blocks per second, and a consumer in a process of its own reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvtide import Layout, Model, config
from kvtide.block import BlockKey
from kvtide.events import BlockStored
from kvtide.index.index import DRAM, SEALED
from kvtide.index.keys import DEFAULT_TENANT, ROOT
from kvtide.node.client.client import Client
from kvtide.node.events.publisher import NodeEvents
from kvtide.store.backend import LocalBackend
from kvtide.store.store import Store

_TOKENS, _BLOCKS, _STEPS = 256, 8, 40
LAYOUT = Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=_TOKENS)
MODEL = Model(LAYOUT, "bench")


def steps(client: Client, first: int) -> float:
    """Seconds of some steps, each with a prompt of its own."""
    data = {"full": [np.zeros(LAYOUT.geometry["full"].nbytes, np.uint8)] * _BLOCKS}
    prompts = [np.full(_TOKENS * _BLOCKS, first + i, np.uint32) for i in range(_STEPS)]
    with client.session(MODEL) as session:
        chains = [session.chain(prompt) for prompt in prompts]
        start = time.perf_counter()
        for chain in chains:
            with session.match(chain):
                pass
            session.store(chain, data["full"])
        return time.perf_counter() - start


def cost(pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        nodes, clients = [], []
        try:
            for name, given in (("off", {}), ("alone", {"events": 1}), ("consumer", {"events": 1})):
                environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "64MiB", "KVTIDE_DRAM_SEGMENT": "4MiB"}
                if given:
                    environment |= {
                        "KVTIDE_EVENTS_ENDPOINT": f"ipc://{folder}/{name}.events",
                        "KVTIDE_EVENTS_TOKEN_IDS": "true",
                    }
                path = Path(folder) / f"{name}.sock"
                command = [sys.executable, "-m", "kvtide", "node", "--socket", str(path)]
                nodes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
                while not path.exists():
                    time.sleep(0.05)
                clients.append(Client(path))
            reader = get_context("spawn").Process(target=_read, args=(f"ipc://{folder}/consumer.events",), daemon=True)
            reader.start()
            time.sleep(2)
            for client in clients:
                steps(client, 1)
            seconds: list[list[float]] = [[], [], []]
            cpu = [0.0] * 3
            for at in range(pairs):
                order = [0, 1, 2]
                random.shuffle(order)
                for one in order:
                    before = _cpu(nodes[one].pid)
                    seconds[one].append(steps(clients[one], 1000 + at * _STEPS))
                    cpu[one] += _cpu(nodes[one].pid) - before
            reader.kill()
        finally:
            for client in clients:
                client.close()
            for node in nodes:
                node.send_signal(signal.SIGKILL)
                node.wait()
    off = np.array(seconds[0])
    found: dict[str, Any] = {"step_us": round(float(np.median(off)) / _STEPS * 1e6, 1)}
    for name, some, used in zip(("without a consumer", "with one"), seconds[1:], cpu[1:], strict=True):
        ratios = np.log(np.array(some) / off)
        low, high = np.percentile([np.median(np.random.choice(ratios, len(ratios))) for _ in range(2000)], [2.5, 97.5])
        found[name] = {
            "step": f"{np.expm1(np.median(ratios)):+.1%} ({np.expm1(low):+.1%} to {np.expm1(high):+.1%})",
            "node_cpu_us_per_step": round((used - cpu[0]) / pairs / _STEPS * 1e6, 1),
        }
    return found


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _map(event: Any) -> dict[str, Any]:
    return event if isinstance(event, dict) else {"type": event[0], "block_hashes": event[1] if event[1:] else ()}


def _read(endpoint: str, results: Any = None) -> None:
    """A consumer that reads all, and tells how many batches it missed and how old each was."""
    import msgspec

    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    expected, lost, lags, blocks, timeout = 0, 0, [], 0, 120_000
    while socket.poll(timeout):
        _, number, batch = socket.recv_multipart()
        at = int.from_bytes(number, "big")
        lost += at - expected if expected else 0
        expected = at + 1
        if results is None:
            continue
        found = msgspec.msgpack.decode(batch)
        lags.append(time.time() - found[0])
        blocks += sum(
            len(event.get("block_hashes", ())) for event in map(_map, found[1]) if event["type"] == "BlockStored"
        )
        timeout = 10_000
    if results is not None:
        results.put((blocks, lost, np.percentile(lags, [50, 99]).tolist()))


def rate(per_second: int, seconds: float, form: str, page: int = 0) -> dict[str, Any]:
    """Blocks that are stored at a rate, until the consumer has them. ``page``: tokens of a block in events."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        given = {
            "endpoint": endpoint,
            "replay": f"ipc://{folder}/replay",
            "token_ids": True,
            "form": form,
            "block_tokens": page,
        }
        memory = {"dram": {"budget": "16MiB", "segment": "1MiB"}, "explain": {"memory": 0}}
        context = get_context("spawn")
        results = context.Queue()
        with Store(config.read(None, {}, memory, events=given)) as store:
            events = NodeEvents(store.given.events, store)
            backend = LocalBackend(store.main, LAYOUT, MODEL.namespace(), DEFAULT_TENANT.tag)
            source = events.source(backend)
            assert source is not None
            reader = context.Process(target=_read, args=(endpoint, results), daemon=True)
            reader.start()
            while not events.statistics().subscriptions:
                time.sleep(0.05)
            time.sleep(0.5)
            index, identity, ending = store.index, source.groups[0][1], source.groups[0][0]
            pages = _TOKENS // (page or _TOKENS)
            portion = per_second // pages // 100
            turns = int(seconds * 100)
            names = os.urandom(32 * portion * turns)
            digests = [names[i : i + 32] for i in range(0, len(names), 32)]
            keys = [BlockKey(one + ending) for one in digests]
            with index.lock:  # stored before, so that this measures events alone
                rows = np.array([index.add(key, ROOT, i % _BLOCKS) for i, key in enumerate(keys)])
                index.identity[rows] = identity
                index.state[DRAM][rows] = SEALED
            tokens = os.urandom(4 * _TOKENS * _BLOCKS)
            before, start = events.statistics().cpu_seconds, time.perf_counter()
            for turn in range(turns):
                left = start + turn / 100 - time.perf_counter()
                if left > 0:
                    time.sleep(left)
                some = slice(turn * portion, (turn + 1) * portion)
                for at in range(some.start, some.stop, _BLOCKS):
                    part = names[32 * at : 32 * min(at + _BLOCKS, some.stop)]
                    events.describe(source, ROOT, part, tokens[: len(part) // 32 * 4 * _TOKENS])
                store.feed.publish([BlockStored("dram", tuple(keys[some]))])
            took = time.perf_counter() - start
            sent = turns * portion
            found, lost, (middle, late) = results.get(timeout=120)
            after = events.statistics()
            events.close()
            with index.lock:
                index.state[DRAM][:] = 0
    return {
        "form": form,
        "block_tokens": page or _TOKENS,
        "blocks_per_second": round(sent * pages / took),
        "blocks": sent * pages,
        "received": found,
        "batches_lost": lost,
        "lag_ms_median": round(middle * 1e3, 1),
        "lag_ms_p99": round(late * 1e3, 1),
        "cpu_us_per_block": round((after.cpu_seconds - before) / (sent * pages) * 1e6, 2),
        "undescribed": after.undescribed,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=30)
    arguments.add_argument("--rate", type=int, default=50_000)
    arguments.add_argument("--seconds", type=float, default=10.0)
    given = arguments.parse_args()
    rates = [rate(given.rate, given.seconds, form, page) for form in ("map", "array") for page in (16, 0)]
    print(json.dumps({"rate": rates}, indent=2))
    print(json.dumps({"cost": cost(given.pairs)}, indent=2))


if __name__ == "__main__":
    main()
