"""An engine of a scheduler and two workers: each worker copies its own heads of every block, in a node's memory."""

import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import kvtide

MODEL = kvtide.Model(kvtide.Layout.attention(layers=4, heads=2, head_dim=64, block_tokens=64), weights="tiny-model@v1")
PROMPT = np.arange(64 * 4, dtype=np.uint32)


def work(address: str, token: str, rank: int, loads: list[str], stores: list[str]) -> None:
    with kvtide.connect(address) as client, client.join(token, rank) as me, me.step(loads, stores) as step:
        for view in [view for filling in step.stores if filling for view in filling.views]:
            me.part("full", view)[:] = rank + 1  # stands for what this rank's GPU has computed
        for loaded in filter(None, step.loads):
            right = all((me.part("full", view) == rank + 1).all() for view in loaded.blocks)
            line = f"worker {rank} has its heads of {loaded.tokens} tokens, right in every byte: {right}\n"
            print(line, end="", flush=True)  # in one write: the other worker prints too


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(2) as pool:
        node = subprocess.Popen([sys.executable, "-m", "kvtide", "node", "--socket", "node.sock"], cwd=folder)
        while node.poll() is None and not Path(folder, "node.sock").exists():
            time.sleep(0.01)
        with kvtide.connect(address := f"unix:{folder}/node.sock") as client:
            group = client.worker_group(session := client.session(MODEL), ranks=2)
            ticket = group.delegate(PROMPT).ticket  # the engine sends tickets to its workers over its own channel
            pool.starmap(work, [(address, group.token, rank, [], [ticket]) for rank in range(2)])
            with session.match(PROMPT) as match:
                pool.starmap(work, [(address, group.token, rank, [group.ticket(match)], []) for rank in range(2)])
        node.terminate()
        node.wait()
