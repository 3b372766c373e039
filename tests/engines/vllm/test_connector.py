"""A real engine with kvtide answers as one without, and computes less.

Two engines serve all of this, one after the other, so the order of the tests matters: the second starts when the first
and the node were killed, has room for a few requests only, and is there for the faults. After every test nothing is
held at the node, and no half has met what it did not expect.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtide.node.client.client import Client
from kvtide.replay.trace import read
from tests.engines.vllm.checkpoints import checkpoint
from tests.engines.vllm.engines import Answer, Engine, engine
from tests.engines.vllm.kept import (
    BLOCK,
    READING,
    TOLD,
    Node,
    ask,
    at_rest,
    connector,
    hit,
    joined,
    prompt,
    reference,
    same,
    source,
    stored,
)
from tests.engines.vllm.published import Follower
from tests.node import host
from tests.node.serving import eventually

BYTES = 30 * 2 * 3 * BLOCK * 64 * 4
"""Of a block of SmolLM2 in float32."""
DURABLE = prompt(1, 600)
"""What the first engine stores and the second loads."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "recorded").mkdir()
    running = Node(folder, RECORD_PATH=str(folder / "recorded"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[Client]:
    with Client(node.path) as found:
        yield found


@pytest.fixture(scope="module")
def follower(node: Node) -> Iterator[Follower]:
    with Follower(node.folder) as found:
        yield found


@pytest.fixture(scope="module")
def first(node: Node, client: Client, follower: Follower) -> Iterator[Engine]:
    with engine(checkpoint(), node.folder / "first.log", connector(node), options=follower.options) as running:
        stored(running, client, DURABLE)
        yield running


@pytest.fixture(scope="module")
def second(node: Node, client: Client, first: Engine) -> Iterator[Engine]:
    """Its own cache has 12 pages; the first is killed for it, and the node."""
    first.kill()
    at_rest(client)
    node.restart()
    options = ["--num-gpu-blocks-override", "13"]
    log = node.folder / "second.log"
    with engine(checkpoint(), log, connector(node), max_model_len=1024, options=options) as running:
        joined(client)
        yield running


@pytest.fixture(autouse=True)
def _in_order(node: Node, client: Client) -> Iterator[None]:
    yield
    at_rest(client)
    for log in node.folder.glob("*.log"):
        assert "unexpected" not in log.read_text(errors="replace")
        assert "vLLM goes on without it" not in log.read_text(errors="replace")


# -- the first engine -------------------------------------------------------------------------------------------


def test_cold_and_from_dram(plain: Engine, first: Engine) -> None:
    tokens = prompt(2, 600)
    true, before = reference(plain, tokens), first.metrics()
    same(first.complete(tokens), true.cold)
    same(first.complete(tokens), true.warm)  # from its own cache
    found = ask(first, tokens, **TOLD)
    same(found, true.warm)
    assert source(found) == (512, 0)
    after = eventually(lambda: _counted(first, "kvtide_loads_total", before))
    grown = {name: after[name] - before[name] for name in before if "kvtide" in name or "external" in name}
    assert grown["vllm:kvtide_store_bytes_total"] == grown["vllm:kvtide_load_bytes_total"] == 2 * BYTES
    assert grown["vllm:kvtide_failed_total"] == grown["vllm:kvtide_missed_total"] == 0
    assert grown["vllm:external_prefix_cache_hits_total"] == 512


def test_an_answer_says_why_its_blocks_were_hits_or_misses(first: Engine, client: Client) -> None:
    tokens = prompt(77, 600)
    stored(first, client, tokens)
    asks: dict[str, Any] = {"kv_transfer_params": {"max_load_ms": 30_000, "explain": True}}
    found = ask(first, [*tokens, *prompt(78, 300)], **asks)
    told = found.body["kv_transfer_params"]["kvtide"]["explanation"]
    assert told["hits"] == {"dram": 2}
    assert sum(told["misses"].values()) == 1
    name = found.body["id"]
    assert told["request"].startswith(f"{name}-"), "vLLM continues the name that its client knows"


def _counted(running: Engine, name: str, before: dict[str, float]) -> dict[str, float]:
    """All figures, when that one has grown."""
    found = running.metrics()
    return found if found[f"vllm:{name}"] > before[f"vllm:{name}"] else {}


def test_a_request_is_one_line_of_a_recording(first: Engine, node: Node, client: Client) -> None:
    """Whether it is computed or loaded, and though the engine asks for each at every step while it waits."""

    def recorded() -> int:
        found = client.statistics().recorder
        return 0 if found is None else found.requests

    asked = [prompt(30, 600), prompt(30, 600), *(prompt(30, 300) + prompt(31 + i, 300) for i in range(4))]
    before = recorded()
    for tokens in asked[:2]:
        ask(first, tokens, **TOLD)
        at_rest(client)
    first.reset_prefix_cache()
    with ThreadPoolExecutor() as pool:
        list(pool.map(first.complete, asked[2:]))
    at_rest(client)
    eventually(lambda: recorded() >= before + len(asked))
    assert recorded() == before + len(asked)
    lines = (node.folder / "recorded" / "trace-0001.jsonl").read_text().splitlines()[1 + before :]
    found = [json.loads(line)["hash_ids"] for line in lines]
    assert [len(blocks) for blocks in found] == [2] * len(asked)
    assert found[0] == found[1]
    assert len({blocks[0] for blocks in found}) == 1
    assert len({blocks[1] for blocks in found}) == 5


def test_prompts_at_borders(plain: Engine, first: Engine, client: Client) -> None:
    for length in (1, 127, 128, 129, 255, 256, 257):  # a page has 128 tokens
        tokens = prompt(length, length)
        plain.reset_prefix_cache()
        true, warm = plain.complete(tokens), plain.complete(tokens)
        same(ask(first, tokens), true)
        at_rest(client)
        found = hit(first, tokens)
        assert found.cached == length // BLOCK * BLOCK
        if found.cached == warm.cached:
            same(found, warm)
        else:
            # Of a prompt that is there to its end one token is computed, where vLLM's own cache leaves it a whole page:
            # on some processors the last bits depend on how many are computed together.
            assert found.tokens == true.tokens, length
            assert found.logprobs == pytest.approx(true.logprobs, abs=1e-3), length


def test_what_an_engine_has_itself_is_not_loaded(plain: Engine, first: Engine, client: Client) -> None:
    """Its pages end in the middle of a block of ours."""
    tokens = prompt(3, 600)
    true = reference(plain, tokens)
    same(stored(first, client, tokens), true.cold)
    first.reset_prefix_cache()
    first.complete(tokens[:400], kv_transfer_params={"no_load": True})
    found = first.complete(tokens, **TOLD)
    same(found, true.warm)
    assert source(found) == (512 - 384, 0)


def test_generated_blocks_are_stored(plain: Engine, first: Engine) -> None:
    tokens = prompt(4, 200)
    said = first.complete(tokens, 100).tokens
    plain.reset_prefix_cache()
    assert plain.complete(tokens, 100).tokens == said
    follow_up = tokens + said + prompt(5, 20)
    # The last bits of a block depend on whether it was generated, token by token, or computed as a part of a prompt.
    same(hit(first, follow_up), plain.complete(follow_up))


def test_salts_share_nothing(plain: Engine, first: Engine, client: Client) -> None:
    tokens = prompt(6, 300)
    true = reference(plain, tokens)
    salts: list[dict[str, Any]] = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}]
    for salt in salts:
        same(ask(first, tokens, **salt, **READING), true.cold)
        same(stored(first, client, tokens, **salt), true.cold)
    same(hit(first, tokens, cache_salt="a"), true.warm)


def test_the_options_of_a_request(plain: Engine, first: Engine, client: Client) -> None:
    tokens = prompt(7, 300)
    true = reference(plain, tokens)

    def request_with(**options: Any) -> Answer:
        return ask(first, tokens, kv_transfer_params=options)

    same(request_with(no_store=True), true.cold)
    same(request_with(no_store=True), true.cold)
    for refused in ({"tenant": "blue"}, {"no_stor": True}, {"ttl": -1}):
        found = request_with(**refused)
        same(found, true.cold)
        assert next(iter(refused)) in found.body["kv_transfer_params"]["kvtide"]["refused"]
    request_with(ttl=0.001)
    eventually(lambda: request_with(no_store=True).cached == 0)
    same(request_with(ttl=3600, priority=5, pin=True), true.cold)
    assert eventually(lambda: client.statistics().pinned) == 1
    same(request_with(no_load=True), true.cold)
    same(request_with(), true.warm)


def test_who_follows_the_engines_events_knows_what_is_kept(
    first: Engine, node: Node, client: Client, follower: Follower
) -> None:
    """In DRAM and on disk, by the names that vLLM's own pages have; and when a node was away, that it may be gone."""
    tokens = prompt(8, 600)
    ask(first, tokens)

    def told(medium: str) -> dict[Any, dict[str, Any]]:
        """Of that prompt. Events come with the engine's steps."""
        first.complete([1], 1)
        return {page: e for page, e in follower.pages(medium).items() if set(e["token_ids"]) <= set(tokens)}

    def all_told(medium: str) -> bool:
        return told(medium).keys() == own.keys()

    own = eventually(lambda: told("GPU"))
    assert len(own) == 4
    for medium in ("CPU", "STORAGE"):
        eventually(partial(all_told, medium))
        found = told(medium)
        assert [e["block_size"] for e in found.values()] == [128] * 4
        assert [t for e in list(found.values())[::2] for t in e["token_ids"]] == tokens[:512]
    node.restart()
    joined(client)
    eventually(lambda: not told("CPU") and not told("STORAGE"))
    assert hit(first, tokens).cached == 512
    eventually(partial(all_told, "CPU"))
    capture = node.folder / "events.msgpack"
    capture.write_bytes(b"".join(follower.raw))
    assert tuple(own) in [request.blocks for request in read(capture)], "it cannot be replayed"


def test_a_killed_engine_leaves_nothing(node: Node, client: Client, first: Engine) -> None:
    """While it computes what it has reserved room for."""
    group = os.getpgid(first.process.pid)
    others = _shared_memory()  # of processes that have nothing to do with this engine
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(first.complete, prompt(seed, 600)) for seed in (10, 11)]
        eventually(lambda: any(c.reservations for c in client.status().node.clients))
        first.kill()
        assert all(a.exception() is not None for a in asked)
    eventually(lambda: not _members(group))
    at_rest(client)
    eventually(lambda: {c.pid for c in client.status().node.clients} == {os.getpid()})
    assert set(host.memory([node.process.pid])) == set(host.memory([node.process.pid, os.getpid()]))
    assert _shared_memory() <= others


def _shared_memory() -> set[Path]:
    return {file for file in Path("/dev/shm").iterdir() if file.name.startswith("kvtide")}


def _members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, _, its = path.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(its) == group and state != "Z":
                found.append(int(path.name))
    return found


# -- the second engine ------------------------------------------------------------------------------------------


def test_from_disk_after_engine_and_node_were_killed(plain: Engine, second: Engine) -> None:
    true = reference(plain, DURABLE)
    found = hit(second, DURABLE, **READING)
    same(found, true.warm)
    assert source(found) == (0, 512)
    assert second.metrics()["vllm:kvtide_loads_total"] == 1


def test_many_at_once_with_too_few_pages(plain: Engine, second: Engine) -> None:
    """Requests that share prefixes lose their pages to one another. No two batches are alike, so what was generated is
    given to an engine that computes all of it at once, which must find it as probable; and what was stored meanwhile is
    loaded."""
    prompts = [prompt(20 + i % 2, BLOCK) + prompt(30 + i, 100) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda tokens: second.complete(tokens, 48), prompts))
    assert second.metrics()["vllm:num_preemptions_total"] > 0
    for tokens, found in zip(prompts, answers, strict=True):
        assert (found.reason, len(found.tokens)) == ("length", 48)
        true = plain.complete(tokens + found.tokens, 1, prompt_logprobs=0).body["choices"][0]["prompt_logprobs"]
        forced = [true[len(tokens) + i][str(token)]["logprob"] for i, token in enumerate(found.tokens)]
        assert found.logprobs == pytest.approx(forced, abs=1e-3)
    for tokens in prompts[:2]:
        same(hit(second, tokens), reference(plain, tokens).warm)


def test_a_node_that_is_killed(plain: Engine, second: Engine, node: Node, client: Client) -> None:
    tokens = prompt(40, 300)
    true = reference(plain, tokens)
    same(stored(second, client, tokens), true.cold)
    assert client.flush(60)
    node.kill()
    same(ask(second, tokens), true.cold)
    node.start()
    joined(client)
    found = hit(second, tokens, **READING)
    same(found, true.warm)
    assert sum(source(found)) == BLOCK


def test_a_node_that_hangs(plain: Engine, second: Engine, node: Node, client: Client) -> None:
    tokens = prompt(41, 300)
    true = reference(plain, tokens)
    same(stored(second, client, tokens), true.cold)
    node.signal(signal.SIGSTOP)
    try:
        same(ask(second, tokens), true.cold)
        same(ask(second, tokens), true.cold)
    finally:
        node.signal(signal.SIGCONT)
    # The node does not know at once that it was given up, so that nothing tells when all have come back.
    same(hit(second, tokens, **READING), true.warm)


def test_blocks_that_are_corrupt_on_disk(plain: Engine, second: Engine, node: Node, client: Client) -> None:
    tokens = prompt(42, 600)
    true = reference(plain, tokens)
    same(stored(second, client, tokens), true.cold)
    assert client.flush(60)
    node.kill()
    for file in (node.folder / "tier").glob("*.segment"):
        with file.open("r+b") as segment:
            for at in range(1 << 19, file.stat().st_size, 1 << 20):  # several in each block, and none in a header
                segment.seek(at)
                old = segment.read(1)
                segment.seek(at)
                segment.write(bytes([old[0] ^ 1]))
    node.start()
    joined(client)
    before = second.metrics()["vllm:kvtide_failed_total"]
    for _ in range(12):  # the engine may compute before it has the node's answer
        same(ask(second, tokens, **READING), true.cold)
        if client.statistics().tiers["nvme"].failed_reads:
            break
    assert client.statistics().tiers["nvme"].failed_reads > 0
    assert second.metrics()["vllm:kvtide_failed_total"] == before, "what could not be read was promised"
    same(hit(second, tokens), true.warm)  # what was computed is stored again


def test_a_disk_and_memory_without_room(plain: Engine, second: Engine, node: Node, client: Client) -> None:
    """The system refuses the node every byte that it would write, for a while."""
    tokens = prompt(43, 600)
    true = reference(plain, tokens)
    pid, (_, most) = node.process.pid, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    try:
        same(ask(second, tokens), true.cold)
        client.flush(60)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    assert client.statistics().tiers["nvme"].failed_writes > 0
    ask(second, tokens)
    same(hit(second, tokens), true.warm)


def test_a_load_that_takes_longer_than_it_may(plain: Engine, second: Engine, node: Node, client: Client) -> None:
    tokens = prompt(44, 300)
    true = reference(plain, tokens)
    same(stored(second, client, tokens), true.cold)
    node.restart()
    joined(client)
    same(ask(second, tokens, kv_transfer_params={"max_load_ms": 0, "no_store": True}), true.cold)
    same(hit(second, tokens, **READING), true.warm)
