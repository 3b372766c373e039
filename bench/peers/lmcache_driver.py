"""Drives LMCache in process, on CPU memory, in both of its engines.

LMCache ships two engines in one wheel. "mp" is the storage manager of its multi-process server,
which the project recommends, called here without the server in front of it. "legacy" is the older
in-process engine's backends. Copying a block between a tensor of ours and LMCache's memory stands
for the copy from or to the device.
"""

import asyncio
import hashlib
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import base_driver as base
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    get_l2_adapter_config_class,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.mp_observability.event_bus import EventBusConfig, init_event_bus
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

MODEL = "bench/model"
DTYPE = torch.bfloat16
BLOCK_TOKENS = 256
VOCABULARY = 128_256
MP_DISK_MODES = {
    "fs_odirect": {"type": "fs", "use_odirect": True},
    "fs_buffered": {"type": "fs", "use_odirect": False},
    "fs_native_odirect": {"type": "fs_native", "use_odirect": True},
    "fs_native_buffered": {"type": "fs_native", "use_odirect": False},
}
LEGACY_DISK_MODES = {"legacy_odirect": True, "legacy_buffered": False}


def block_shape(block_bytes: int, block_tokens: int = BLOCK_TOKENS) -> torch.Size:
    """Keys and values of one layer; how a block's bytes are cut does not matter to its cost."""
    return torch.Size([2, 1, block_tokens, block_bytes // (4 * block_tokens)])


def pool_bytes(shape: torch.Size, count: int) -> int:
    """Room for exactly these blocks, so that the warm-up round has been everywhere in it."""
    pages = -(-shape.numel() * DTYPE.itemsize // base.ALIGNMENT)
    return count * pages * base.ALIGNMENT


def source_blocks(block_bytes: int) -> list[torch.Tensor]:
    shape = block_shape(block_bytes)
    return [buffer.view(DTYPE).view(shape) for buffer in base.buffers(block_bytes)]


def target_blocks(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.full_like(source, 0) for source in sources]


# --- the multi-process engine's storage manager -----------------------------------------------


class StoredKeys(L2AdapterListener):
    """Counts the keys that a disk adapter reports as stored, and wakes up the thread that waits."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._count >= count, base.DEADLINE_S):
                raise TimeoutError(f"{self._count} of {count} blocks reported as stored")
            self._count = 0

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        with self._changed:
            self._count += len(keys)
            self._changed.notify_all()

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        pass

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        pass


class Manager:
    """A StorageManager for blocks of one shape."""

    def __init__(self, shape: torch.Size, count: int, adapter: dict[str, Any] | None = None):
        init_event_bus(EventBusConfig(enabled=False))
        memory = L1MemoryManagerConfig(size_in_bytes=pool_bytes(shape, count), use_lazy=False, shm_name="")
        adapters = []
        if adapter is not None:
            adapters.append(get_l2_adapter_config_class(adapter["type"]).from_dict(adapter))
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="noop"),
                l2_adapter_config=L2AdaptersConfig(adapters),
            )
        )
        self.stored = StoredKeys()
        self.manager.register_l2_listener(self.stored)
        self._layout = MemoryLayoutDesc(shapes=[shape], dtypes=[DTYPE])

    @contextmanager
    def write(self, keys: list[ObjectKey]) -> Iterator[list[torch.Tensor]]:
        """Reserve memory for the keys; at the end of the block it counts as written."""
        reserved = self.manager.reserve_write(keys, self._layout)
        if len(reserved) != len(keys):
            raise RuntimeError(f"{len(reserved)} of {len(keys)} blocks reserved")
        yield [reserved[key].tensor for key in keys]
        self.manager.finish_write(keys)

    def lookup(self, keys: list[ObjectKey], from_disk: bool) -> None:
        """Find all keys, bring those on disk into memory, and leave all of them read-locked."""
        group = GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=self._layout)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=[group]))
        if not self.manager.wait_prefetch_status(handle, base.DEADLINE_S):
            raise TimeoutError("the lookup did not finish")
        result = self.manager.query_prefetch_status(handle)
        found = result.l2_hit_count if from_disk else result.l1_hit_count
        if found != len(keys):
            raise RuntimeError(f"{found} of {len(keys)} blocks found where they were expected")

    @contextmanager
    def read(self, keys: list[ObjectKey]) -> Iterator[list[torch.Tensor]]:
        """The memory of keys that a lookup has locked; unlocks them at the end."""
        with self.manager.read_prefetched_results(keys) as objects:
            if objects is None:
                raise RuntimeError("locked blocks are gone")
            yield [memory.tensor for memory in objects]
        self.manager.finish_read_prefetched(keys)

    def unlock(self, keys: list[ObjectKey]) -> None:
        self.manager.finish_read_prefetched(keys)

    def empty(self) -> None:
        """Drop everything from memory, once the store in the background has let go of it."""
        deadline = time.monotonic() + base.DEADLINE_S
        while self.manager.get_l1_usage()[0]:
            if time.monotonic() > deadline:
                raise TimeoutError("blocks stay locked in memory")
            self.manager.clear()
            time.sleep(0.002)

    def close(self) -> None:
        self.manager.close()


def object_keys(hashes: list[bytes]) -> list[ObjectKey]:
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey(chunk_hash=value, model_name=MODEL, kv_rank=rank) for value in hashes]


def numbered_keys(turn: int, count: int) -> list[ObjectKey]:
    return object_keys([hashlib.sha256(f"{turn} {i}".encode()).digest() for i in range(count)])


# --- the legacy engine's backends -------------------------------------------------------------


class Legacy:
    """The legacy engine's CPU backend, and its disk backend if a folder is given."""

    def __init__(
        self,
        shape: torch.Size,
        count: int,
        folder: Path | None = None,
        odirect: bool = False,
        disk_bytes: int = 0,
    ) -> None:
        self._shape = shape
        tokens = shape[2]
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=tokens,
            local_cpu=True,
            max_local_cpu_size=pool_bytes(shape, count) / 2**30,
            lmcache_instance_id="bench",
            local_disk=None if folder is None else str(folder),
            max_local_disk_size=disk_bytes / 2**30,
            extra_config={"use_odirect": odirect},
        )
        self.metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(1, 2, tokens, 1, shape[3]),
            chunk_size=tokens,
        )
        PinMonitor.GetOrCreate(self.config)
        self.cpu = LocalCPUBackend(config=self.config, metadata=self.metadata, dst_device="cpu")
        if folder is not None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
            self.disk = LocalDiskBackend(self.config, self._loop, self.cpu, "cpu")

    def allocate(self) -> Any:
        memory = self.cpu.allocate(self._shape, DTYPE, MemoryFormat.KV_2LTD)
        if memory is None:
            raise RuntimeError("the CPU backend has no memory left")
        return memory

    def put_to_disk(self, keys: list[CacheEngineKey], memory: list[Any]) -> None:
        """Store the blocks and wait until the backend has called back for each."""
        done = threading.Semaphore(0)
        self.disk.batched_submit_put_task(keys, memory, on_complete_callback=lambda _key: done.release())
        for _ in keys:
            if not done.acquire(timeout=base.DEADLINE_S):
                raise TimeoutError("the disk backend did not finish its writes")

    def forget(self, keys: list[CacheEngineKey]) -> None:
        """Take keys out of the disk backend's index but leave their files to be written over."""
        with self.disk.disk_lock:
            for key in keys:
                self.disk.dict.pop(key)

    def close(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self.cpu.close()


def engine_keys(turn: int, count: int) -> list[CacheEngineKey]:
    return [CacheEngineKey(MODEL, 1, 0, turn * count + i, DTYPE) for i in range(count)]


# --- match ------------------------------------------------------------------------------------


def match(tokens: int, block_tokens: int, rounds: int) -> dict[str, Any]:
    """From a list of tokens to read-locked blocks, when all blocks are in memory."""
    numbers = random.Random(0)
    prompt = [numbers.randrange(VOCABULARY) for _ in range(tokens)]
    shape = block_shape(64 * block_tokens, block_tokens)
    return {
        "mp": _match_mp(prompt, shape, rounds),
        "legacy": _match_legacy(prompt, shape, rounds, pin=False),
        "legacy_pinned": _match_legacy(prompt, shape, rounds, pin=True),
    }


def _match_mp(prompt: list[int], shape: torch.Size, rounds: int) -> dict[str, Any]:
    hasher = TokenHasher(shape[2], "blake3")
    keys = object_keys(hasher.compute_chunk_hashes(prompt))
    manager = Manager(shape, len(keys))
    series = base.Series()
    try:
        with manager.write(keys):
            pass
        for _ in range(rounds + 1):
            with series.timed():
                found = object_keys(hasher.compute_chunk_hashes(prompt))
                manager.lookup(found, from_disk=False)
            manager.unlock(found)
        return series.answer_ms()
    finally:
        manager.close()


def _match_legacy(prompt: list[int], shape: torch.Size, rounds: int, pin: bool) -> dict[str, Any]:
    legacy = Legacy(shape, len(prompt) // shape[2])
    database = ChunkedTokenDatabase(legacy.config, legacy.metadata)
    series = base.Series()
    try:
        keys = [key for _, _, key in database.process_tokens(prompt)]
        for key in keys:
            memory = legacy.allocate()
            legacy.cpu.submit_put_task(key, memory)
            memory.ref_count_down()
        for _ in range(rounds + 1):
            matched = 0
            with series.timed():
                for _, end, key in database.process_tokens(prompt):
                    if not legacy.cpu.contains(key, pin=pin):
                        break
                    matched = end
            if matched != len(prompt):
                raise RuntimeError(f"{matched} of {len(prompt)} tokens matched")
            if pin:
                legacy.cpu.touch_cache()
                for key in keys:
                    legacy.cpu.unpin(key)
        return series.answer_ms()
    finally:
        legacy.close()


# --- dram -------------------------------------------------------------------------------------


def dram(block_bytes: int, count: int, rounds: int) -> dict[str, Any]:
    """Copy blocks into LMCache's memory under new keys, then look them up and copy them out."""
    return {
        "mp": _dram_mp(block_bytes, count, rounds),
        "legacy": _dram_legacy(block_bytes, count, rounds),
    }


def _dram_mp(block_bytes: int, count: int, rounds: int) -> dict[str, Any]:
    sources = source_blocks(block_bytes)
    targets = target_blocks(sources)
    manager = Manager(block_shape(block_bytes), count)
    store, load = base.Series(), base.Series()
    try:
        for turn in range(rounds + 1):
            keys = numbered_keys(turn, count)
            with store.timed(), manager.write(keys) as memory:
                for i, block in enumerate(memory):
                    block.copy_(sources[i % base.DISTINCT])
            with load.timed():
                manager.lookup(keys, from_disk=False)
                with manager.read(keys) as memory:
                    for i, block in enumerate(memory):
                        targets[i % base.DISTINCT].copy_(block)
            _require_last(targets[(count - 1) % base.DISTINCT], sources, count)
            manager.empty()
        return {"store": store.answer(), "load": load.answer(), "bytes": block_bytes * count}
    finally:
        manager.close()


def _dram_legacy(block_bytes: int, count: int, rounds: int) -> dict[str, Any]:
    sources = source_blocks(block_bytes)
    targets = target_blocks(sources)
    legacy = Legacy(block_shape(block_bytes), count)
    store, load = base.Series(), base.Series()
    try:
        for turn in range(rounds + 1):
            keys = engine_keys(turn, count)
            with store.timed():
                for i, key in enumerate(keys):
                    memory = legacy.allocate()
                    memory.tensor.copy_(sources[i % base.DISTINCT])
                    legacy.cpu.submit_put_task(key, memory)
                    memory.ref_count_down()
            with load.timed():
                for i, key in enumerate(keys):
                    memory = legacy.cpu.get_blocking(key)
                    targets[i % base.DISTINCT].copy_(memory.tensor)
                    memory.ref_count_down()
            _require_last(targets[(count - 1) % base.DISTINCT], sources, count)
            for key in keys:
                legacy.cpu.remove(key)
        return {"store": store.answer(), "load": load.answer(), "bytes": block_bytes * count}
    finally:
        legacy.close()


def _require_last(found: torch.Tensor, sources: list[torch.Tensor], count: int) -> None:
    expected = sources[(count - 1) % base.DISTINCT]
    base.require_equal(found, expected.view(torch.uint8).reshape(-1))


# --- disk -------------------------------------------------------------------------------------


def disk(
    modes: list[str],
    block_bytes: int,
    count: int,
    rounds: int,
    dir: str,  # noqa: A002
    overwrite: bool = False,
) -> dict[str, Any]:
    """``overwrite`` has an effect in the legacy modes only: the others write a temporary file,
    rename it, and skip a file that exists."""
    answers = {}
    for mode in modes:
        with base.work_folder(dir, mode) as folder:
            if mode in MP_DISK_MODES:
                answers[mode] = _disk_mp(MP_DISK_MODES[mode], block_bytes, count, rounds, folder)
            elif mode in LEGACY_DISK_MODES:
                answers[mode] = _disk_legacy(LEGACY_DISK_MODES[mode], block_bytes, count, rounds, folder, overwrite)
            else:
                known = [*MP_DISK_MODES, *LEGACY_DISK_MODES]
                raise ValueError(f"unknown mode {mode!r}; this peer knows {known}")
    return {"modes": answers}


def _disk_mp(adapter: dict[str, Any], block_bytes: int, count: int, rounds: int, folder: Path) -> dict[str, Any]:
    sources = source_blocks(block_bytes)
    manager = Manager(block_shape(block_bytes), count, {**adapter, "base_path": str(folder)})
    series = base.DiskSeries()
    try:
        for turn in range(rounds + 1):
            keys = numbered_keys(turn, count)
            with series.store.timed():
                with manager.write(keys) as memory, series.copy.timed():
                    for i, block in enumerate(memory):
                        block.copy_(sources[i % base.DISTINCT])
                manager.stored.wait_for(count)
            files = base.require_files(folder, ".data", count, block_bytes)
            manager.empty()
            _scrub(memory)
            base.make_cold(files)
            with series.load.timed():
                manager.lookup(keys, from_disk=True)
            with manager.read(keys) as memory:
                _require_last(memory[-1], sources, count)
            manager.empty()
            for file in files:
                file.unlink()
        return series.answer(block_bytes * count)
    finally:
        manager.close()


def _disk_legacy(
    odirect: bool, block_bytes: int, count: int, rounds: int, folder: Path, overwrite: bool
) -> dict[str, Any]:
    sources = source_blocks(block_bytes)
    # The backend counts what it ever wrote against its capacity, so this is for all rounds.
    capacity = (rounds + 2) * count * block_bytes
    legacy = Legacy(block_shape(block_bytes), count, folder, odirect, capacity)
    series = base.DiskSeries()
    try:
        for turn in range(rounds + 1):
            keys = engine_keys(0 if overwrite else turn, count)
            with series.store.timed():
                with series.copy.timed():
                    blocks = []
                    for i in range(count):
                        blocks.append(legacy.allocate())
                        blocks[i].tensor.copy_(sources[i % base.DISTINCT])
                legacy.put_to_disk(keys, blocks)
            files = base.require_files(folder, ".pt", count, block_bytes)
            _scrub([block.tensor for block in blocks])
            _release(blocks)
            base.make_cold(files)
            with series.load.timed():
                blocks = legacy.disk.batched_get_blocking(keys)
            _require_last(blocks[-1].tensor, sources, count)
            _release(blocks)
            if overwrite:
                legacy.forget(keys)
            else:
                for key in keys:
                    legacy.disk.remove(key)
        return series.answer(block_bytes * count)
    finally:
        legacy.close()


def _scrub(memory: list[torch.Tensor]) -> None:
    """Make sure that the bytes found after a load cannot be left over from the store."""
    for block in memory:
        block.zero_()


def _release(blocks: list[Any]) -> None:
    for block in blocks:
        block.ref_count_down()


if __name__ == "__main__":
    base.serve(version("lmcache"), {"match": match, "dram": dram, "disk": disk})
