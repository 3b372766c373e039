"""Engines in processes and folders of their own share a cache through a storage, and so do those that come later."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from transformers import PreTrainedModel

from tests.engines.models import own, padded, prompt, reference, smollm2, tiny
from tests.engines.storages import STORAGES, Storage, opened

ROOT = Path(__file__).parent.parent.parent
BLOCK = 256


class Said(NamedTuple):
    tokens: list[int]
    cached: int
    read: dict[str, int]
    """Blocks read from each tier since the engine started."""


class Engine:
    """A process with memory and a disk of its own."""

    def __init__(self, model: str, storage: Storage, folder: Path) -> None:
        own = {"dram": {"budget": "128MiB"}, "nvme": {"path": str(folder), "budget": "512MiB", "store": "through"}}
        settings = json.dumps({**own, **storage.settings})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.sharing_worker", model, settings],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, tokens: Sequence[int]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(tokens), file=self._process.stdin, flush=True)

    def answer(self) -> Said:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended with {self._process.wait(60)}"
        return Said(**json.loads(line))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def share(name: str, model: PreTrainedModel, prompts: list[torch.Tensor], storage: Storage, folder: Path) -> None:
    """Two engines compute a prompt each, at the same moment, and find the other's; then all is killed, and a third on
    a disk of its own finds both, and so does the first when it comes back."""
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    batches = [padded(tokens) for tokens in prompts]
    ids = [tokens[0].tolist() for tokens in prompts]
    blocks = [len(tokens) // BLOCK for tokens in ids]
    true = [own(model, **batch, **how)[0].tolist() for batch in batches]
    for batch, count, tokens in zip(batches, blocks, true, strict=True):
        assert reference(model, batch, count * BLOCK, **how)[0].tolist() == tokens
    with ExitStack() as stack:

        def start(where: str) -> Engine:
            return stack.enter_context(Engine(name, storage, folder / where))

        engines = [start("first"), start("second")]
        for engine, tokens in zip(engines, ids, strict=True):
            engine.ask(tokens)
        for engine, tokens in zip(engines, true, strict=True):
            assert engine.answer() == Said(tokens, 0, {})
        for engine, tokens in zip(engines, ids[::-1], strict=True):
            engine.ask(tokens)
        for engine, tokens, count in zip(engines, true[::-1], blocks[::-1], strict=True):
            assert engine.answer() == Said(tokens, count * BLOCK, {storage.name: count})
        for engine in engines:
            engine.kill()
        storage.restart()
        engines = [start("first"), start("third")]
        for asked, tokens, count in zip(ids, true, blocks, strict=True):
            for engine in engines:
                engine.ask(asked)
                said = engine.answer()
                assert (said.tokens, said.cached) == (tokens, count * BLOCK)
        assert said.read == {storage.name: sum(blocks)}


@pytest.mark.parametrize(("kind", "sealed"), STORAGES)
def test_engines_share_a_storage(kind: str, sealed: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with opened(kind, sealed, tmp_path, request) as storage:
        share("tiny", tiny(), [prompt(600), prompt(800, seed=2)], storage, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["files", "objects", "valkey"])
def test_a_real_model_answers_the_same(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, tokenizer = smollm2()

    def talk(of: str) -> torch.Tensor:
        text = " ".join(f"The {n}th {of} of the coast was built in the year {1700 + 3 * n}." for n in range(1, 20))
        asked = [{"role": "user", "content": f"{text}\nWhich {of} was built in 1721?"}]
        found: torch.Tensor = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        assert found.shape[1] > BLOCK
        return found

    with opened(kind, True, tmp_path, request) as storage:
        share("smollm2", model, [talk("lighthouse"), talk("harbour")], storage, tmp_path)
