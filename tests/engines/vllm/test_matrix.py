"""What a deployment may be besides the plain case: ranks, adapters, options, packings, and sudden ends of each process.

A small random model serves here, because every case starts engines of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from kvtide import config as configuration
from kvtide.block import Group, Kind, Layout
from kvtide.engines.identity import settings
from kvtide.engines.paged import packing
from kvtide.index.keys import Model
from kvtide.index.weights_identity import identify
from kvtide.node.client.client import Client
from kvtide.node.client.launch import open_node
from tests.engines.vllm.checkpoints import random_llama
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
    same,
    source,
)
from tests.node.serving import eventually

pytestmark = pytest.mark.long
LAYERS, HEADS, DIM = 4, 2, 64
"""Of the random Llama."""


def alone(running: Engine, tokens: Sequence[int], **extra: Any) -> Answer:
    """The answer of an engine that neither loads nor stores: what this engine says without us."""
    return ask(running, tokens, kv_transfer_params={"no_load": True, "no_store": True}, **extra)


def alike(found: Answer, true: Answer, cached: int) -> None:
    """KV was computed in other sums, by an engine of other ranks, or in other chunks."""
    assert (found.cached, found.reason) == (cached, true.reason)
    assert found.tokens == true.tokens
    assert found.logprobs == pytest.approx(true.logprobs, abs=1e-3)


@pytest.mark.timeout(1800)
def test_ranks_share_a_cache(tmp_path: Path, node: Node) -> None:
    """Also where there are more ranks than heads: then some write nothing."""
    written: list[list[int]] = []
    for turn, ranks in enumerate((1, 2, 4, 1)):
        options = ["--tensor-parallel-size", str(ranks)]
        with engine(random_llama(), tmp_path / f"{turn}.log", connector(node), options=options) as running:
            for tokens in written:
                found = hit(running, tokens, **READING)
                alike(found, alone(running, tokens), 512)
                assert sum(source(found)) == 512
            tokens = prompt(50 + turn, 600)
            same(ask(running, tokens), alone(running, tokens))
            alike(hit(running, tokens), alone(running, tokens), 512)
            written.append(tokens)


@pytest.mark.parametrize(
    "options",
    [
        ("--no-enable-prefix-caching",),
        ("--max-num-batched-tokens", "256", "--max-num-seqs", "8"),  # a prompt is computed in parts
        ("--max-num-batched-tokens", "100", "--max-num-seqs", "8"),  # and none of them ends with a page
        ("--block-size", "32"),
        ("--async-scheduling",),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'),
    ],
    ids=lambda options: options[0].strip("-") + ("-100" if "100" in options else ""),
)
def test_options(tmp_path: Path, node: Node, options: Sequence[str]) -> None:
    with engine(random_llama(), tmp_path / "engine.log", connector(node), options=options) as running:
        tokens = prompt(60, 600)
        true = alone(running, tokens)
        alike(ask(running, tokens), true, 0)
        alike(hit(running, tokens), true, 512)
        said = ask(running, prompt(61, 200), 100).tokens
        follow_up = prompt(61, 200) + said + prompt(62, 20)
        alike(hit(running, follow_up), alone(running, follow_up), BLOCK)
        prompts = [tokens[: 256 * (1 + i % 2)] + prompt(70 + i, 90) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda some: running.complete(some, 16), prompts))
        assert all(a.reason == "length" for a in answers)


def test_adapters_share_nothing(tmp_path: Path, node: Node) -> None:
    options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules"]
    options += [f"{name}={adapter(tmp_path / name, seed)}" for seed, name in enumerate(("a", "b"))]
    with engine(random_llama(), tmp_path / "engine.log", connector(node), options=options) as running:
        tokens, base = prompt(80, 300), str(random_llama())
        true = {name: alone(running, tokens, model=name) for name in ("a", "b", base)}
        assert len({tuple(a.logprobs) for a in true.values()}) == 3, "the adapters do nothing"
        for name in true:
            same(ask(running, tokens, model=name), true[name])
        for name in true:
            alike(hit(running, tokens, model=name), true[name], BLOCK)


def adapter(folder: Path, seed: int) -> Path:
    """A random LoRA adapter of the random Llama, as peft saves one."""
    folder.mkdir()
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"task_type": "CAUSAL_LM", "lora_dropout": 0.0}))
    numbers, hidden = torch.Generator().manual_seed(seed), 512
    tensors = {}
    for layer in range(LAYERS):
        for part, rows in (("q_proj", hidden), ("v_proj", HEADS * DIM)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=numbers) / 8
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 8, generator=numbers) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_blocks_in_another_packing_are_converted(tmp_path: Path, node: Node) -> None:
    """The same blocks as another engine would have stored them, and those of this one gone."""
    group = Group("full", Kind.FULL, LAYERS, HEADS, DIM, "float32", page=128, packing="vec")
    known = settings(AutoConfig.from_pretrained(random_llama()))
    own = Model(Layout((group,), BLOCK), identify(random_llama()), known)
    other = Model(Layout((replace(group, packing="plain", page=16),), BLOCK), own.weights, known)
    with (
        engine(random_llama(), tmp_path / "engine.log", connector(node)) as running,
        Client(node.path) as client,
        client.session(own) as mine,
        client.session(other) as theirs,
    ):
        tokens = prompt(90, 600)
        true = ask(running, tokens)
        eventually(lambda: client.statistics().counts.get("blocks stored") == 2)
        with mine.match(tokens) as match:
            blocks = [plainly(block, group) for block in mine.load(match).wait().blocks]
        assert len(blocks) == 2
        assert theirs.store(tokens, blocks).stored == 2
        assert mine.drop(tokens) == 2
        found = hit(running, tokens, **READING)
        assert (found.cached, found.tokens, found.logprobs) == (512, true.tokens, true.logprobs)


def plainly(block: memoryview, group: Group) -> bytes:
    """A block in the packing of ``group``, in the plain one."""
    atoms = torch.frombuffer(bytearray(block), dtype=torch.float32)
    atoms = atoms.view(group.layers, 2, group.heads, BLOCK // group.page, group.page, group.head_dim)
    parts = [packing.unpack(atoms[:, value], group.packing, bool(value)) for value in (0, 1)]
    return torch.stack(parts, 1).contiguous().numpy().tobytes()


@pytest.mark.timeout(1800)
def test_each_process_is_killed_while_it_serves(tmp_path: Path, node: Node) -> None:
    """Whatever it was doing. What it stored before is whole, or not there."""
    moments, tokens = random.Random(1), prompt(100, 600)
    for victim in ("APIServer", "EngineCore", "Worker", ""):
        log = tmp_path / f"{victim}.log"
        with engine(random_llama(), log, connector(node)) as running, Client(node.path) as client:
            joined(client)
            if victim != "APIServer":  # the first engine has stored it
                alike(hit(running, tokens, **READING), alone(running, tokens), 512)
            if victim:
                hit(running, tokens)
                at_rest(client)
                killed(running, victim, client, moments.randrange(40))


def killed(running: Engine, victim: str, client: Client, moment: int) -> None:
    """A process of an engine, while it has requests; then what is left of it, for vLLM's others may live on."""
    began = client.status().node.requests
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(running.complete, prompt(moment * 10 + i, 600)) for i in range(4)]
        eventually(lambda: client.status().node.requests > began + moment)
        os.kill(pids(running)[victim], signal.SIGKILL)
        running.kill()
        assert any(a.exception() is not None for a in asked)
    eventually(lambda: len(client.status().node.clients) == 1)
    at_rest(client)


def pids(running: Engine) -> dict[str, int]:
    """The processes of an engine by their names in its log."""
    found = {}
    for line in running.logged().splitlines():
        if line.startswith("("):
            name, _, rest = line[1:].partition(" pid=")
            if rest and name not in found:
                found[name] = int(rest.partition(")")[0])
    return found


def test_an_engine_starts_a_node_of_its_own(tmp_path: Path) -> None:
    """It outlives the engine, however that ends, and serves the next with the same configuration."""
    kept: dict[str, Any] = {"dram": {"budget": "256MiB", "segment": "64MiB"}, "engine": {"store": "through"}}
    kept["nvme"] = {"path": str(tmp_path / "tier"), "budget": "256MiB", "segment": "64MiB", "store": "through"}
    tokens = prompt(110, 600)
    for how in ({}, READING):
        with engine(random_llama(), tmp_path / "engine.log", connector(**kept)) as running:
            found = hit(running, tokens, **TOLD | how)
            alike(found, alone(running, tokens), 512)
            assert sum(source(found)) == 512
    with open_node(configuration.read(**kept)) as client:
        eventually(lambda: len(client.status().node.clients) == 1)
        at_rest(client)
        pid = client.status().node.pid
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
