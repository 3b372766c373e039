"""The engine that other tests compare with does what they rely on."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.vllm.engines import Engine, engine
from tests.node.serving import eventually

PROMPT = random.Random(1).choices(range(1000, 40000), k=700)


def test_an_engine_caches_whole_pages_and_forgets_them_when_told(plain: Engine) -> None:
    plain.reset_prefix_cache()
    cold, warm = plain.complete(PROMPT), plain.complete(PROMPT)
    assert (cold.cached, warm.cached) == (0, 640)  # 5 pages of 128
    assert cold.reason == "length"
    assert len(cold.tokens) == len(cold.logprobs) == 8
    assert cold.tokens == warm.tokens
    before = plain.metrics()["vllm:prefix_cache_hits_total"]
    plain.reset_prefix_cache()
    again = plain.complete(PROMPT)
    assert again.cached == 0
    assert plain.metrics()["vllm:prefix_cache_hits_total"] == before


def test_requests_one_after_another_are_deterministic(plain: Engine) -> None:
    answers = []
    for _ in range(2):
        plain.reset_prefix_cache()
        answers.append(plain.complete(PROMPT, 16))
    assert answers[0][:4] == answers[1][:4]


def test_a_cache_is_empty_when_it_has_been_reset(plain: Engine) -> None:
    """The engine refuses as long as a request has pages."""
    plain.complete(PROMPT)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(plain.complete, PROMPT[:300], 100)
        eventually(lambda: plain.metrics()["vllm:num_requests_running"])
        plain.reset_prefix_cache()
        assert other.result().reason == "length"
    assert plain.complete(PROMPT).cached == 0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 1"), engine(tmp_path / "none", tmp_path / "log"):
        pass
