"""``kvtide serve`` as a client sees it: OpenAI's own client over HTTP, and a real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.engines.models import own
from tests.node.serving import eventually
from tests.serve.serving import (
    CATS,
    FOREVER,
    LONG,
    LONG_TALK,
    NAME,
    Served,
    cached,
    smollm2,
    talk_of,
    text_of,
    tokens_of,
)
from tests.test_docs import ROOT, code


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """For tests that leave it as it was."""
    with Served() as served:
        yield served


def plain(tokens: list[int], most: int = 12) -> list[int]:
    """What the model answers without us, greedily."""
    prompt = torch.tensor([tokens])
    found = own(
        smollm2().model,
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=most,
        do_sample=False,
    )
    answer: list[int] = found[0, len(tokens) :].tolist()
    return answer


def pieces(stream: Any) -> list[str]:
    """The texts of a stream of chat or completions."""
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    return [(c.delta.content if hasattr(c, "delta") else c.text) or "" for c in choices]


# -- answers ----------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_by_the_model_alone_and_the_second_time_from_the_store(served: Served) -> None:
    prompt = talk_of(LONG_TALK)
    expected = plain(prompt)
    blocks = len(prompt) // 256 * 256
    assert blocks
    for known in (0, blocks):
        answer = served.chat(LONG_TALK)
        assert answer.object == "chat.completion"
        assert answer.model == NAME
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", text_of(expected))
        assert choice.finish_reason == "length"
        assert cached(answer) == known
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected))
        assert usage.total_tokens == len(prompt) + len(expected)


def test_an_answer_that_the_model_ends_says_so(served: Served) -> None:
    tokens = plain(talk_of("What is 2 + 2? Answer with one number."), 60)
    assert tokens[-1] == smollm2().tokenizer.eos_token_id
    answer = served.chat("What is 2 + 2? Answer with one number.", max_tokens=60)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text_of(tokens)
    assert answer.usage.completion_tokens == len(tokens)


def test_prompts_are_texts_or_tokens_one_or_several(served: Served) -> None:
    one, two = "The capital of France is", "Once upon a time"
    expected = [text_of(plain(tokens_of(text), 4)) for text in (one, two)]
    for prompt in ([one, two], [tokens_of(one), tokens_of(two)]):
        answer = served.complete(prompt, max_tokens=4)
        assert answer.object == "text_completion"
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
        assert answer.usage.prompt_tokens == len(tokens_of(one)) + len(tokens_of(two))
        assert answer.usage.completion_tokens == 8
    for single in (one, [one], tokens_of(one), [tokens_of(one)]):
        assert [choice.text for choice in served.complete(single, max_tokens=4).choices] == expected[:1]


def test_a_completion_has_16_tokens_unless_told_otherwise(served: Served) -> None:
    answer = served.client.completions.create(model=NAME, prompt="Once upon a time", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("text", [LONG_TALK, CATS])
def test_a_stream_says_the_same(served: Served, text: str) -> None:
    whole = served.chat(text)
    chunks = list(served.chat(text, stream=True, stream_options={"include_usage": True}))
    *said, end, usage = chunks
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(pieces(chunks)) == whole.choices[0].message.content
    assert {chunk.choices[0].finish_reason for chunk in said} == {None}
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == []
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert cached(usage) == len(talk_of(text)) // 256 * 256
    assert {chunk.id for chunk in chunks} == {usage.id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_streams_of_several_prompts_are_told_apart(served: Served) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    whole = served.complete(prompts, max_tokens=4)
    texts, ends = ["", ""], []
    for chunk in served.complete(prompts, max_tokens=4, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
        assert chunk.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [0, 1]


def test_characters_come_whole(served: Served) -> None:
    said = pieces(served.chat(CATS, stream=True, max_tokens=9))
    assert len(tokens_of("🐱🐱")) > 2, "a character of several tokens"
    assert "".join(said) == text_of(plain(talk_of(CATS), 9))
    assert set(said) == {"", "🐱"}


@pytest.mark.parametrize("several", [False, True])
def test_an_answer_ends_before_a_stop_string_and_no_part_of_it_is_told(served: Served, several: bool) -> None:
    text = served.complete(LONG).choices[0].text
    stop = text[5:11]
    before = text.partition(stop)[0]
    wanted: Any = ["never said", stop] if several else stop
    answer = served.complete(LONG, stop=wanted)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
    assert answer.usage.completion_tokens < 12
    assert "".join(pieces(served.complete(LONG, stop=wanted, stream=True))) == before


def test_a_seed_makes_chance_repeatable(served: Served) -> None:
    def said(**more: Any) -> str:
        return str(served.complete("Once upon a time", temperature=1.5, max_tokens=6, **more).choices[0].text)

    assert said(seed=1) == said(seed=1)
    assert len({said(seed=seed) for seed in range(4)} | {said(), said()}) > 3, "always the same"
    assert said(top_p=1e-6) == served.complete("Once upon a time", max_tokens=6).choices[0].text


def test_a_temperature_that_is_almost_none_is_none(served: Served) -> None:
    """Logits divided by it would be infinite."""
    cold, colder = (served.complete("Once upon a time", temperature=t).choices[0].text for t in (0, 1e-40))
    assert cold == colder


# -- who shares what --------------------------------------------------------------------------------------


def test_salts_share_nothing(served: Served) -> None:
    def known(**more: Any) -> int:
        return cached(served.complete(f"Of salts. {LONG}", max_tokens=1, **more))

    salts: list[dict[str, Any]] = [{}, {"extra_body": {"cache_salt": "blue"}}, {"extra_body": {"cache_salt": "green"}}]
    assert [known(**salt) for salt in salts] == [0, 0, 0]
    assert all(known(**salt) >= 256 for salt in salts)


def test_what_a_client_knows_of_the_next_use_reaches_the_store(served: Served) -> None:
    hint = {"turn": "tool", "returns_in": 18}
    served.complete(f"Of tools. {LONG}", max_tokens=1, extra_body=hint)
    eventually(lambda: 'kvtide_hints_total{kind="tool"} 1' in served.http.get("/metrics").text)
    assert 'kvtide_hints_total{kind="returns_in"} 1' in served.http.get("/metrics").text
    assert 'kvtide_hints_total{kind="end"} 0' in served.http.get("/metrics").text


def test_a_request_that_asks_is_told_why_its_blocks_were_hits_or_misses(served: Served) -> None:
    ask = {"kv_transfer_params": {"explain": True}}
    assert "kv_transfer_params" not in served.complete(f"Of reasons. {LONG}", max_tokens=1).model_extra
    answer = served.complete(f"Of reasons. {LONG}", max_tokens=1, extra_body=ask)
    told = answer.model_extra["kv_transfer_params"]["kvtide"]["explanation"]
    assert told["request"] == f"{answer.id}-0"
    assert told["hits"]["dram"] * told["block_tokens"] >= cached(answer) > 0
    with served.store.session(served.attached.identity()) as session:
        found = session.explain_request(answer.id)
        assert found is not None
        assert found.by_tier() == told["hits"]
    pieces = list(served.complete(f"Of reasons. {LONG}", max_tokens=1, extra_body=ask, stream=True))
    (last,) = [piece for piece in pieces if "kv_transfer_params" in (piece.model_extra or {})]
    assert last.model_extra["kv_transfer_params"]["kvtide"]["explanation"]["hits"] == told["hits"]
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        served.complete("x", extra_body={"kv_transfer_params": {"explain": 1}})


def test_a_generation_is_not_lost_for_want_of_a_reason(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("of a newer node")

    monkeypatch.setattr(served.attached, "explain_request", fails)
    answer = served.complete("Of no reason", max_tokens=1, extra_body={"kv_transfer_params": {"explain": True}})
    assert answer.choices[0].finish_reason
    assert "kv_transfer_params" not in answer.model_extra


# -- what is refused --------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_an_error_of_openai(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 2") as caught:
        served.chat("hi", n=2)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError, match="there is 'smollm2'") as missing:
        served.chat("hi", model="gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="top_k"):
        served.chat("hi", extra_body={"top_k": 4})


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"8190 tokens and its answer 3, .* 8192") as caught:
        served.complete([7] * 8190, max_tokens=3)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"at least 1.* 8192") as caught:
        served.chat("word " * 9000, max_tokens=None)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [([7, 49152], "49152 is not a token"), ([-1], "-1 is not"), ("", "empty"), (["a", 1], "one kind")],
)
def test_what_is_no_prompt_is_refused(served: Served, prompt: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        served.complete(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("method", "path", "kind", "status"),
    [
        ("POST", "/v1/chat/completions", "text/plain", 415),
        ("POST", "/v1/embeddings", "application/json", 404),
        ("GET", "/v1/completions", "application/json", 405),
    ],
)
def test_every_error_has_the_shape_of_openai(served: Served, method: str, path: str, kind: str, status: int) -> None:
    answer = served.http.request(method, path, content=b"{}", headers={"Content-Type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_end_is_not_read_to_its_end(served: Served) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    answer = served.http.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_model_that_fails_fails_one_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.engine.failing = True
    try:
        with pytest.raises(openai.InternalServerError, match="ArithmeticError") as caught:
            served.chat("hi")
        assert "secret" not in str(caught.value)
        with pytest.raises(openai.APIError, match="ArithmeticError"):
            list(served.chat("hi", stream=True))
    finally:
        served.engine.failing = False
    assert "secret details" in caplog.text
    assert served.chat("hi", max_tokens=1).usage.completion_tokens == 1


# -- taking turns -----------------------------------------------------------------------------------------


def test_turns_come_in_order(served: Served) -> None:
    before = len(served.engine.answers)
    with served.chat("Tell me a story.", **FOREVER) as running:
        next(iter(running))
        waiting = [served.complete([5] * n, max_tokens=1, stream=True) for n in (3, 1, 2)]
    for stream in waiting:
        list(stream)
    assert [answer.prompt for answer in served.engine.answers[before + 1 :]] == [3, 1, 2]


def test_when_a_client_leaves_a_stream_the_model_stops(served: Served) -> None:
    before = len(served.engine.answers)
    with served.chat("Tell me a long story.", **FOREVER) as stream:
        next(iter(stream))
    eventually(lambda: len(served.engine.answers) > before)
    assert served.engine.answers[-1].completion < 1000


def test_when_a_client_leaves_without_a_stream_the_model_stops(served: Served) -> None:
    before = len(served.engine.answers)
    with pytest.raises(openai.APITimeoutError):
        served.client.with_options(timeout=0.7).completions.create(model=NAME, prompt="Once", max_tokens=4000)
    eventually(lambda: len(served.engine.answers) > before)
    assert served.engine.answers[-1].completion < 4000


def test_many_clients_at_once_get_their_own_answers(served: Served) -> None:
    prompts = [f"The number {n} is followed by the number" for n in range(5)]
    expected = [text_of(plain(tokens_of(prompt), 4)) for prompt in prompts]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = served.complete(prompts[number], max_tokens=4).choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(5)] == expected


# -- for operators ----------------------------------------------------------------------------------------


def test_the_model_is_listed(served: Served) -> None:
    (model,) = served.client.models.list().data
    assert (model.id, model.owned_by) == (NAME, "kvtide")
    assert served.client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError, match="there is 'smollm2'"):
        served.client.models.retrieve("org/other")


def test_metrics_are_those_of_the_store(served: Served) -> None:
    served.complete(f"Of metrics. {LONG}", max_tokens=1)
    served.attached.flush()
    answer = served.http.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {s.name: s.value for f in text_string_to_metric_families(answer.text) for s in f.samples}
    assert found["kvtide_prompts_total"] == served.store.statistics().planner.prompts > 0


@pytest.mark.parametrize("language", ["python", "bash"])
def test_the_code_in_the_documentation_runs(served: Served, language: str) -> None:
    (part,) = code(ROOT / "docs/serve.md", language)
    command = [sys.executable, "-W", "error", "-c"] if language == "python" else ["bash", "-ec"]
    text = part.replace("http://127.0.0.1:8000", served.url)
    done = subprocess.run([*command, text], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    if language == "python":
        first, second = re.findall(r"(\d+) tokens came from the store", done.stdout)
        assert (first, int(second) >= 256) == ("0", True)
    else:
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0
