"""A conversation of several turns: each turn loads the blocks of the turns before it and stores only its new blocks."""

import numpy as np

import kvtide

LAYOUT = kvtide.Layout.attention(layers=2, heads=2, head_dim=64, block_tokens=16)
NBYTES = LAYOUT.geometry["full"].nbytes


def compute(count: int) -> list[bytes]:
    """Stands for an engine: returns the KV of ``count`` blocks."""
    return [np.random.bytes(NBYTES) for _ in range(count)]


def main() -> None:
    numbers = np.random.default_rng(1)
    with kvtide.open(dram={"budget": "64MiB"}) as store:
        session = store.session(kvtide.Model(LAYOUT, weights="tiny-model@v1"))
        chat = session.chain()  # keeps the keys of its blocks: for a turn, only its new tokens are hashed
        for turn in range(1, 6):
            chat.extend(numbers.integers(0, 32_000, 40, dtype=np.uint32))
            with session.match(chat) as match:
                session.load(match).wait()  # views of the blocks, without a copy
                have = match.blocks
            done = session.store(chat, compute(chat.blocks - have), start=have)
            print(f"turn {turn}: {chat.tokens} tokens, {have} blocks reused, {done.stored} new")

        session.pin(chat, stop=2)  # the system prompt, for example: it is not evicted
        print(store.statistics().pinned, "blocks pinned")


if __name__ == "__main__":
    main()
