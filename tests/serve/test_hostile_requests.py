"""A server with its usual limits and a key: whatever is sent to it, who has the key is answered."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from kvtide.serve.connections import Limits
from tests.node.serving import eventually
from tests.serve.hostile import KEY, POST, Raw, post, refused, works
from tests.serve.serving import Served


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with Served({"api_key": KEY}) as served:
        yield served


@pytest.mark.parametrize("sent", ["", "GET /health", POST, POST + "Content-Length: 9\r\n\r\n{"])
def test_hundreds_of_connections_that_say_nothing_keep_nobody_out(keyed: Served, sent: str) -> None:
    """They come from the same address as who has the key, and stay open."""
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(Raw(keyed, sent))
        for _ in range(3):
            works(keyed)
        eventually(lambda: keyed.connections <= Limits().per_address)


def test_without_the_key_no_page_is_shown(keyed: Served) -> None:
    for key in ("", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Basic {KEY}", KEY):
        header = f"Authorization: {key}\r\n" if key else ""
        for page in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
            with Raw(keyed, f"GET {page} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n") as stranger:
                status, content = stranger.answer()
                assert (status, content["error"]["code"]) == (401, "invalid_api_key"), (page, key)


def test_without_the_key_no_body_is_read(keyed: Served) -> None:
    with Raw(keyed, POST + f"Content-Length: {10**12}\r\n\r\n") as stranger:
        status, content = stranger.answer()
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")
        try:
            while True:
                stranger.send(bytes(1 << 20))
        except ConnectionError:
            pass  # who goes on to send is left
    works(keyed)


def test_many_large_bodies_at_a_time_are_refused_and_small_ones_are_not(keyed: Served) -> None:
    head = POST + f"Authorization: Bearer {KEY}\r\nContent-Length: {8 << 20}\r\n\r\n"
    with ExitStack() as stack:
        large = [stack.enter_context(Raw(keyed, head)) for _ in range(12)]
        for each in large:
            with suppress(ConnectionError):
                each.send(b" " * ((8 << 20) - 1))
        # All but the last byte of 96 MiB: some are too many, and whichever they are, they are told.
        readable, _, _ = select.select([each.socket for each in large], [], [], 60)
        status, content = next(each for each in large if each.socket in readable).answer()
        assert (status, content["error"]["code"]) == (503, "overloaded")
        works(keyed)
    eventually(lambda: keyed.connections == 0)
    refused(post(keyed, b" " * (4 << 20)), 400, "not a JSON object")


def test_a_prompt_that_cannot_fit_is_not_tokenised(keyed: Served) -> None:
    long = "a " * (3 << 20)
    for path, more in (
        ("completions", {"prompt": long}),
        ("completions", {"prompt": ["b", long]}),
        ("chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 1000}] * 2000}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
        ("chat/completions", {"messages": [{"role": "user", "name": long, "content": ""}]}),
        ("chat/completions", {"messages": [{"role": long, "content": ""}]}),
    ):
        answer = post(keyed, json.dumps(more).encode(), path)
        refused(answer, 400, "this server takes 131072 characters")
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    works(keyed)


def test_many_stop_strings_are_refused(keyed: Served) -> None:
    body = json.dumps({"prompt": "a", "stop": [f"s{n}" for n in range(500_000)]}).encode()
    refused(post(keyed, body), 400, "length <= 4 - at `stop`")
    works(keyed)
