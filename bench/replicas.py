"""Should a node evict first what other nodes have too? A cluster at short memory, replayed.

``python -m bench.replicas --traces DIR`` prints, for each trace, spreading of requests and size of all memories
together (as a part of the distinct blocks), the hit rate of the cluster and the mean seconds to the first token under
each rule of eviction; ``--json FILE`` also writes them. The folder has ``mooncake_conversation.jsonl.gz`` and
``lmcache_agent_hashed.jsonl.gz``; a third trace is made here: prompts whose first part is one of 300, chosen by Zipf's
law.

The model is generous to the rules that count copies: every node knows at every moment exactly who has what. A node has
memory only. A request is computed at one node; of its prefix, what the node lacks is read from another one that has it,
if that is quicker than computing it, behind what that node is sending already, and is then in both. Blocks are of
Llama-3-8B (128 KiB a token), nodes send 3 GB/s and compute 8,000 tokens a second. The first 40 % of the requests warm
the memories and are not counted.

The rules: ``lru`` evicts the block used longest ago, the end of a prompt before its beginning. The others evict first,
if it was not used within the newer half of the node's memory (or at all, with ``always``): ``copies``: a block that
another node has; ``home``: the same, except at one of the live nodes for each block, its home by rendezvous hashing;
``read``: a block that was read from another node and was not asked for here again. ``read`` needs no knowledge.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvtide.replay.trace import chains, read

__all__ = ["Cluster", "Outcome", "replay"]

TRACES = {
    "conversation": ("mooncake_conversation.jsonl.gz", 512),
    "agents": ("lmcache_agent_hashed.jsonl.gz", 64),
}
SHARED = "shared prompts"
TOKEN_BYTES = 128 << 10
SEND = 3e9
PREFILL = 8000.0
ROUND_TRIP = 0.001
WARM = 0.4
RULES = ("lru", "copies", "copies always", "home", "home always", "read")
SPREADINGS = ("in turn", "longest prefix")


class Request(NamedTuple):
    seconds: float
    blocks: Sequence[int]


class Outcome(NamedTuple):
    """Of the requests that count."""

    hits: float
    """Part of the blocks that were found, here or at another node."""
    here: float
    """Part of the blocks that were found at the node itself."""
    seconds: float
    """Mean time to the first token."""


class _Node:
    """Memory for ``room`` blocks."""

    def __init__(self, number: int, room: int) -> None:
        self.number = number
        self.room = room
        self.used: OrderedDict[int, int] = OrderedDict()
        """When each block was used last, the oldest first."""
        self.read: set[int] = set()
        """Blocks that were read from another node, and not asked for again."""
        self.first: list[tuple[int, int]] = []
        """A heap of times and blocks that may be evicted first; not all entries are current."""
        self.sends_until = 0.0


class Cluster:
    """So many nodes, with one rule."""

    def __init__(self, nodes: int, room: int, rule: str, tokens: int) -> None:
        self._nodes = [_Node(number, room) for number in range(nodes)]
        self._rule, _, always = rule.partition(" ")
        self._always = bool(always)
        self._tokens = tokens
        self._holders: dict[int, set[int]] = {}
        self._homes: dict[int, int] = {}
        self._now = 0
        self._turn = 0
        self._requests = [0] * nodes
        """Given to each node by ``choose``."""

    def choose(self, blocks: Sequence[int], spreading: str) -> int:
        """The node for a request. The longest prefix, but no node has a quarter more requests than the mean."""
        self._turn += 1
        if spreading == "in turn":
            return self._turn % len(self._nodes)
        fair = [n for n in self._nodes if self._share(n) <= 1.25 * (self._turn / len(self._nodes)) + 1]
        best = max(fair, key=lambda n: (self._prefix(n, blocks), -self._share(n)))
        self._requests[best.number] += 1
        return best.number

    def _share(self, node: _Node) -> int:
        return self._requests[node.number]

    @staticmethod
    def _prefix(node: _Node, blocks: Sequence[int]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in node.used), len(blocks))

    def request(self, number: int, request: Request) -> tuple[int, int, float]:
        """Serve a request. Returns the blocks that were found, those found at the node, and the seconds."""
        node, blocks = self._nodes[number], request.blocks
        found = 0
        loads: dict[int, int] = {}
        for block in blocks:
            if block not in node.used:
                others = self._holders.get(block)
                if not others:
                    break
                sender = next((n for n in loads if n in others), None)
                if sender is None:
                    sender = min(others, key=lambda n: self._nodes[n].sends_until)
                loads[sender] = loads.get(sender, 0) + 1
            found += 1
        compute = self._tokens / PREFILL
        here = sum(1 for block in blocks[:found] if block in node.used)
        seconds = (len(blocks) - found) * compute
        if loads:
            each = self._tokens * TOKEN_BYTES / SEND
            ends = {
                sender: max(self._nodes[sender].sends_until, request.seconds) + count * each + ROUND_TRIP
                for sender, count in loads.items()
            }
            wait = max(ends.values()) - request.seconds
            if wait > (found - here) * compute:  # quicker to compute, from the first block on that is not here
                found = here = self._prefix(node, blocks)
                seconds = (len(blocks) - found) * compute
            else:
                seconds += wait
                for sender, end in ends.items():
                    self._nodes[sender].sends_until = end
        missing = {block for block in blocks if block not in node.used}
        away = {block for block in blocks[:found] if block in missing}
        for block in reversed(blocks):  # the end of the prompt is the oldest
            self._use(node, block, away)
        while len(node.used) > node.room:
            self._evict(node)
        return found, here, seconds

    def _use(self, node: _Node, block: int, away: set[int]) -> None:
        self._now += 1
        node.used[block] = self._now
        node.used.move_to_end(block)
        holders = self._holders.setdefault(block, set())
        holders.add(node.number)
        if block in away:
            node.read.add(block)
        else:
            node.read.discard(block)
        for holder in holders:
            other = self._nodes[holder]
            if self._goes_first(other, block):
                heapq.heappush(other.first, (other.used[block], block))

    def _goes_first(self, node: _Node, block: int) -> bool:
        if self._rule == "read":
            return block in node.read
        copies = len(self._holders.get(block, ())) > 1
        if self._rule == "copies":
            return copies
        return self._rule == "home" and copies and self._home(block) != node.number

    def _home(self, block: int) -> int:
        found = self._homes.get(block)
        if found is None:
            names = (blake3(f"{block} {node.number}".encode()).digest() for node in self._nodes)
            self._homes[block] = found = max(enumerate(names), key=lambda pair: pair[1])[0]
        return found

    def _evict(self, node: _Node) -> None:
        block = self._first(node)
        if block is None:
            block = next(iter(node.used))
        del node.used[block]
        node.read.discard(block)
        self._holders[block].discard(node.number)

    def _first(self, node: _Node) -> int | None:
        """A block that the rule evicts first."""
        if self._rule == "lru":
            return None
        oldest = next(iter(node.used.values()))
        while node.first:
            used, block = node.first[0]
            if node.used.get(block) != used or not self._goes_first(node, block):
                heapq.heappop(node.first)
            elif self._always or self._now - used >= (self._now - oldest) / 2:
                return block
            else:
                return None
        return None


def replay(requests: Sequence[Request], nodes: int, room: int, rule: str, spreading: str, tokens: int) -> Outcome:
    cluster = Cluster(nodes, room, rule, tokens)
    warm = int(WARM * len(requests))
    total = found = here = 0
    seconds = 0.0
    for number, request in enumerate(requests):
        hit, local, took = cluster.request(cluster.choose(request.blocks, spreading), request)
        if number >= warm:
            total += len(request.blocks)
            found += hit
            here += local
            seconds += took
    return Outcome(found / total, here / total, seconds / (len(requests) - warm))


def shared_prompts(count: int = 8000) -> list[Request]:
    """Prompts that begin with one of 300, by Zipf's law, of 10 to 60 blocks; then 6 of their own."""
    chance = random.Random(7)
    prompts = [range(1000 * n, 1000 * n + chance.randint(10, 60)) for n in range(300)]
    chosen = chance.choices(prompts, [1 / (n + 1) for n in range(300)], k=count)
    return [Request(0.3 * i, [*one, *range(10**7 + 10 * i, 10**7 + 10 * i + 6)]) for i, one in enumerate(chosen)]


def traces(folder: Path, named: Sequence[str]) -> Iterator[tuple[str, list[Request], int]]:
    for name, (file, tokens) in TRACES.items():
        if name not in named:
            continue
        trace = chains(read(folder / file))
        requests = zip(trace.seconds.tolist(), trace.blocks, strict=True)
        yield name, [Request(when, blocks.tolist()) for when, blocks in requests if len(blocks)], tokens
    if SHARED in named:
        yield SHARED, shared_prompts(), 512


def measure(
    folder: Path, named: Sequence[str], counts: Sequence[int], say: Callable[[str], object]
) -> Iterator[dict[str, object]]:
    say(f"{'trace':16}{'nodes':>6}{'spreading':>16}{'memory':>8}  {'rule':15}{'hits':>7}{'here':>7}{'seconds':>9}\n")
    for name, requests, tokens in traces(folder, named):
        distinct = len({block for request in requests for block in request.blocks})
        longest = max(len(request.blocks) for request in requests)
        for nodes in counts:
            for room in sorted({max(longest, int(part * distinct / nodes)) for part in (0.05, 0.2)}):
                for spreading in SPREADINGS:
                    for rule in RULES:
                        got = replay(requests, nodes, room, rule, spreading, tokens)
                        memory = nodes * room / distinct
                        say(
                            f"{name:16}{nodes:6}{spreading:>16}{memory:8.2f}  {rule:15}"
                            f"{got.hits:7.3f}{got.here:7.3f}{got.seconds:9.3f}\n"
                        )
                        yield {
                            "trace": name,
                            "nodes": nodes,
                            "memory": memory,
                            "spreading": spreading,
                            "rule": rule,
                            **got._asdict(),
                        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--trace", nargs="+", choices=[*TRACES, SHARED], default=[*TRACES, SHARED])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4])
    given = parser.parse_args()
    found = list(measure(given.traces, given.trace, given.nodes, sys.stdout.write))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
