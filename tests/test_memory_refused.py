"""The system refuses memory that the budget has: blocks make room for one another, as if the budget were less."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvtide import Store
from kvtide import config as configuration
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from kvtide.tiers.dram.memory import Memory
from kvtide.tiers.dram.tier import Dram


def test_blocks_are_stored_and_loaded_in_the_memory_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, most = Dram._allocate, 2

    def scarce(dram: Dram, nbytes: int) -> Memory:
        if len(dram._memory) >= most:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return allocate(dram, nbytes)

    monkeypatch.setattr(Dram, "_allocate", scarce)
    nvme = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "4MiB", "store": "through"}
    settings = configuration.read(None, env={}, dram={"budget": "8MiB", "segment": "1MiB"}, nvme=nvme)
    with Store(settings) as store, store.session(MODEL) as session:
        prompts = [prompt(*range(100 * n, 100 * n + 20)) for n in range(1, 20)]
        for tokens in prompts:
            assert session.store(tokens, data(PLAIN, tokens)).dropped == 0
            assert store.flush(60)
        assert store.statistics().tiers["dram"].bytes_taken <= most << 20
        assert all(length(session, tokens) == 20 * SIZE for tokens in prompts)
        for tokens in prompts:
            with session.match(tokens) as match:
                assert session.load(match).wait(60).tokens == 20 * SIZE
