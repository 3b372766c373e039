"""Models whose layers do not all see all tokens, in a real engine: each answers as without kvtide, or says why not.

The reference has no connector, and as many tokens of the prompt in its own cache. Prompts are computed in parts that
end at no border of pages, so that a window passes over a block before the block is whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtide.node.client.client import Client
from tests.engines.vllm.checkpoints import random_llama, random_model
from tests.engines.vllm.engines import Answer, Engine, engine
from tests.engines.vllm.kept import BLOCK, READING, Node, ask, connector, hit, prompt, same, source, stored

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PARTS = ("--max-num-batched-tokens", "300", "--max-num-seqs", "8")
ALIKE = ("--disable-hybrid-kv-cache-manager",)
"""With it vLLM keeps all tokens of all layers, in one group."""


def alike(found: Answer, true: Answer) -> None:
    """As near as sums in another order are."""
    assert found.tokens == true.tokens
    assert found.logprobs == pytest.approx(true.logprobs, abs=1e-3)


class Pair(NamedTuple):
    """Engines of one model, without kvtide and with it."""

    plain: Engine
    kept: Engine

    def later(self, tokens: list[int], border: int) -> tuple[Answer, Answer]:
        """The answers to a prompt of which so many tokens were computed before."""
        self.plain.reset_prefix_cache()
        self.plain.complete([*tokens[:border], 1], 1)
        return self.plain.complete(tokens), hit(self.kept, tokens, **READING)


def pair(stack: ExitStack, model: Path, node: Node, options: Sequence[str]) -> Pair:
    start = [
        engine(model, node.folder / f"{name}.log", its, options=options)
        for name, its in (("plain", None), ("kept", connector(node)))
    ]
    return Pair(*(stack.enter_context(one) for one in start))


@pytest.mark.parametrize(
    ("kind", "groups", "options"),
    [("window-and-full", 4, ()), ("window", 1, ()), ("chunk-and-full", 4, ()), ("chunk-and-full", 1, ALIKE)],
    ids=["window-and-full", "window", "chunk-and-full", "chunk-as-full"],
)
def test_a_prefix_is_whole_at_every_border(node: Node, kind: str, groups: int, options: Sequence[str]) -> None:
    with ExitStack() as stack, Client(node.path) as client:
        both = pair(stack, random_model(kind), node, [*PARTS, *options])
        first = prompt(1, 1100)
        same(stored(both.kept, client, first, 4 * groups), ask(both.plain, first))
        for border in range(BLOCK, 1100, BLOCK):
            true, found = both.later(first[:border] + prompt(border, 60), border)
            same(found, true)
            assert sum(source(found)) == border
            other = ask(both.plain, prompt(2, border) + prompt(border, 60))
            assert other.logprobs != true.logprobs, "what came before does not matter to this model"
        said = ask(both.plain, prompt(3, 200), 150).tokens
        assert stored(both.kept, client, prompt(3, 200), groups, 150).tokens == said
        follow_up = prompt(3, 200) + said + prompt(4, 20)
        true, found = both.later(follow_up, BLOCK)  # which computes at once what here was generated
        alike(found, true)
        assert found.cached == BLOCK
        whole = prompt(5, 2 * BLOCK)
        true = stored(both.kept, client, whole, 2 * groups)
        found = hit(both.kept, whole, **READING)
        alike(found, true)
        assert found.cached >= BLOCK
        node.restart()
        true, found = both.later(first[: 3 * BLOCK] + prompt(6, 60), 3 * BLOCK)
        same(found, true)


DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("kind", "why"),
    [("state-and-full", "MambaSpec"), ("mla", "with MLA on this processor"), ("draft", "keeps KV of a draft model")],
)
def test_what_cannot_be_kept_is_served_as_without_kvtide(node: Node, kind: str, why: str) -> None:
    """And one line of the log says why, and what to change."""
    options: Sequence[str] = ["--no-enable-prefix-caching"]  # with it vLLM computes no state on a CPU
    if kind == "draft":
        options = ["--speculative-config", json.dumps(DRAFT | {"model": str(random_llama(2))})]
    model = random_llama() if kind == "draft" else random_model(kind)
    with ExitStack() as stack:
        both = pair(stack, model, node, options)
        for _ in range(2):
            same(both.kept.complete(prompt(1, 600), 20), both.plain.complete(prompt(1, 600), 20))
        assert [line for line in both.kept.logged().splitlines() if "kvtide is off" in line and why in line]
        with Client(node.path) as client:
            assert not client.statistics().counts
