"""The connector scheduler and worker, driven as vLLM drives them, compared with the bus.

A prompt is computed in one step, and its blocks are stored; then it is requested again and loaded into other pages. The
time is measured from the orders of a step until the worker reports them done, including the communication with a node
in a process of its own. Needs a GPU; ``python -m bench.connector`` prints the records as JSON, as the files in
``bench/results/elsewhere`` have them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch

import kvtide
from kvtide.benchmarks.node import running
from kvtide.benchmarks.pages import bus
from kvtide.benchmarks.record import BenchRecord, Sample, compare, figure
from kvtide.benchmarks.settings import NoPeers, Settings
from kvtide.block import BLOCK_TOKENS, Layout
from kvtide.engines.connector.orders import Orders
from kvtide.engines.connector.request import PageGeometry, Prompt, Work
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.engines.connector.scheduler import Scheduler
from kvtide.engines.connector.sessions import SessionPool
from kvtide.engines.connector.worker import ConnectorWorker
from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.paged.pages import Pages
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client.client import Client

_PAGE = 16
_BLOCKS = 32
"""Blocks of a prompt that is moved: 8,192 tokens, 1 GiB for a Llama-3-8B."""
_STEPS = 1000
"""Maximum steps that a store is waited for."""
_BETWEEN = 0.0002
"""Seconds between two steps: an engine does something else then, and releases the interpreter."""


class _Engine:
    """A connector scheduler and one worker."""

    def __init__(self, dial: Callable[[], Client], layout: Layout, device: torch.device, pages: int) -> None:
        self._layout = layout
        group = layout.group("full")
        model = kvtide.Model(layout, "bench")
        self.scheduler = Scheduler(
            SessionPool(dial, [model], 1), PageGeometry(["full"], [_PAGE], layout.block_tokens, [0])
        )
        shape = (pages, group.heads, _PAGE, 2 * group.head_dim)
        self.caches = [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device).view(torch.bfloat16)
            for _ in range(group.layers)
        ]
        order = np.random.default_rng(0).permutation(pages)
        self._tables = [half.tolist() for half in np.split(order, 2)]
        self._requests = 0

        def see(one: Layout) -> dict[str, Pages]:
            halves = [half for cache in self.caches for half in cache.split(group.head_dim, -1)]
            return {"full": Pages(one, "full", halves)}

        self.worker = ConnectorWorker(dial, 0, see, {"full": _PAGE}, mover(device))

    def new(self, tokens: list[int]) -> str:
        self._requests += 1
        name = str(self._requests)
        self.scheduler.arrived(Prompt(name, tokens, list, DEFAULT_TENANT, RequestOptions()))
        return name

    def offered(self, request: str) -> int:
        """The number of tokens that the connector finally offers."""
        while (found := self.scheduler.matched(request, 0)) is None:
            time.sleep(_BETWEEN)
        return found

    def store(self, tokens: list[int]) -> Sample:
        while True:
            request = self.new(tokens)
            assert not self.offered(request)
            self.scheduler.bind(request, [self._tables[0]], 0)
            work = Work(request, len(tokens), lambda: [self._tables[0]])
            for _ in range(_STEPS):
                if (orders := self.scheduler.step([work])).stores:
                    break
                time.sleep(_BETWEEN)
            else:
                self.scheduler.finished(request)  # the node did not answer in time, and is not asked again
                continue
            if sample := self._move(orders, request):
                return sample

    def load(self, tokens: list[int]) -> Sample:
        request = self.new(tokens)
        count = self.offered(request)
        assert count == len(tokens), f"{count} of {len(tokens)} tokens are here"
        self.scheduler.bind(request, [self._tables[1]], count)
        sample = self._move(self.scheduler.step([]), request)
        assert sample is not None
        return sample

    def _move(self, orders: Orders, request: str) -> Sample | None:
        """Run a step in which nothing is computed, and as many more as necessary. None if the node did not answer in
        this very short step, as when memory is mapped for the first time."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.worker.begin(orders)
        nbytes = 0
        while True:
            self.worker.finish()
            done, failed, _ = self.worker.results()
            assert not failed
            moved = self.worker.take()
            nbytes += moved.load_bytes + moved.store_bytes
            self.worker.begin(Orders())
            if moved.loads or moved.stores or moved.missed:
                break
            time.sleep(_BETWEEN)
        sample = Sample(time.perf_counter() - wall, time.process_time() - cpu, nbytes)
        self.scheduler.loaded(done, ())
        self.scheduler.finished(request)
        return None if moved.missed else sample

    def check(self) -> None:
        """Check that the loaded pages equal the stored ones."""
        for cache in self.caches:
            assert torch.equal(cache[self._tables[0]].view(torch.int16), cache[self._tables[1]].view(torch.int16))

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


def connector(settings: Settings) -> Iterator[BenchRecord]:
    """The connector worker with pages of a GPU: the time that vLLM's worker would wait for."""
    device = torch.device("cuda")
    layout = kvtide.Layout.attention(layers=32, heads=8, head_dim=128)
    footprint = layout.geometry["full"].footprint
    numbers = np.random.default_rng(1)
    with running(5 * _BLOCKS * footprint) as (path, _), ExitStack() as stack:
        engine = _Engine(lambda: Client(path), layout, device, 2 * _BLOCKS * BLOCK_TOKENS // _PAGE)
        stack.callback(engine.close)

        def ours() -> Mapping[str, Sample]:
            tokens = numbers.integers(0, 1 << 17, _BLOCKS * BLOCK_TOKENS).tolist()
            found = {"out": engine.store(tokens), "in": engine.load(tokens)}
            engine.check()
            return found

        nbytes = _BLOCKS * layout.geometry["full"].nbytes
        rounds = compare({"kvtide": ours, "limit": bus(nbytes)}, settings.rounds(15, 5), settings.progress, warm_up=6)
    for task, verb in (("out", "stored"), ("in", "loaded")):
        yield figure(
            f"gpu-connector-{task}",
            "GB/s",
            [s.speed for s in rounds["kvtide"][task]],
            better="higher",
            limit=[s.speed for s in rounds["limit"][task]],
            bar=50,
            command=settings.command,
            note=f"Llama-3-8B, 8,192 tokens {verb} by the worker's half, from a step's orders to its report, through a "
            f"node; {torch.cuda.get_device_name()}; limit: large copies of pinned memory",
        )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this machine has no GPU that torch can use")
    folder = Path(tempfile.gettempdir())
    settings = Settings(False, folder, "python -m bench.connector", lambda _: None, NoPeers())
    print(msgspec.json.format(msgspec.json.encode(list(connector(settings))), indent=2).decode())


if __name__ == "__main__":
    main()
