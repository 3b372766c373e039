"""Servers that are set up for one test: restarts, limits, and queues that are full."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from kvtide.serve.connections import Limits
from tests.node.serving import eventually
from tests.serve.hostile import Raw, post, refused, works
from tests.serve.serving import FOREVER, LONG_TALK, NAME, Served, cached, talk_of


def test_after_a_restart_the_first_answer_comes_from_the_disk(tmp_path: Path) -> None:
    where: dict[str, Any] = {"nvme": {"path": str(tmp_path), "budget": "512MiB", "store": "through"}}
    with Served(**where) as served:
        first = served.chat(LONG_TALK)
    with Served(**where) as served:
        again = served.chat(LONG_TALK)
        assert served.store.statistics().counts["blocks read from nvme"] == cached(again) // 256
    assert (cached(first), cached(again)) == (0, len(talk_of(LONG_TALK)) // 256 * 256)
    assert again.choices[0].message.content == first.choices[0].message.content


def test_a_limit_and_a_key() -> None:
    with Served({"limit": 5, "api_key": "sesame"}) as served:
        with pytest.raises(openai.AuthenticationError, match="API key") as caught:
            served.chat("hi")
        assert caught.value.code == "invalid_api_key"
        assert served.http.get("/metrics").status_code == 401
        assert served.http.get("/health").status_code == 200
        served.client.close()
        served.client = served.openai("sesame")
        with pytest.raises(openai.BadRequestError, match="at most 5 tokens here, not 6"):
            served.chat("Count to ten.", max_tokens=6)
        assert served.chat("Count to ten.", max_tokens=None).usage.completion_tokens == 5
        assert served.complete("Once upon a time", max_tokens=None).usage.completion_tokens == 5
        assert served.chat("Hi", max_tokens=None, max_completion_tokens=2).usage.completion_tokens == 2


def test_when_too_many_wait_the_next_is_sent_away() -> None:
    with Served({"waiting": 1}) as served:
        with served.chat("Tell me a story.", **FOREVER) as running, served.chat("And another.", **FOREVER):
            next(iter(running))
            with pytest.raises(openai.InternalServerError, match="ask again later") as caught:
                served.chat("hi")
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["Retry-After"]) > 0
            assert served.http.get("/health").json() == {"status": "serving", "model": NAME}
        eventually(lambda: len(served.engine.answers) >= 1)
        assert all(answer.completion < 4000 for answer in served.engine.answers)


def test_who_leaves_before_his_turn_gives_it_back() -> None:
    with Served({"waiting": 1}) as served, served.chat("Tell me a story.", **FOREVER) as running:
        next(iter(running))
        served.complete([5, 5, 5], **FOREVER).close()

        def taken() -> Any:
            try:
                return served.complete([5, 5], max_tokens=1, stream=True)
            except openai.InternalServerError:
                return None

        next_one = eventually(taken)
        running.close()
        list(next_one)
        assert [answer.prompt for answer in served.engine.answers[1:]] == [2], "who left was never answered"


def test_one_address_does_not_close_the_connections_of_others() -> None:
    slow = Limits(connections=12, per_address=10, head_seconds=300)
    with Served(limits=slow) as served, ExitStack() as stack:
        others = [stack.enter_context(Raw(served, "GET /health HTTP/1.1\r\n", f"127.0.0.{n}")) for n in (2, 3, 4)]
        eventually(lambda: served.connections == 3)
        for _ in range(50):
            stack.enter_context(Raw(served, source="127.0.0.9"))
        works(served)
        for other in others:
            other.send("Host: localhost\r\n\r\n")
            assert other.answer()[0] == 200
        assert served.connections <= slow.connections


def test_a_request_takes_its_place_in_the_queue_before_it_is_decoded() -> None:
    with Served({"waiting": 0}) as served:
        with served.complete([5, 6], **FOREVER) as running:
            next(iter(running))
            answer = post(served, b"[" * (1 << 20))
            refused(answer, 503, "ask again later")
            assert int(answer.headers["Retry-After"]) > 0
        eventually(lambda: post(served, b"not JSON").status_code == 400)
        for _ in range(3):
            refused(post(served, b"not JSON"), 400, "not a JSON object")  # and gives the place back
        works(served)
