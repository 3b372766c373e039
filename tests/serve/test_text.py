"""From tokens to text: nothing is lost, broken or told too early, in whatever pieces it comes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtide.serve.text import Decoder, Stops
from tests.serve.serving import smollm2


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
@example("👩‍👩‍👧‍👦 grüßt 日本語\n\n  two  spaces � ")
def test_text_comes_back_in_whole_characters(text: str) -> None:
    tokenizer = smollm2().tokenizer
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoder = Decoder(tokenizer.decode)
    assert "".join([*map(decoder.put, tokens), decoder.end()]) == tokenizer.decode(tokens)


def test_a_character_that_stays_incomplete_is_replaced_at_the_end() -> None:
    tokenizer = smollm2().tokenizer
    tokens = tokenizer("a 🐱", add_special_tokens=False)["input_ids"]
    decoder = Decoder(tokenizer.decode)
    assert "".join(decoder.put(token) for token in tokens[:-1]).rstrip() == "a"
    assert decoder.end().endswith("�")


def test_a_word_keeps_the_space_before_it() -> None:
    """Some tokenizers drop a space at the start of what they decode."""
    words = {1: " to", 2: " the", 3: " sea"}
    decoder = Decoder(lambda tokens: "".join(words[token] for token in tokens).removeprefix(" "))
    assert [decoder.put(token) for token in (1, 2, 3)] == ["to", " the", " sea"]


pieces = st.lists(st.text("abc", max_size=4), max_size=8)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@settings(max_examples=500)
@given(pieces, stops)
@example(["ab", "c"], ["abc", "b"])
def test_no_part_of_a_stop_string_is_told(parts: list[str], wanted: list[str]) -> None:
    text, told = "".join(parts), Stops(wanted)
    said = "".join(told.put(part) for part in parts) + told.end()
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(wanted))]
    if not ends:
        assert (said, told.met) == (text, False)
        return
    first = text[: ends[0]]
    assert told.met
    assert said == min((first.removesuffix(stop) for stop in wanted), key=len)


@given(pieces, stops)
def test_what_is_held_back_may_still_become_a_stop_string(parts: list[str], wanted: list[str]) -> None:
    told, text = Stops(wanted), ""
    for part in parts:
        text += told.put(part)
        held = told._held
        if not told.met:
            assert not held or any(stop.startswith(held) for stop in wanted), "held back for nothing"
