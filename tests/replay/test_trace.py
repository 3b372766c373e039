"""Traces are read as they are, and what is wrong with one is said with its line."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import TraceError
from kvtide.index.index import Index
from kvtide.index.keys import ROOT
from kvtide.node.events import wire
from kvtide.node.events.described import BlockSource, DescribedBlocks
from kvtide.replay.block_tokens import BlockTokenSizes, full_blocks
from kvtide.replay.trace import TraceRequest, chains, load, read

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 500, "input_length": 100, "output_length": 5, "hash_ids": [9]},
    {"timestamp": 2500, "input_length": 1536, "output_length": 5, "hash_ids": [1, 2, 4]},
]


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def plain(found: Iterable[TraceRequest]) -> list[tuple[float, tuple[Any, ...]]]:
    """Times and blocks alone."""
    return [(request.seconds, request.blocks) for request in found]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_lines_without_blocks_that_are_not_full(tmp_path: Path, name: str) -> None:
    found = plain(read(write(tmp_path / name, MOONCAKE)))
    assert found == [(0.0, (1, 2)), (2.5, (1, 2, 4))]


def test_agents_that_ran_on_different_days_are_laid_side_by_side(tmp_path: Path) -> None:
    lines = [
        {"app": "a", "sid": "x", "ts": 5_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [1]},
        {"app": "a", "sid": "x", "ts": 9_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [1, 2]},
        {"app": "b", "sid": "y", "ts": 99_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [7]},
        {"app": "b", "sid": "y", "ts": 99_500_000, "in_chars": 9, "out_chars": 9, "hash_ids": []},
        {"app": "b", "sid": "y", "ts": 100_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [7, 8]},
    ]
    found = plain(read(write(tmp_path / "agents.jsonl", lines)))
    assert found == [(0.0, (1,)), (0.0, (7,)), (1.0, (7, 8)), (4.0, (1, 2))]


def test_a_block_is_named_by_its_whole_prefix(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "hash_ids": ids} for ids in ([1, 2], [3, 2], [1, 2, 2])]
    trace = chains(read(write(tmp_path / "trace.jsonl", lines)))
    assert [blocks.tolist() for blocks in trace.blocks] == [[0, 1], [2, 3], [0, 1, 4]]
    assert trace.unique == 5


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl.gz", MOONCAKE)
    seen: list[int] = []
    list(read(path, seen.append))
    assert seen[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 0, "hash\n', "line 2"),
        ('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 0, "hash', "line 2"),
        ("{}\n", "line 1: a request without hash_ids"),
        ('[1.0, [], 0]\n{"timestamp": 0, "hash_ids": [1]}\n', "line 2: no KV event among KV events"),
        ('{"timestamp": 0, "hash_ids": [1]}\n[1.0, [], 0]\n', "line 2: KV events among requests"),
        (
            '{"timestamp": 0, "hash_ids": [1]}\n{"chat_id": 1, "timestamp": 0, "hash_ids": [1]}\n',
            "line 2: .* two kinds",
        ),
        ('{"timestamp": 0, "hash_ids": [1]}\n\n{"timestamp": 5}\n', "line 3: a request without hash_ids"),
        ('{"hash_ids": [1]}\n', "line 1: a request needs timestamp"),
        ('{"app": "a", "hash_ids": [1]}\n', "line 1: a request of an agent needs app, ts"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n", "arrivals and lengths only"),
        ('[1.0, [{"type": "BlockMoved"}], 0]\n', "line 1: an event of unknown kind 'BlockMoved'"),
        ('[1.0, [["BlockStored", []]], 0]\n', "line 1: BlockStored without block_hashes"),
        ('{"type": "BlockStored", "block_hashes": 5}\n', "line 1: BlockStored without block_hashes"),
        ("not a trace at all\n", "object 1 at byte 0"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=said) as error:
        list(read(path))
    assert str(path) in str(error.value)


def test_a_missing_or_broken_file_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        list(read(tmp_path / "nowhere"))
    path = write(tmp_path / "trace.jsonl.gz", MOONCAKE * 1000)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read(path))


# -- how many tokens a block has ----------------------------------------------------------------------------


def prompt(tokens: int, blocks: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": tokens, "hash_ids": list(range(blocks)), **more}


def test_the_size_of_blocks_is_found_from_the_lengths_of_prompts(tmp_path: Path) -> None:
    lines = [prompt(1000, 63), prompt(48, 3), prompt(7, 1), prompt(2000, 125)]
    trace = load(write(tmp_path / "small.jsonl", lines))
    assert trace.block_tokens == 16
    assert [len(blocks) for blocks in trace.blocks] == [62, 3, 125]
    trace = load(write(tmp_path / "usual.jsonl", MOONCAKE))
    assert trace.block_tokens == 512
    # A recorder that leaves the last block out if it is not full.
    trace = load(write(tmp_path / "down.jsonl", [prompt(1000, 15), prompt(130, 2), prompt(640, 10)]))
    assert (trace.block_tokens, [len(blocks) for blocks in trace.blocks]) == (64, [15, 2, 10])
    trace = load(write(tmp_path / "odd.jsonl", [prompt(4800, 50), prompt(4801, 51)]))
    assert trace.block_tokens == 96


@given(st.integers(4, 11), st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), min_size=1, max_size=20))
def test_no_full_block_is_lost_and_none_is_invented(power: int, prompts: list[tuple[int, bool]]) -> None:
    size, sizes = 1 << power, BlockTokenSizes()
    for tokens, up in prompts:
        named = -(-tokens // size) if up else tokens // size
        sizes.see("here", tokens, named)
        assert full_blocks(tokens, named, size) == tokens // size
    assert sizes.least <= size <= sizes.most
    found = sizes.choose("here", size)
    assert found == size
    if sizes.least <= 512 <= sizes.most:
        other = sizes.choose("here", 512)
        assert all(full_blocks(t, -(-t // size) if up else t // size, other) is not None for t, up in prompts)


@pytest.mark.parametrize(
    ("lines", "given_tokens", "said"),
    [
        (
            [prompt(1024, 2), prompt(1024, 64)],
            None,
            "line 2: input_length 1024 with 64 hash_ids means blocks of 16 tokens, but the",
        ),
        # Blocks of 16 tokens, as Bailian's traces have, do not fit these.
        ([prompt(40, 1, chat_id=1), prompt(100, 1, chat_id=2)], None, "say how many a block has with --block-tokens"),
        ([prompt(0, 1)], None, "cannot have 1 hash_ids"),
        ([prompt(3, 9)], None, "cannot have 9 hash_ids"),
        (
            [prompt(1100, 3)],
            16,
            "line 1: input_length 1100 is 68 full blocks of 16 tokens, but there are 3 hash_ids, as",
        ),
        ([prompt(1100, 69)], 512, "line 1: input_length 1100 is 2 full blocks of 512 tokens, but there are 69"),
        ([prompt(1100, 69, block_tokens=16)], 512, "blocks of 16 tokens, but --block-tokens says 512"),
        (
            [prompt(32, 2, block_tokens=16), prompt(32, 1, block_tokens=32)],
            None,
            "line 2: blocks of 32 tokens, but .*1 says",
        ),
        ([prompt(32, 2, block_tokens=0)], None, "line 1: block_tokens is 0"),
    ],
)
def test_blocks_that_contradict_the_lengths_are_not_cut_off(
    tmp_path: Path, lines: list[Any], given_tokens: int | None, said: str
) -> None:
    with pytest.raises(TraceError, match=said):
        load(write(tmp_path / "trace.jsonl", lines), block_tokens=given_tokens)


def test_the_size_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [prompt(100, 1)])
    assert len(load(path).blocks) == 0  # no block of 512 tokens is full
    trace = load(path, block_tokens=64)
    assert (trace.block_tokens, [len(b) for b in trace.blocks]) == (64, [1])
    lines = [prompt(100, 1, block_tokens=64)]
    assert load(write(tmp_path / "own.jsonl", lines)).block_tokens == 64
    assert load(write(tmp_path / "nothing.jsonl", [{"timestamp": 0, "hash_ids": [1]}])).block_tokens is None


# -- Bailian ------------------------------------------------------------------------------------------------


def test_bailian_has_seconds_types_and_numbers_of_turns(tmp_path: Path) -> None:
    common = {"parent_chat_id": -1, "output_length": 132, "type": "text"}
    lines = [
        {"chat_id": 159, "timestamp": 61.5, "input_length": 40, "turn": 1, "hash_ids": [5, 6, 7], **common},
        {"chat_id": 160, "timestamp": 2.25, "input_length": 33, "turn": 2, "hash_ids": [5, 6, 8], **common},
        {"chat_id": 161, "timestamp": 70, "input_length": 9, "turn": 1, "hash_ids": [1], **common, "type": "image"},
    ]
    path = write(tmp_path / "trace.jsonl", lines)
    assert plain(read(path)) == [(2.25, (5, 6)), (61.5, (5, 6))]
    trace = load(path)
    assert (trace.block_tokens, trace.unique) == (16, 2)
    assert (trace.tenants, trace.turns, trace.returns_in) == (["", ""], ["", ""], [None, None])


# -- what kvtide records ------------------------------------------------------------------------------------

HEADER = {"kvtide_trace": 1, "block_tokens": 256, "layout_bytes": 8 << 20}


def test_a_recording_has_tenants_turns_and_hints(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1500, "input_length": 700, "hash_ids": [2**62, -5], "tenant": "b", "turn": "tool"},
        {"timestamp": 500.5, "input_length": 512, "hash_ids": [2**62, -5], "tenant": "a", "returns_in": 2.5},
        {
            "timestamp": 2000,
            "input_length": 256,
            "hash_ids": [2**62],
            "tenant": "a",
            "block_tokens": 256,
            "turn": "end",
        },
        {"timestamp": 2100, "input_length": 100, "hash_ids": []},
    ]
    trace = load(write(tmp_path / "trace.jsonl", [HEADER, *lines]))
    assert trace.seconds.tolist() == [0.5005, 1.5, 2.0]
    assert trace.tenants == ["a", "b", "a"]
    assert trace.turns == ["", "tool", "end"]
    assert trace.returns_in == [2.5, None, None]
    # Two tenants have no block in common, though their blocks have the same numbers.
    assert [blocks.tolist() for blocks in trace.blocks] == [[0, 1], [2, 3], [0]]
    assert (trace.unique, trace.block_tokens, trace.block_bytes) == (4, 256, 8 << 20)


def test_a_recording_whose_last_line_is_cut_off_is_read_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "trace.jsonl", [HEADER, *(prompt(512, 2) for _ in range(3))])
    whole = path.read_bytes()
    for end in range(whole.rindex(b"{") + 1, len(whole)):
        caplog.clear()
        path.write_bytes(whole[:end])
        with caplog.at_level(logging.WARNING):
            assert len(list(read(path))) == (3 if end == len(whole) - 1 else 2)
        assert ("line 4: the last line is cut off" in caplog.text) == (end < len(whole) - 1)
    path.write_bytes(whole[:-5] + b"\n")
    with pytest.raises(TraceError, match="line 4"):
        list(read(path))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{**HEADER, "kvtide_trace": 2}], "line 1: a trace of version 2; this kvtide reads version 1"),
        ([{**HEADER, "kvtide_trace": "x"}], "a trace of version 'x'"),
        ([{"kvtide_trace": 1}], "the header has no block_tokens"),
        ([{**HEADER, "layout_bytes": 0}], "layout_bytes is 0"),
        ([HEADER, prompt(512, 2), HEADER], "line 3: the header of another recording"),
        ([HEADER, prompt(512, 4, block_tokens=128)], "line 2: blocks of 128 tokens, but the header says 256"),
        ([HEADER, prompt(512, 4)], "line 2: input_length 512 is 2 full blocks of 256 tokens, but there are 4"),
        ([HEADER, prompt(512, 2, turn=3)], "line 2: turn is 3"),
        ([HEADER, prompt(512, 2, turn="later")], "line 2: turn is 'later'"),
        ([HEADER, prompt(512, 2, returns_in=-1)], "line 2: returns_in is -1"),
        ([HEADER, prompt(512, 2, tenant=5)], "line 2: .*tenant"),
        ([HEADER, {"timestamp": 0, "hash_ids": [1]}], "line 2: a recorded request needs"),
    ],
)
def test_a_recording_that_is_wrong_is_refused(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(read(write(tmp_path / "trace.jsonl", lines)))


# -- KV events ----------------------------------------------------------------------------------------------


def stored(hashes: list[Any], parent: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [1] * 16 * len(hashes),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


BATCHES: list[Any] = [
    [0.0, [stored([1, 2], None)], 0],
    [1.0, [stored([3], 2), {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}], 0],
    [2.0, [stored([8, 9], None), stored([50], 9, medium="CPU")], 0],
    [100.0, [{"type": "AllBlocksCleared"}], 0],
    [101.0, [stored([4], 2)], 0],
]
REQUESTS = [(0.0, (1, 2, 3)), (2.0, (8, 9)), (101.0, (1, 2, 4))]
"""A prompt that came in two events, another, and one that goes on from the first, with its ancestors."""


def as_arrays(found: list[Any]) -> list[Any]:
    """As engines published them before there were maps."""
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return [[t, [[e[n] for n in names if n in e] for e in events], rank] for t, events, rank in found]


def test_events_as_json_lines(tmp_path: Path) -> None:
    assert plain(read(write(tmp_path / "a.jsonl", BATCHES))) == REQUESTS
    maps = [{"ts": t, "events": events, "data_parallel_rank": rank} for t, events, rank in BATCHES]
    assert plain(read(write(tmp_path / "b.jsonl", maps))) == REQUESTS
    alone = [{**e, "ts": t} for t, events, _ in BATCHES for e in events]
    assert plain(read(write(tmp_path / "c.jsonl", alone))) == REQUESTS


@pytest.mark.parametrize("maps", [True, False])
def test_events_of_a_node_are_a_trace_too(tmp_path: Path, maps: bool) -> None:
    """They are about its memory and its disk: blocks that are in both are one request."""
    one, two = bytes([1] * 32), bytes([2] * 32)
    source = BlockSource(Index(1), ((b"", 0),), 16, 16, "", ())
    described, encoder = DescribedBlocks(), wire.BatchEncoder(maps=maps)
    described.describe(source, ROOT, [one, two], bytes(128))
    columns = described.columns
    batches = [encoder.payload(1.0, columns, [(block, 0, wire.CPU) for block in (0, 1)], fresh=True)]
    batches.append(encoder.payload(2.0, columns, [(block, wire.CPU, wire.CPU | wire.DISK) for block in (0, 1)]))
    path = tmp_path / "events.msgpack"
    path.write_bytes(b"".join(batches))
    assert plain(read(path)) == [(1.0, (int.from_bytes(bytes([1] * 8)), int.from_bytes(bytes([2] * 8))))]
    assert load(path).block_tokens == 16


def test_events_say_how_many_tokens_a_block_has(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", BATCHES)
    assert load(path).block_tokens == 16
    with pytest.raises(TraceError, match="blocks of 16 tokens, but --block-tokens says 32"):
        load(path, block_tokens=32)
    several = [*BATCHES, [200.0, [stored([70], None, block_size=32)], 0]]
    assert load(write(tmp_path / "several.jsonl", several)).block_tokens is None


def test_events_as_arrays(tmp_path: Path) -> None:
    arrays = [b for b in as_arrays(BATCHES) if b[0] != 1.0]
    arrays.insert(1, [1.0, [["BlockStored", [3], 2, [1] * 16, 16, None, "GPU"], ["BlockRemoved", [3]]], 0])
    assert plain(read(write(tmp_path / "events.jsonl", arrays))) == REQUESTS


def test_events_as_msgpack(tmp_path: Path) -> None:
    path = tmp_path / "events.msgpack"
    path.write_bytes(b"".join(msgspec.msgpack.encode(b) for b in BATCHES))
    assert plain(read(path)) == REQUESTS
    # Hashes as bytes and of 64 bits, long arrays and long maps: everything that has a length of its own.
    far = [[5.0, [stored([bytes([n]) * 32 for n in range(40)], None, extra={str(n): n for n in range(20)})], 0]]
    far += [[6.0, [stored([2**63 + n for n in range(70_000)], None, note="x" * 300, bits=[-1, -200, 1.5, True])], 0]]
    path.write_bytes(b"".join(msgspec.msgpack.encode(b) for b in far))
    assert [len(r.blocks) for r in read(path)] == [40, 70_000]


def test_a_msgpack_file_that_ends_inside_an_object(tmp_path: Path) -> None:
    path = tmp_path / "events.msgpack"
    whole = b"".join(msgspec.msgpack.encode(b) for b in BATCHES)
    path.write_bytes(whole[:-5])
    with pytest.raises(TraceError, match="object 5 at byte"):
        list(read(path))


def test_only_the_last_requests_of_a_long_trace_are_kept(tmp_path: Path) -> None:
    header = {"kvtide_trace": 1, "block_tokens": 16, "layout_bytes": 4096}
    lines = [{"timestamp": n, "input_length": 48, "hash_ids": [n, n, n], "have": n % 3} for n in range(100)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    reader = read(file, most=31)
    found = list(reader)
    assert [request.blocks[0] for request in found] == list(range(90, 100))
    assert [request.have for request in found] == [n % 3 for n in range(90, 100)]
    assert reader.passed_over == 90
    assert len(list(read(file, most=1))) == 1, "one request at least"


def test_a_file_that_is_still_written_ends_anywhere_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = {"kvtide_trace": 1, "block_tokens": 16, "layout_bytes": 4096}
    line = {"timestamp": 1, "input_length": 16, "hash_ids": [1]}
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(header) + "\n" + json.dumps(line) + "\n" + json.dumps(line)[:20])
    assert len(list(read(file, growing=True))) == 1
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(list(read(file))) == 1
    assert [r for r in caplog.records if r.levelname == "WARNING"]
