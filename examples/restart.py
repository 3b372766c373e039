"""Blocks on NVMe survive a restart: the store is opened twice, and the second time it has the blocks of the first."""

import tempfile
from pathlib import Path

import numpy as np

import kvtide

LAYOUT = kvtide.Layout.attention(layers=4, heads=2, head_dim=64, block_tokens=64)
MODEL = kvtide.Model(LAYOUT, weights="tiny-model@v1")
PROMPT = np.arange(64 * 8, dtype=np.uint32)


def open_store(folder: Path) -> kvtide.Store:
    return kvtide.open(dram={"budget": "64MiB"}, nvme={"path": folder, "budget": "64MiB"})


def main() -> None:
    blocks = [np.random.bytes(LAYOUT.geometry["full"].nbytes) for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        with open_store(Path(folder)) as store:
            print("first run: ", store.session(MODEL).store(PROMPT, blocks))
        # Here the process could end, or the machine restart.
        with open_store(Path(folder)) as store:
            session = store.session(MODEL)
            with session.match(PROMPT) as match:
                print("second run:", match)
                loaded = session.load(match, deadline=10).wait()  # read from disk, with every byte verified
                assert [bytes(view) for view in loaded.blocks] == blocks
            print("read from disk:", store.statistics().counts["blocks read from nvme"], "blocks")
            print("dropped permanently:", session.drop(PROMPT), "blocks")


if __name__ == "__main__":
    main()
