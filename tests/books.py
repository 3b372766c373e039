"""What must agree when nothing moves: the index, the pipeline, and the tiers' own books."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import numpy as np

from kvtide.index.index import DRAM, SEALED
from kvtide.store.partition import NVME
from kvtide.store.store import Store

__all__ = ["agree", "disagreements", "left_behind", "tier_bytes"]


def disagreements(store: Store, held: Collection[int] = ()) -> list[str]:
    """Where the books differ, when only the rows in ``held`` are held by a caller. Call it when the lanes are idle."""
    index, pipeline = store.index, store.pipeline
    store.dram.wait_zeroed()  # until then a slot is in use by nobody
    statistics = store.statistics()
    with index.lock:
        count = index.size
        in_dram = int(np.count_nonzero(index.state[DRAM][:count]))
        in_nvme = int(np.count_nonzero(index.state[NVME][:count]))
        whole = int(np.count_nonzero(index.state[NVME][:count] == SEALED))
        rows = sum(key is not None for key in index._keys)
        doomed = sum(row in held for row in pipeline._residents.doomed)
        columns = [
            ("rows held", statistics.held, len(set(held))),
            ("slots in DRAM", statistics.tiers["dram"].blocks, in_dram),
            ("slots in NVMe", statistics.tiers["nvme"].blocks, in_nvme),
            ("writes to NVMe that ended", whole, in_nvme),
            ("flights", pipeline.blocks_pending, 0),
            ("dropped rows that are held", pipeline.blocks_doomed, doomed),
            ("copies to be erased", len(pipeline._eraser._dying), 0),
            ("rows", rows, len(index) + doomed),
        ]
    return [f"{what}: {is_}, not {should}" for what, is_, should in columns if is_ != should]


def agree(store: Store, held: Collection[int] = (), seconds: float = 30.0) -> None:
    """Wait until nothing moves, and check the books.

    Erasing a block that could not be read goes on after the lanes are idle, and has no event to wait for.
    """
    end = time.monotonic() + seconds
    while True:
        assert store.flush(seconds).complete, "the lanes do not come to rest"
        found = disagreements(store, held)
        if not found:
            return
        assert time.monotonic() < end, found
        time.sleep(0.002)


def tier_bytes(folder: Path) -> int:
    """Bytes of all files in a tier's folder, while it is in use."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


_FILES = {"kvtide.json", "lock", "journal", "speeds"}


def left_behind(folder: Path, budget: int, temporary: Collection[str] = ()) -> None:
    """Only files that belong there, within the budget."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    strange = {n for n in sizes if not n.endswith(".segment")} - _FILES - set(temporary)
    assert not strange, f"left behind: {strange}"
    assert sum(sizes.values()) <= budget
