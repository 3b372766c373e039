"""One generation: from the tokens of a prompt to pieces of text, with KV from the store.

The pieces are produced in a stopping criterion: ``generate`` calls it after every token, so it sees each token at once,
and can end the generation at that token, because of a stop string or because the client has left. (A streamer gets the
token later, and cannot stop the generation.) A prefill cannot be interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtide import Tenant
from kvtide.engines.transformers.attached import Attached
from kvtide.engines.transformers.loading import LoadedModel
from kvtide.plan.usage_tracker import Turn
from kvtide.serve.text import Decoder, Stops

__all__ = ["Answered", "Ask", "GenerationEngine", "Sampling"]

log = logging.getLogger("kvtide.serve")

_GREEDY = 1e-3
"""Lower temperatures mean greedy decoding: logits divided by them become infinite, and sampling from those breaks the
GPU context."""


class Sampling(NamedTuple):
    """Sampling parameters. None means the model's own default from its files, or OpenAI's."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class Ask(NamedTuple):
    """A prompt and the options of its generation."""

    tokens: Sequence[int]
    most: int
    """Maximum tokens of the output."""
    stop: Sequence[str]
    sampling: Sampling
    tenant: Tenant
    turn: Turn | None = None
    returns_in: float | None = None
    """Hints about the next use of the prompt and its output."""
    request: str = ""
    """The name of the request, for ``kvtide explain``."""
    explain: bool = False
    """Whether the result has an ``explanation``."""


class Answered(NamedTuple):
    """The result of a completed generation."""

    finish: Literal["stop", "length"]
    prompt: int
    """Tokens of the prompt."""
    completion: int
    """Tokens of the output, including the one that ended it."""
    cached: int
    """Tokens of the prompt that were not computed."""
    explanation: Mapping[str, object] | None = None
    """Why blocks of the prompt were hits or misses; None if nobody asked, or nothing was looked up."""


class _Voice(StoppingCriteria):
    """Passes on the text of an output as its tokens are generated."""

    def __init__(self, tokenizer: Any, ask: Ask, say: Callable[[str], None], left: Callable[[], bool]) -> None:
        self._decoder = Decoder(partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        self.stops = Stops(ask.stop)
        self._seen = len(ask.tokens)
        self._say = say
        self._left = left

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        for token in input_ids[0, self._seen :].tolist():
            self._tell(self.stops.put(self._decoder.put(token)))
        self._seen = input_ids.shape[1]
        return torch.full((1,), self.stops.met or self._left(), device=input_ids.device)

    def end(self) -> None:
        """Pass on the text that was held back."""
        self._tell(self.stops.put(self._decoder.end()) + self.stops.end())

    def _tell(self, text: str) -> None:
        if text:
            self._say(text)


class GenerationEngine:
    """A model with a store. Runs one generation at a time."""

    def __init__(self, loaded: LoadedModel, attached: Attached) -> None:
        self.loaded = loaded
        self._attached = attached
        end = loaded.model.generation_config.eos_token_id
        self._ends = set(end if isinstance(end, list) else [end])

    def answer(self, ask: Ask, say: Callable[[str], None], left: Callable[[], bool]) -> Answered:
        """Generate, passing each piece of text to ``say``. Ends early if ``left`` returns True: the client has left."""
        voice = _Voice(self.loaded.tokenizer, ask, say, left)
        prompt = torch.tensor([list(ask.tokens)], device=self.loaded.model.device)
        output, report = self._attached.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=ask.most,
            stopping_criteria=StoppingCriteriaList([voice]),
            tenant=ask.tenant,
            turn=ask.turn,
            returns_in=ask.returns_in,
            request=ask.request,
            **self._choice(ask.sampling),
        )
        voice.end()
        new = output[0, len(ask.tokens) :].tolist()
        ended = voice.stops.met or new[-1] in self._ends
        finish: Literal["stop", "length"] = "stop" if ended else "length"
        return Answered(finish, len(ask.tokens), len(new), sum(report.cached), self._explained(ask))

    def _explained(self, ask: Ask) -> Mapping[str, object] | None:
        if not ask.explain:
            return None
        try:
            found = self._attached.explain_request(ask.request, ask.tenant)
        except Exception as e:  # noqa: BLE001 - the generation has succeeded: it is not lost for want of a reason
            log.info("kvtide has no explanation for request %s: %s", ask.request, e)
            return None
        return None if found is None else found.summary()

    def _choice(self, sampling: Sampling) -> dict[str, Any]:
        """The sampling arguments of ``generate``; also seeds the random generator."""
        own = self.loaded.model.generation_config
        temperature = _first(sampling.temperature, own.temperature, 1.0)
        if temperature < _GREEDY:
            return {"do_sample": False}
        if sampling.seed is None:
            torch.seed()  # the last request may have set a seed
        else:
            torch.manual_seed(sampling.seed)
        top_p, top_k = _first(sampling.top_p, own.top_p, 1.0), _first(own.top_k, 0)
        return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def _first(*values: float | None) -> Any:
    return next(value for value in values if value is not None)
