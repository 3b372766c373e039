"""Asyncio: prefetch a prompt from disk while its request waits in a queue, then load it without delay."""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

import kvtide

LAYOUT = kvtide.Layout.attention(layers=4, heads=2, head_dim=64, block_tokens=64)
MODEL = kvtide.Model(LAYOUT, weights="tiny-model@v1")
PROMPTS = [np.arange(n, n + 64 * 8, dtype=np.uint32) for n in range(0, 4000, 1000)]


async def request(session: kvtide.Session, number: int) -> None:
    prefetch = session.prefetch(PROMPTS[number])  # the request has just arrived
    await asyncio.sleep(0)  # the request waits in a queue
    await prefetch
    with session.match(PROMPTS[number]) as match:
        loaded = await session.load(match)
        print(f"request {number}: {loaded.tokens} tokens, in DRAM before they were needed: {match.ready}")


async def main(folder: Path) -> None:
    settings = {"dram": {"budget": "64MiB"}, "nvme": {"path": folder, "budget": "64MiB"}}
    with kvtide.open(**settings) as store:
        for prompt in PROMPTS:
            store.session(MODEL).store(prompt, [np.random.bytes(LAYOUT.geometry["full"].nbytes)] * 8)
    with kvtide.open(**settings) as store:  # after a restart all blocks are on disk
        session = store.session(MODEL)
        await asyncio.gather(*(request(session, number) for number in range(len(PROMPTS))))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
