"""Traces are read as they are, and what is wrong with one is said with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtide.errors import TraceError
from kvtide.replay.trace import chains, read

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 500, "input_length": 100, "output_length": 5, "hash_ids": [9]},
    {"timestamp": 2500, "input_length": 1536, "output_length": 5, "hash_ids": [1, 2, 4]},
]


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_lines_without_blocks_that_are_not_full(tmp_path: Path, name: str) -> None:
    found = list(read(write(tmp_path / name, MOONCAKE)))
    assert found == [(0.0, (1, 2)), (2.5, (1, 2, 4))]


def test_agents_that_ran_on_different_days_are_laid_side_by_side(tmp_path: Path) -> None:
    lines = [
        {"app": "a", "sid": "x", "ts": 5_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [1]},
        {"app": "a", "sid": "x", "ts": 9_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [1, 2]},
        {"app": "b", "sid": "y", "ts": 99_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [7]},
        {"app": "b", "sid": "y", "ts": 99_500_000, "in_chars": 9, "out_chars": 9, "hash_ids": []},
        {"app": "b", "sid": "y", "ts": 100_000_000, "in_chars": 9, "out_chars": 9, "hash_ids": [7, 8]},
    ]
    found = list(read(write(tmp_path / "agents.jsonl", lines)))
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
    assert list(read(write(tmp_path / "a.jsonl", BATCHES))) == REQUESTS
    maps = [{"ts": t, "events": events, "data_parallel_rank": rank} for t, events, rank in BATCHES]
    assert list(read(write(tmp_path / "b.jsonl", maps))) == REQUESTS
    alone = [{**e, "ts": t} for t, events, _ in BATCHES for e in events]
    assert list(read(write(tmp_path / "c.jsonl", alone))) == REQUESTS


def test_events_as_arrays(tmp_path: Path) -> None:
    plain = [b for b in as_arrays(BATCHES) if b[0] != 1.0]
    plain.insert(1, [1.0, [["BlockStored", [3], 2, [1] * 16, 16, None, "GPU"], ["BlockRemoved", [3]]], 0])
    assert list(read(write(tmp_path / "events.jsonl", plain))) == REQUESTS


def test_events_as_msgpack(tmp_path: Path) -> None:
    path = tmp_path / "events.msgpack"
    path.write_bytes(b"".join(msgspec.msgpack.encode(b) for b in BATCHES))
    assert list(read(path)) == REQUESTS
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
