"""What clients may ask for: what cannot be done is refused by name, and never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtide.serve.openai_api import ApiError, ChatRequest, CompletionRequest, parse

TALK = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> ChatRequest:
    return parse(json.dumps({"messages": TALK} | more).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", 2, "n is 2; this server can do 1 only"),
        ("n", True, "n is true"),
        ("logprobs", True, "can do false only"),
        ("frequency_penalty", 0.5, "can do 0 only"),
        ("tools", [{"type": "function"}], r"can do \[\] only"),
        ("tool_choice", "required", 'can do "none" or "auto" only'),
        ("response_format", {"type": "json_object"}, "response_format"),
        ("logit_bias", {"50256": -100}, "logit_bias"),
        ("temprature", 1, "did you mean temperature?"),
        ("top_k", 5, "does not know the parameter top_k"),
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", "ten", "Expected `int"),
        ("temperature", 2.5, "<= 2"),
        ("top_p", 0, "> 0"),
        ("seed", 2**70, "seed"),
        ("stop", "", "length >= 1"),
        ("stop", ["a", ""], "length >= 1"),
        ("stop", ["a", "b", "c", "d", "e"], "length <= 4"),
        ("stop", "x" * 1025, "length <= 1024"),
        ("stop", ["a", "x" * 1025], "length <= 1024"),
        ("stream", "yes", "Expected `bool`"),
        ("stream_options", {"include_use": True}, "unknown field `include_use`"),
        ("cache_salt", "", "length >= 1"),
        ("cache_salt", "x" * 1025, "length <= 1024"),
        ("turn", "tools", "Invalid enum value"),
        ("returns_in", 0, "> 0.0"),
        ("returns_in", "18", "Expected `float | null`"),
        ("messages", [], "length >= 1"),
        ("messages", TALK * 2049, "length <= 2048"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}], "length <= 2048"),
        ("logit_bias", {str(n): 0 for n in range(100_000)}, "logit_bias"),
        ("n", 10**400, "can do 1 only"),
        ("messages", [{"content": "hi"}], "role"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "Invalid value 'image_url'"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "tool_calls"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, value: Any, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        chat(**{name: value})
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == name
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_what_a_client_sent_is_not_told_again_at_length() -> None:
    for name, value in [("x" * 100_000, 1), ("n", "y" * 100_000)]:
        with pytest.raises(ApiError) as caught:
            chat(**{name: value})
        assert len(str(caught.value.body)) < 1000


def test_a_prompt_must_be_there() -> None:
    with pytest.raises(ApiError, match="prompt") as caught:
        parse(b"{}", CompletionRequest)
    assert caught.value.body["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([[]] * 129, "129 prompts; send 128 at most"),
        ([[1]] * 100_000, "100000 prompts"),
        ([1, [], "a"], "one kind"),
        (["a", *[[]] * 100_000], "one kind"),
        ([1, *[[]] * 100_000], "100000 prompts"),
    ],
)
def test_too_many_prompts_are_refused_before_they_are_decoded(prompt: Any, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("prompt", ["[[", ["a[[", "[" * 200], [[1], [2]], [1, 2], '"["'])
def test_prompts_of_all_kinds_are_decoded(prompt: Any) -> None:
    assert parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest).prompt == prompt


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": [{"role": "\xff"}]}', b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="not a JSON object") as caught:
        parse(body, ChatRequest)
    assert caught.value.status == 400


def test_null_is_as_if_it_were_not_given() -> None:
    nothing = dict.fromkeys(["n", "tools", "stop", "max_tokens", "seed", "stream", "cache_salt", "verbosity"])
    assert chat(**nothing) == chat()


def test_what_changes_nothing_may_be_said() -> None:
    said = chat(user="me", store=True, metadata={"a": "b"}, n=1, presence_penalty=0.0, tools=[], logprobs=False)
    assert said == chat()


def test_a_message_is_its_text_in_whatever_form() -> None:
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    answered = {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None}
    found = chat(messages=[{"role": "user", "content": parts}, answered]).messages
    assert [message.text for message in found] == ["one, two", "ok"]


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="x").stops == ["x"]
    assert chat(stop=["x", "y"]).stops == ["x", "y"]
    assert chat().stops == []
