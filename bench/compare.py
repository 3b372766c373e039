"""This checkout beside another commit: what a match, a miss, a store, a step of the node and NVMe cost.

``python -m bench.compare COMMIT [TASK ...]`` checks COMMIT out into a temporary folder and runs the same tasks with the
code of both, each in a process of its own. The two take turns, round by round, and change who is first. Where a process
happens to have its memory makes it a few per cent faster or slower for its life, so after a few rounds a new pair of
processes is started. A pair's ratio is the median of its rounds' ratios; a task's ratio is the median of its pairs',
with their quartiles; above 1 this checkout costs more. CPU time counts all threads, and the node's process too. Writes
``bench/results/compare/latest.json``.

Tasks use only calls that both commits have. What a call answers may differ between them, so it is not looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "bench" / "results" / "compare" / "latest.json"
MIB = 1 << 20

Task = Callable[[], int]
"""One round; answers how many operations it did."""


# -- the worker: runs with the code of one of the two commits ---------------------------------------------------


def _cpu(pid: int) -> float:
    """CPU seconds of all threads of another process, in nanoseconds' resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _prepared(stack: ExitStack, folder: Path, wanted: str) -> tuple[Task, int]:
    """The task of that name, and the process number of the node, or 0."""
    import numpy as np

    import kvtide
    from kvtide import config
    from kvtide.benchmarks.node import running
    from kvtide.benchmarks.settings import TINY

    def opened(**sections: Any) -> kvtide.Store:
        return stack.enter_context(kvtide.Store(config.read(os.devnull, env={}, **sections)))

    block = np.zeros(TINY.geometry["full"].nbytes, np.uint8)
    fresh = itertools.count(1)

    if wanted == "match":
        small = opened(dram={"budget": 64 * MIB})
        session = stack.enter_context(small.session(kvtide.Model(TINY, "compare")))
        prompt = np.arange(512 * 16, dtype=np.uint32)
        session.store(prompt, [block] * 512)

        def match() -> int:
            for _ in range(200):
                session.match(prompt).release()
            return 200

        return match, 0

    if wanted == "miss":
        empty = opened(dram={"budget": 64 * MIB})
        loser = stack.enter_context(empty.session(kvtide.Model(TINY, "compare")))
        chains = [loser.chain(np.full(64 * 16, next(fresh), np.uint32)) for _ in range(200)]

        def miss() -> int:
            for chain in chains:
                loser.match(chain).release()
            return len(chains)

        return miss, 0

    if wanted == "store":
        full = opened(dram={"budget": 64 * MIB, "segment": "16MiB"})
        writer = stack.enter_context(full.session(kvtide.Model(TINY, "compare")))

        def store() -> int:
            """64 blocks at a time into a tier that is full, so that each evicts one."""
            for _ in range(100):
                writer.store(np.full(64 * 16, next(fresh), np.uint32), [block] * 64)
            return 100

        for _ in range(4):
            store()
        return store, 0

    if wanted == "step":
        path, pid = stack.enter_context(running(64 * MIB))
        client = stack.enter_context(kvtide.connect(f"unix:{path}"))
        asker = stack.enter_context(client.session(kvtide.Model(TINY, "compare")))
        asked = np.arange(64 * 16, dtype=np.uint32)
        asker.store(asked, [block] * 64)

        def step() -> int:
            for _ in range(500):
                asker.match(asked).release()
            return 500

        return step, pid

    codec, _, verb = wanted.partition("-")
    shape = kvtide.Layout.attention(layers=8, heads=4, head_dim=64, block_tokens=64)  # 512 KiB
    nbytes = shape.geometry["full"].nbytes
    noise = np.random.default_rng(0).standard_normal(nbytes // 2, np.float32).view(np.uint16)[1::2].copy()
    content = noise.view(np.uint8)[:nbytes]
    tier = {"path": str(folder / "tier"), "budget": 1024 * MIB, "store": "through"}
    tier["codec"] = "raw" if codec == "nvme" else codec
    on_disk = opened(dram={"budget": 64 * MIB, "segment": "16MiB"}, nvme=tier)
    mover = stack.enter_context(on_disk.session(kvtide.Model(shape, "compare")))
    prompts = itertools.cycle(range(16))

    def write() -> int:
        for _ in range(4):
            mover.store(np.full(32 * 64, next(fresh), np.uint32), [content] * 32)
            on_disk.flush(60)
        return 32 * 4

    def read() -> int:
        """Blocks that left DRAM long ago: of 128 MiB, 64 are there."""
        for _ in range(8):
            number = next(prompts)
            with mover.match(np.full(16 * 64, 1 << 30 | number, np.uint32)) as found:
                mover.load(found).wait()
        return 8 * 16

    for number in range(16):
        mover.store(np.full(16 * 64, 1 << 30 | number, np.uint32), [content] * 16)
        on_disk.flush(60)
    return (read if verb == "read" else write), 0


def worker(folder: str, wanted: str) -> None:
    """Do a round of the task for each line, and answer wall and CPU seconds for one operation."""
    with ExitStack() as stack:
        task, pid = _prepared(stack, Path(folder), wanted)
        print("ready", flush=True)
        for _ in sys.stdin:
            theirs = _cpu(pid) if pid else 0.0
            wall, cpu = time.perf_counter(), time.process_time()
            count = task()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            cpu += _cpu(pid) - theirs if pid else 0.0
            print(json.dumps([wall / count, cpu / count]), flush=True)


# -- the two beside each other ----------------------------------------------------------------------------------


@contextmanager
def _worker(tree: Path, wanted: str) -> Iterator[Callable[[], tuple[float, float]]]:
    from kvtide.benchmarks.settings import environment  # here, for a worker runs this file with another's kvtide

    with tempfile.TemporaryDirectory(prefix="kvtide-compare-") as folder:
        path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", folder, wanted],
            env=environment(PYTHONPATH=path, KVTIDE_CONFIG=os.devnull),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout

        def ask() -> tuple[float, float]:
            print(file=to, flush=True)
            wall, cpu = json.loads(answers.readline())
            return wall, cpu

        try:
            assert answers.readline() == "ready\n", f"the worker of {tree} did not start"
            yield ask
        finally:
            to.close()
            process.wait(60)


def _measured(task: str, before: Path, rounds: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Ours and theirs, round by round, of one pair of processes."""
    with _worker(ROOT, task) as ours, _worker(before, task) as theirs:
        ours(), theirs()  # the first round warms caches
        found = []
        for number in range(rounds):
            turn = [ours, theirs] if number % 2 else [theirs, ours]
            measured = {ask: ask() for ask in turn}
            found.append((measured[ours], measured[theirs]))
        return found


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


def main() -> None:
    from kvtide.benchmarks.record import machine  # here, for a worker runs this file with another's kvtide

    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").partition("\n")[0])
    every = ["match", "miss", "store", "step", "nvme-read", "nvme-write", "zstd-read", "zstd-write"]
    parser.add_argument("commit", help="the commit to compare with, or a folder with its checkout")
    parser.add_argument("task", nargs="*", default=every, help=f"of {', '.join(every)}; all if none is named")
    parser.add_argument("--pairs", type=int, default=9, help="of processes, one after the other")
    parser.add_argument("--rounds", type=int, default=5, help="of each pair")
    given = parser.parse_args()
    for task in given.task:
        if task not in every:
            parser.error(f"there is no task {task!r}; choose of {', '.join(every)}")
    with ExitStack() as stack:
        if Path(given.commit).is_dir():
            before = Path(given.commit).resolve()
        else:
            before = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "before"
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "--quiet", "--detach", str(before), given.commit], check=True)
            stack.callback(subprocess.run, [*git, "remove", "--force", str(before)], check=True)
        commit, beside = _commit(ROOT), _commit(before)
        results: dict[str, Any] = {}
        for task in given.task:
            pairs = [_measured(task, before, given.rounds) for _ in range(given.pairs)]
            every_round = [both for pair in pairs for both in pair]
            results[task] = {
                "us": round(statistics.median(ours[0] for ours, _ in every_round) * 1e6, 2),
                "cpu_us": round(statistics.median(ours[1] for ours, _ in every_round) * 1e6, 2),
                "wall_ratio": _quartiles([statistics.median(o[0] / t[0] for o, t in pair) for pair in pairs]),
                "cpu_ratio": _quartiles([statistics.median(o[1] / t[1] for o, t in pair) for pair in pairs]),
                "pairs": given.pairs,
                "rounds": given.rounds,
            }
            low, middle, high = results[task]["cpu_ratio"]
            wall = results[task]["wall_ratio"]
            print(
                f"{task:11} {results[task]['us']:10.1f} us  {results[task]['cpu_us']:10.1f} CPU us"
                f"   CPU x {middle:.3f} ({low:.3f} to {high:.3f})"
                f"   wall x {wall[1]:.3f} ({wall[0]:.3f} to {wall[2]:.3f})",
                flush=True,
            )
    found = {"commit": commit, "beside": beside, "machine": machine()}
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    tasks = {**(kept["tasks"] if found.items() <= kept.items() else {}), **results}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({**found, "tasks": tasks}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3])
    else:
        main()
