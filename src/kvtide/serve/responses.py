"""Response formats of OpenAI's chat and completions endpoints, complete or streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from kvtide.serve.generation import Answered

__all__ = ["DONE", "Answers", "ChatAnswers", "TextAnswers", "event"]

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One server-sent event of a stream."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class Answers:
    """Formats the outputs of one request."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    piece_kind: ClassVar[str]

    def __init__(self, model: str, usage: bool, name: str = "") -> None:
        """``usage``: whether a stream reports the token usage at its end. ``name``: that of the request."""
        self._head = {"id": name or self.request_name(), "created": int(time.time()), "model": model}
        self._usage = usage

    @classmethod
    def request_name(cls) -> str:
        """A name for a request."""
        return cls.prefix + secrets.token_hex(16)

    def whole(self, texts: Sequence[str], ends: Sequence[Answered]) -> bytes:
        choices = [
            {"index": i, "logprobs": None, "finish_reason": end.finish} | self._complete(text)
            for i, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        whole = {"object": self.whole_kind, "choices": choices, "usage": _usage(ends)} | _explanation(ends)
        return msgspec.json.encode(self._head | whole)

    def opening(self, number: int) -> bytes:
        """The event before the first piece of an output."""
        return b""

    def piece(self, number: int, text: str) -> bytes:
        return self._event(number, self._piece(text), None)

    def end(self, number: int, end: Answered) -> bytes:
        return self._event(number, self._piece(None), end.finish, _explanation([end]))

    def closing(self, ends: Sequence[Answered]) -> bytes:
        """The events after the last output."""
        usage = {"object": self.piece_kind, "choices": [], "usage": _usage(ends)}
        return (event(self._head | usage) if self._usage else b"") + DONE

    def _event(
        self, number: int, content: dict[str, Any], finish: str | None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": number, "logprobs": None, "finish_reason": finish} | content
        usage = {"usage": None} if self._usage else {}
        return event(self._head | {"object": self.piece_kind, "choices": [choice]} | usage | dict(more or {}))

    def _complete(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, text: str | None) -> dict[str, Any]:
        """None: the output is complete."""
        raise NotImplementedError


class ChatAnswers(Answers):
    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def opening(self, number: int) -> bytes:
        return self._event(number, {"delta": {"role": "assistant", "content": ""}}, None)

    def _complete(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}


class TextAnswers(Answers):
    prefix = "cmpl-"
    whole_kind = "text_completion"
    piece_kind = "text_completion"

    def _complete(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}


def _explanation(ends: Sequence[Answered]) -> dict[str, Any]:
    """Why blocks of the first prompt were hits or misses, if it asked for that: where vLLM says it."""
    if not ends or ends[0].explanation is None:
        return {}
    return {"kv_transfer_params": {"kvtide": {"explanation": ends[0].explanation}}}


def _usage(ends: Sequence[Answered]) -> dict[str, Any]:
    prompt, completion = sum(end.prompt for end in ends), sum(end.completion for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached for end in ends)},
    }
