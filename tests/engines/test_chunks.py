"""Rows under vLLM's names, in a store in this process and in a node: found, loaded and refused one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide.engines.chunks import Chunks, Row, model_of
from kvtide.store.session import SessionHost
from kvtide.testing.blocks import content
from tests.node.serving import Served

ROW = 256 << 10
SETTINGS: dict[str, Any] = {
    "dram": {"budget": "8MiB", "segment": "1MiB"},
    "nvme": {"budget": "64MiB", "segment": "8MiB", "store": "through"},
}


@pytest.fixture(params=["store", "node"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionHost]:
    settings = SETTINGS | {"nvme": SETTINGS["nvme"] | {"path": str(tmp_path / "kv")}}
    opened = kvtide.open(**settings) if request.param == "store" else Served(tmp_path / "node.sock", **settings)
    with opened:
        yield opened


def chunks(home: SessionHost, row: int = ROW, weights: str = "w", **facts: Any) -> Chunks:
    return Chunks(home.session(model_of(row, weights, facts)), 60)


def names(count: int) -> list[bytes]:
    return [b"%032d\0\0\0\0" % i for i in range(count)]


def rows(count: int) -> list[Row]:
    return [np.zeros(ROW, np.uint8) for _ in range(count)]


def right(key: bytes, row: Row) -> bool:
    return bool((row == content(key, ROW)).all())


def test_what_is_missing_among_others_is_told_and_its_row_left_alone(home: SessionHost) -> None:
    kept, found, into = chunks(home), names(6), rows(6)
    there = [True, False, True, True, False, True]
    stored = [key for key, is_there in zip(found, there, strict=True) if is_there]
    assert kept.store(stored, [content(k, ROW) for k in stored]) == [True] * 4
    assert kept.find(found) == there
    assert kept.load(found, into, time.monotonic()) == there
    assert [right(k, row) for k, row in zip(found, into, strict=True)] == there
    assert not into[1].any()
    assert not into[4].any()


def test_a_request_larger_than_dram_is_loaded_from_disk(home: SessionHost) -> None:
    kept, keys = chunks(home), names(96)  # three times what fits
    for key in keys:
        assert kept.store([key], [content(key, ROW)]) == [True]
        assert home.flush(60)  # type: ignore[attr-defined]  # stores and clients have it
    into = rows(96)
    assert kept.load(keys, into, time.monotonic()) == [True] * 96
    assert all(map(right, keys, into))


def test_a_load_that_waited_for_too_long_is_not_made(home: SessionHost) -> None:
    kept, keys, into = chunks(home), names(2), rows(2)
    assert kept.store(keys, [content(k, ROW) for k in keys]) == [True, True]
    assert kept.load(keys, into, since=time.monotonic() - 61) == [False, False]
    assert not any(row.any() for row in into)


def test_storing_again_is_no_failure(home: SessionHost) -> None:
    kept, keys = chunks(home), names(2)
    assert kept.store(keys[:1], [content(keys[0], ROW)]) == [True]
    assert kept.store(keys, [content(k, ROW) for k in keys]) == [True, True]


def test_rows_for_which_there_is_no_room_are_refused(home: SessionHost) -> None:
    kept, keys = chunks(home, row=16 << 20), names(2)
    assert kept.store(keys, [np.zeros(16 << 20, np.uint8)] * 2) == [False, False]
    assert kept.find(keys) == [False, False]


@pytest.mark.parametrize("other", [{"weights": "v"}, {"layout": "LBNHC"}, {"row": ROW // 2}], ids=str)
def test_rows_of_another_deployment_are_not_found(home: SessionHost, other: dict[str, Any]) -> None:
    same: dict[str, Any] = {"layout": "LBHNC"}
    (key,) = names(1)
    assert chunks(home, **same).store([key], [content(key, ROW)]) == [True]
    assert chunks(home, **same).find([key]) == [True]
    assert chunks(home, **same | other).find([key]) == [False]
