"""What KV events cost: at a node's step, with and without a consumer, and at 50,000 blocks per second.

    python -m bench.events [--pairs 10] [--seconds 10] [--rate 50000]

The rate is measured in one process without a node: descriptions and events of the store go in at 50,000 blocks per
second, and a consumer in a process of its own reads and decodes them. Sent in pages of 16 tokens, and as blocks of 256.

The step is what an engine's scheduler asks of the node for one request: a match, and a reservation that is written and
sealed; memory is full, so each step also evicts. Three nodes run side by side, without events, with events and no
consumer, and with one. Each pair makes some steps at all three, in a random order and with a pause after each, so that
nobody pays for what another has put off. Figures are the medians of the pairs, with the interval in which the median is
in 95 % of samples drawn from them. CPU times count what a node puts off, too, so they are the steadier figures.

Steps are made twice: one after the other without a pause, and one each 10 ms, as by an engine whose steps take as long.
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

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from kvtide import Layout, Model, config
from kvtide.block import BlockKey
from kvtide.events import BlockStored
from kvtide.index.index import DRAM, SEALED
from kvtide.index.keys import DEFAULT_TENANT, ROOT
from kvtide.node.client.client import Client
from kvtide.node.events.publisher import NodeEvents
from kvtide.store.backend import LocalBackend
from kvtide.store.node_statistics import KvEventStatistics
from kvtide.store.store import Store

_TOKENS, _BLOCKS, _STEPS, _PACED_STEPS = 256, 8, 400, 100
_PAUSE, _EVERY = 0.2, 0.01
LAYOUT = Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=_TOKENS)
MODEL = Model(LAYOUT, "bench")


def steps(client: Client, first: int, count: int = _STEPS, every: float = 0.0) -> tuple[float, float]:
    """Seconds of some steps, each with a prompt of its own, and CPU seconds of this process. ``every``: seconds from
    the beginning of one to that of the next, at least."""
    data = {"full": [np.zeros(LAYOUT.geometry["full"].nbytes, np.uint8)] * _BLOCKS}
    prompts = [np.full(_TOKENS * _BLOCKS, first + i, np.uint32) for i in range(count)]
    with client.session(MODEL) as session:
        chains = [session.chain(prompt) for prompt in prompts]
        seconds, cpu, due = 0.0, time.process_time(), time.perf_counter()
        for chain in chains:
            time.sleep(max(0.0, due - time.perf_counter()))
            start = time.perf_counter()
            with session.match(chain):
                pass
            session.store(chain, data["full"])
            seconds += time.perf_counter() - start
            due = start + every
        return seconds, time.process_time() - cpu


def cost(pairs: int, count: int, every: float) -> dict[str, Any]:
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        nodes, clients, read = [], [], context.Array("q", 2)
        reader = context.Process(target=_follow, args=(f"ipc://{folder}/consumer.events", read), daemon=True)
        try:
            for name in ("off", "alone", "consumer"):
                environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "16MiB", "KVTIDE_DRAM_SEGMENT": "4MiB"}
                if name != "off":
                    environment |= {
                        "KVTIDE_EVENTS_ENDPOINT": f"ipc://{folder}/{name}.events",
                        "KVTIDE_EVENTS_REPLAY": f"ipc://{folder}/{name}.replay",
                        "KVTIDE_EVENTS_TOKEN_IDS": "true",
                    }
                path = Path(folder) / f"{name}.sock"
                command = [sys.executable, "-m", "kvtide", "node", "--socket", str(path)]
                nodes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
                while not path.exists():
                    assert nodes[-1].poll() is None, "a node has failed"
                    time.sleep(0.05)
                clients.append(Client(path))
            reader.start()
            while not _published(clients[2]).subscriptions:
                assert reader.is_alive(), "the consumer has failed"
                time.sleep(0.05)
            for client in clients:
                steps(client, 1)
            wall, cpu, own = ([[0.0] * pairs for _ in nodes] for _ in range(3))
            before = _published(clients[2])
            for at in range(pairs):
                for one in random.sample(range(3), 3):
                    time.sleep(_PAUSE)
                    start = _cpu(nodes[one].pid)
                    wall[one][at], own[one][at] = steps(clients[one], 1_000_000 + at * count, count, every)
                    time.sleep(_PAUSE)
                    cpu[one][at] = _cpu(nodes[one].pid) - start
            after, described = _published(clients[2]), _published(clients[1]).described
        finally:
            if reader.is_alive():
                reader.kill()
            for client in clients:
                client.close()
            for node in nodes:
                node.send_signal(signal.SIGKILL)
                node.wait()
    found: dict[str, Any] = {
        "pairs": pairs,
        "a_step_each_ms": 1e3 * every,
        "steps_of_each": pairs * count,
        "blocks_stored_by_each": pairs * count * _BLOCKS,
        "step_us": round(float(np.median(wall[0])) / count * 1e6, 1),
        "node_cpu_us_per_step": round(float(np.median(cpu[0])) / count * 1e6, 1),
        "described_without_a_consumer": described,
        "published": {"stored": after.stored - before.stored, "removed": after.removed - before.removed},
        "read": {"batches": read[0], "lost": read[1]},
    }
    for one, name in ((1, "without a consumer"), (2, "with one")):
        found[name] = {
            "step": _percent(np.array(wall[one]) / np.array(wall[0]) - 1),
            "client_cpu": _percent((np.array(own[one]) - np.array(own[0])) / np.array(wall[0])),
            "node_cpu": _percent((np.array(cpu[one]) - np.array(cpu[0])) / np.array(wall[0])),
        }
    return found


def _percent(shares: npt.NDArray[np.float64]) -> str:
    """The median, and where it is in 95 % of samples, as parts of the step without events."""
    medians = [np.median(np.random.choice(shares, len(shares))) for _ in range(2000)]
    low, high = np.percentile(medians, [2.5, 97.5])
    return f"{np.median(shares):+.1%} ({low:+.1%} to {high:+.1%})"


def _published(client: Client) -> KvEventStatistics:
    node = client.status().node
    assert node is not None
    assert node.events is not None
    return node.events


def _cpu(pid: int) -> float:
    """CPU seconds of a process, to the nanosecond."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _follow(endpoint: str, read: Any) -> None:
    """A consumer that counts the batches that it got, and those that it missed."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    expected = 0
    while True:
        at = int.from_bytes(socket.recv_multipart()[1], "big")
        read[0] += 1
        read[1] += at - expected if expected else 0
        expected = at + 1


def _map(event: Any) -> dict[str, Any]:
    return event if isinstance(event, dict) else {"type": event[0], "block_hashes": event[1] if event[1:] else ()}


def _read(endpoint: str, results: Any) -> None:
    """A consumer that reads and decodes all, and tells how many batches it missed and how old each was."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    expected, lost, lags, blocks, timeout, cpu = 0, 0, [], 0, 120_000, time.process_time()
    while socket.poll(timeout):
        _, number, batch = socket.recv_multipart()
        at = int.from_bytes(number, "big")
        lost += at - expected if expected else 0
        expected = at + 1
        found = msgspec.msgpack.decode(batch)
        lags.append(time.time() - found[0])
        blocks += sum(
            len(event.get("block_hashes", ())) for event in map(_map, found[1]) if event["type"] == "BlockStored"
        )
        timeout = 10_000
    results.put((blocks, lost, np.percentile(lags or [np.nan], [50, 99]).tolist(), time.process_time() - cpu))


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
                assert reader.is_alive(), "the consumer has failed"
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
            before, start = time.process_time() - time.thread_time(), time.perf_counter()
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
            found, lost, (middle, late), reading = results.get(timeout=120)
            used = time.process_time() - time.thread_time() - before
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
        "cpu_us_per_block": round(used / (sent * pages) * 1e6, 2),
        "consumer_cpu_us_per_block": round(reading / (sent * pages) * 1e6, 2),
        "undescribed": after.undescribed * pages,
        "buffered_mib": round(after.buffered_bytes / 2**20, 1),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=10)
    arguments.add_argument("--rate", type=int, default=50_000)
    arguments.add_argument("--seconds", type=float, default=10.0)
    given = arguments.parse_args()
    for form in ("map", "array"):
        for page in (16, 0):
            print(json.dumps({"rate": rate(given.rate, given.seconds, form, page)}, indent=2), flush=True)
    for count, every in ((_STEPS, 0.0), (_PACED_STEPS, _EVERY)):
        print(json.dumps({"cost": cost(given.pairs, count, every)}, indent=2), flush=True)


if __name__ == "__main__":
    main()
