"""Converts a request to asks: its prompts as tokens, checked against the model's context length."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from blake3 import blake3
from jinja2 import TemplateError

from kvtide import Tenant
from kvtide.engines.transformers.loading import LoadedModel
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.serve.generation import Ask, Sampling
from kvtide.serve.openai_api import ONE_KIND, PROMPTS, ApiError, ChatRequest, CompletionRequest, too_many_prompts

__all__ = ["RequestReader"]

_COMPLETION = 16
"""Default tokens of a completion, as in OpenAI's API."""
_CHARACTERS = 16
"""Maximum characters of a text per token of the context: real texts have three to six per token. Longer texts are
refused before they are tokenised, which takes a second and a hundred bytes of memory for each of a million characters.
"""


class RequestReader:
    """Validates and tokenises requests for a model. Thread-safe."""

    def __init__(self, loaded: LoadedModel, limit: int | None = None) -> None:
        """``limit``: maximum tokens of an output, if less than the model's own limit."""
        self._loaded = loaded
        self._limit = loaded.context if limit is None else min(limit, loaded.context)
        embeddings: Any = loaded.model.get_input_embeddings()
        self._vocabulary = len(embeddings.weight)

    def asks(self, request: ChatRequest | CompletionRequest, name: str = "") -> list[Ask]:
        """The prompts and settings for the model. ``name`` is that of the request. Raises ApiError."""
        if request.model not in ("", self._loaded.name):
            text = f"there is no model {request.model[:100]!r} here; there is {self._loaded.name!r}"
            raise ApiError(404, text, "model", "model_not_found")
        sampling = Sampling(request.temperature, request.top_p, request.seed)
        tenant = DEFAULT_TENANT if request.cache_salt is None else _salted(request.cache_salt)
        if isinstance(request, ChatRequest):
            prompts, most = [self._chat(request)], request.max_completion_tokens or request.max_tokens
        else:
            prompts, most = self._prompts(request), request.max_tokens or min(_COMPLETION, self._limit)
        return [
            Ask(
                array("q", tokens),
                self._room(tokens, most),
                request.stops,
                sampling,
                tenant,
                request.turn,
                request.returns_in,
                f"{name}-{number}" if name else "",
                request.kv_transfer_params.explain,
            )
            for number, tokens in enumerate(prompts)
        ]

    def _chat(self, request: ChatRequest) -> list[int]:
        if self._loaded.tokenizer.chat_template is None:
            raise ApiError(400, f"{self._loaded.name} has no chat template; use /v1/completions", "messages")
        talk = [
            {"role": message.role, "content": message.text} | ({"name": message.name} if message.name else {})
            for message in request.messages
        ]
        self._check_length(sum(len(str(value)) for message in talk for value in message.values()), "messages")
        try:
            found = self._loaded.tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ApiError(400, f"the model's chat template refuses these messages: {error}", "messages") from error
        return list(found["input_ids"])

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        """The tokens of each prompt: given as a text, several texts, tokens, or several lists of tokens."""
        given: Sequence[Any] = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        kinds = {type(each) for each in given}
        if len(kinds) != 1:
            raise ApiError(400, ONE_KIND, "prompt")
        if kinds != {int} and len(given) > PROMPTS:
            raise too_many_prompts(len(given))
        if kinds == {str}:
            for text in given:
                self._check_length(len(text), "prompt")
            return [self._loaded.tokenizer(text)["input_ids"] for text in given]
        prompts = [list(given)] if kinds == {int} else list(given)
        for tokens in prompts:
            if len(tokens) <= self._loaded.context and not all(0 <= token < self._vocabulary for token in tokens):
                wrong = next(token for token in tokens if not 0 <= token < self._vocabulary)
                raise ApiError(400, f"{wrong} is not a token: they go from 0 to {self._vocabulary - 1}", "prompt")
        return prompts

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit, before it is tokenised."""
        if characters > (most := self._loaded.context * _CHARACTERS):
            raise ApiError(
                400,
                f"the prompt has {characters} characters; {self._loaded.name} can attend to {self._loaded.context} "
                f"tokens, and this server takes {most} characters for that; shorten the prompt",
                param,
                "context_length_exceeded",
            )

    def _room(self, tokens: Sequence[int], most: int | None) -> int:
        """The maximum tokens of the output."""
        if not tokens:
            raise ApiError(400, "the prompt is empty; it must have one token at least", "prompt")
        if most is not None and most > self._limit:
            raise ApiError(400, f"an answer has at most {self._limit} tokens here, not {most}", "max_tokens")
        room = self._loaded.context - len(tokens)
        if room < (most or 1):
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens and its answer {most or 'at least 1'}, which is more than the "
                f"{self._loaded.context} that {self._loaded.name} can attend to; shorten one of them",
                "messages" if most is None else "max_tokens",
                "context_length_exceeded",
            )
        return min(room, self._limit) if most is None else most


def _salted(salt: str) -> Tenant:
    """A tenant that shares blocks only with requests that have the same salt."""
    return Tenant("salted", blake3(salt.encode(), derive_key_context="kvtide 1 cache salt").digest())
