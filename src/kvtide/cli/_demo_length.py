"""Chooses the prompts of the demonstration: how long the document is, and where it ends.

Machines differ much in speed, and a busy one is as slow as a slow one. So a short prompt is computed first, and the
document is made as long as the time allows that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, islice, takewhile
from typing import NamedTuple

import msgspec

from kvtide.cli._demo_text import QUESTIONS, document

__all__ = [
    "LEAST",
    "MOST",
    "Choice",
    "DemoSpeed",
    "DemoWork",
    "choose_days",
    "choose_length",
    "common_tokens",
    "messages",
]

BLOCK = 256
LEAST = 1024
"""Tokens of the shortest document that is chosen: with fewer, what is saved is small beside what is always computed."""
MOST = 6144
"""Tokens of the longest one; the model can attend to 8,192."""
_ENOUGH = 2048
"""A document that is shorter is not made even shorter for the sake of more questions."""
_ATTENTION = 6144
"""Length at which attention takes as long as the rest of a prefill. By the model's shape: a token's other layers take
2 x 106 million operations, its attention 4 x 17,280 for each token before it, and on average there are half as many as
the document has."""


class DemoSpeed(NamedTuple):
    """What was measured with a short prompt."""

    tokens: int
    prefill: float
    """Seconds to compute its KV."""
    answer: float
    """Seconds to answer a question about it when it is cached, to the last token of the answer."""


class DemoWork(NamedTuple):
    """What the rest of a demonstration does."""

    prefills: int
    """How many times the document is computed."""
    answers: int
    """How many answers it gives to all questions."""
    fewest: int
    """How many it gives if only one question is asked."""
    other: float
    """Seconds for what does not depend on the document's length: starting processes, loading the model."""


class Choice(msgspec.Struct, tag=True):
    """The length of the document, and the reason."""

    tokens: int
    questions: int
    reason: str


def choose_length(speed: DemoSpeed, work: DemoWork, left: float) -> Choice:
    """The longest document for which the rest takes no longer than ``left`` seconds, of whole blocks.

    Where that is a short one, only one question is asked, in favour of the document.
    """
    tokens, answers, questions = _longest(speed, work, work.answers, left), work.answers, len(QUESTIONS)
    if tokens < _ENOUGH:
        tokens, answers, questions = _longest(speed, work, work.fewest, left), work.fewest, 1
    seconds = _seconds(speed, work, answers, max(tokens, LEAST))
    why = f"{speed.tokens} tokens took {speed.prefill:.1f} s to compute and {max(0.0, left):.0f} s are left"
    if not tokens:
        why += ": it is the shortest document, and this machine is too slow or busy even for that"
    return Choice(
        max(tokens, LEAST),
        questions,
        f"The document has at least {max(tokens, LEAST):,} tokens, because {why}; "
        f"the rest should take about {seconds:.0f} s",
    )


def _longest(speed: DemoSpeed, work: DemoWork, answers: int, left: float) -> int:
    """0: there is none."""
    lengths = range(LEAST, MOST + 1, BLOCK)
    return max((tokens for tokens in lengths if _seconds(speed, work, answers, tokens) <= left), default=0)


def _seconds(speed: DemoSpeed, work: DemoWork, answers: int, tokens: int) -> float:
    prefill = speed.prefill * tokens / speed.tokens * _growth(tokens) / _growth(speed.tokens)
    answer = speed.answer * _growth(tokens) / _growth(speed.tokens)
    return work.prefills * prefill + answers * answer + work.other


def _growth(tokens: int) -> float:
    return 1 + tokens / _ATTENTION


def choose_days(prompts_of: Callable[[int], list[list[int]]], least: int) -> int:
    """How many days of the log are a document of at least ``least`` tokens that ends a little after the end of a block.

    ``prompts_of`` gives the tokens of the prompts about so many days. Tokens after the last block's end, up to a block
    of them, are computed every time; here they are few.
    """
    start = common_tokens(prompts_of(1))
    day = max(1, (common_tokens(prompts_of(11)) - start) // 10)
    near = max(1, (least - start) // day - 2)
    found = ((common_tokens(prompts_of(days)), days) for days in count(near))
    long_enough = ((tokens, days) for tokens, days in found if tokens >= least)
    return min(islice(long_enough, 6), key=lambda one: one[0] % BLOCK)[1]


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens at the beginning are the same in all prompts."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))


def messages(days: int) -> list[list[dict[str, str]]]:
    """The conversations: each question, about the log of so many days."""
    log = document(days)
    return [[{"role": "user", "content": f"{log}\n{question}"}] for question in QUESTIONS]
