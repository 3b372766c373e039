"""The requests of OpenAI's API that this server accepts, and its errors.

Ignoring a parameter that would change the output gives a wrong output. So each parameter is in one of four classes:
those that are implemented (the structs), those that change nothing here (``_IDLE``), those that are accepted with one
value only (``_USUAL``), and the rest, which is an error that names the parameter. A parameter that is null counts as
not given.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvtide.plan.usage_tracker import Turn

__all__ = [
    "ONE_KIND",
    "PROMPTS",
    "ApiError",
    "ApiRequest",
    "ChatRequest",
    "CompletionRequest",
    "Message",
    "parse",
    "too_many_prompts",
]


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


_MESSAGES = 2048
"""Maximum messages of a conversation, and parts of a message."""

PROMPTS = 128
"""Maximum prompts of one request."""
ONE_KIND = "prompt has texts, numbers and lists side by side; give one kind of them"


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against observers of encrypted packet lengths; not implemented."""


Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Each token of an output is compared with each stop string. OpenAI accepts four of them."""


class TransferParams(Struct, frozen=True, forbid_unknown_fields=True):
    """Options for kvtide, under the name that vLLM has for them."""

    explain: bool = False
    """Say in the response why blocks of the prompt were hits or misses."""


class ApiRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both endpoints."""

    model: str = ""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    turn: Turn | None = None
    returns_in: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Hints about the prompt's next use: see ``Session.expect``."""
    kv_transfer_params: TransferParams = TransferParams()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ContentPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text part of a message. Images and audio are not supported."""

    text: str


class Message(Struct, forbid_unknown_fields=True):
    """A message, as written by a client or copied from a response."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=_MESSAGES)] | None = None
    name: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])


class ChatRequest(ApiRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class CompletionRequest(ApiRequest, kw_only=True):
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


_IDLE = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Parameters that cannot change the output of this server."""

_USUAL: dict[str, list[Any]] = {
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "modalities": [["text"]],
    "n": [1],
    "presence_penalty": [0],
    "response_format": [{"type": "text"}],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
}
"""Parameters that must have one of these values, or be absent."""

_SHOWN = 100
"""Characters of a client's input that an error repeats."""
_SHOWN_ERROR = 500
_USUAL_LENGTH = 1000
"""Maximum bytes of such a value as JSON."""

T = TypeVar("T", bound=ApiRequest)


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a request body. Raises ApiError if it is invalid."""
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from error
    known = {field.name for field in msgspec.structs.fields(kind)}
    wanted: dict[str, msgspec.Raw] = {}
    for name, value in given.items():
        text = memoryview(value)
        if bytes(text[:5]) == b"null" or name in _IDLE:
            continue
        if name in _USUAL:
            if not _is_usual(name, text):
                shown = bytes(text[:_SHOWN]).decode(errors="replace")
                said = f"{name} is {shown}; this server can do {_or(_USUAL[name])} only"
                raise ApiError(400, said, name, "unsupported_value")
        elif name in known:
            wanted[name] = value
        else:
            shown = name[:_SHOWN]
            near = get_close_matches(shown, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ApiError(400, f"this server does not know the parameter {shown}; {hint}", shown, "unknown_parameter")
    if "prompt" in wanted:
        _check_prompt(bytes(wanted["prompt"]))
    try:
        return msgspec.json.decode(msgspec.json.encode(wanted), type=kind)
    except msgspec.ValidationError as error:
        text_of = str(error)[:_SHOWN_ERROR]
        found = re.search(r"\$\.(\w+)", text_of) or re.search(r"missing required field `(\w+)`", text_of)
        raise ApiError(400, text_of.replace("$.", ""), found[1] if found else None, "invalid_value") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from error


def _not_json(error: Exception) -> ApiError:
    return ApiError(400, f"the body is not a JSON object: {error}")


def _check_prompt(text: bytes) -> None:
    """Refuse a prompt, as JSON, that would be decoded into millions of lists."""
    if b'"' not in text:
        if (count := text.count(b"[") - 1) > PROMPTS:
            raise too_many_prompts(count)
    elif text.startswith(b"["):
        try:
            msgspec.json.decode(text, type=list[str])
        except msgspec.MsgspecError as error:
            raise ApiError(400, ONE_KIND, "prompt", "invalid_value") from error


def too_many_prompts(count: int) -> ApiError:
    return ApiError(400, f"there are {count} prompts; send {PROMPTS} at most", "prompt", "invalid_value")


def _is_usual(name: str, text: memoryview) -> bool:
    """Whether a parameter, as JSON, has an accepted value. Long values do not, and are not decoded."""
    if len(text) > _USUAL_LENGTH:
        return False
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return any(value == usual and isinstance(value, bool) == isinstance(usual, bool) for usual in _USUAL[name])


def _or(values: list[Any]) -> str:
    return " or ".join(msgspec.json.encode(value).decode() for value in values)
