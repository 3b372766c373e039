"""The process that ``test_crash`` kills, and what both must agree on.

Run as a program it is a *zygote*: it imports everything once and then, for each line on its standard input (a job, as
JSON), forks a child that opens a store and works until it is killed. Children report on standard output, one line a
time, so short that the kernel never cuts it:

    p PID                the child was forked
    r                    it has opened the store
    s CHAIN START        it is about to store the chain's blocks from START on
    d CHAIN START        it is about to drop them
    D CHAIN START        they are dropped: this was acknowledged
    a KEY                the disk has this block: this was announced
    x TEXT               something is wrong
    e                    the child is gone (said by the zygote, so that nothing of the child comes after it)

A chain is stored and dropped by one thread only, so its lines are in the order of what happened to it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import threading
import traceback
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kvtide import config
from kvtide.block import BlockKey, Layout
from kvtide.config import Config
from kvtide.events import BlockStored, Event
from kvtide.index.keys import Model
from kvtide.node.client.client import Client
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.testing import blocks

MIB = 1 << 20
THREADS = 3
DEPTH = 4
CHAINS = 72
MODELS = [
    Model(Layout.attention(layers=2, heads=2, head_dim=64, block_tokens=64), "crash"),
    Model(Layout.attention(layers=3, heads=1, head_dim=129, block_tokens=64), "crash"),
]
"""Blocks of 64 and of 97 KiB; the second has padding."""


@dataclass(frozen=True)
class Job:
    """One life of the store."""

    folder: str
    seed: int
    roomy: bool
    """Room for everything on the disk: nothing that was announced may be missing later."""
    when: str
    codec: str
    durable: bool

    @property
    def config(self) -> Config:
        return config.read(
            env={},
            dram={"budget": 3 * MIB, "segment": MIB},
            nvme={
                "path": self.folder,
                "budget": (64 if self.roomy else 16) * MIB,
                "segment": MIB,
                "threads": 3,
                "store": self.when,
                "codec": self.codec,
                "durable": self.durable,
            },
        )


def sessions(store: Store | Client) -> list[Session]:
    return [store.session(model) for model in MODELS]


def session_of(open_sessions: list[Session], number: int) -> Session:
    return open_sessions[number % len(MODELS)]


def tokens(number: int, stop: int = DEPTH) -> npt.NDArray[np.uint32]:
    """The prompt of a chain. Neighbours share their first block, so that trees are in play."""
    marks = [number // 4, *[number] * (DEPTH - 1)][:stop]
    return np.repeat(np.array(marks, np.uint32), MODELS[number % len(MODELS)].layout.block_tokens)


def keys(number: int) -> list[BlockKey]:
    """The names of a chain's blocks."""
    return MODELS[number % len(MODELS)].namer().chain(tokens(number)).keys(b"full")


@functools.lru_cache(1024)
def content(key: BlockKey, nbytes: int) -> blocks.Bytes:
    return (blocks.floats if key[0] % 2 else blocks.content)(key, nbytes)


def read(session: Session, number: int, stop: int, have: int = 0) -> int:
    """How many blocks of a chain can be read; each is checked to the last byte."""
    names = session.chain(tokens(number, stop))
    geometry = session.layout.geometry["full"]
    with session.match(names, have=have * session.layout.block_tokens) as match:
        loaded = session.load(match).wait()
        for key, view in zip(names.keys(b"full")[have:], loaded.blocks, strict=False):
            assert blocks.holds(view, geometry, content(key, geometry.nbytes)), f"wrong bytes in {key.hex()}"
        return loaded.tokens // session.layout.block_tokens


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def traffic(store: Store, thread: int, seed: int) -> None:
    """Work for ever."""
    rng = random.Random(f"{seed} {thread}")
    mine = [n for n in range(CHAINS) if n // 4 % THREADS == thread]
    open_sessions = sessions(store)
    while True:
        number = rng.choice(mine)
        session = session_of(open_sessions, number)
        start = rng.choice([0, 0, 0, 1, 2])
        what = rng.random()
        if what < 0.5:
            names = session.chain(tokens(number))
            say("s", number, start)
            size = session.layout.geometry["full"].nbytes
            session.store(names, [content(k, size) for k in names.keys(b"full")[start:]], start=start)
        elif what < 0.65:
            say("d", number, start)
            session.drop(tokens(number), start=start)
            say("D", number, start)
        elif what < 0.9:
            other = rng.randrange(CHAINS)
            read(session_of(open_sessions, other), other, DEPTH)
        else:
            session.prefetch(tokens(number))


def work(job: Job) -> None:
    """The life of a child. Only SIGKILL ends it."""

    def happened(event: Event) -> None:
        if job.roomy and isinstance(event, BlockStored) and event.tier == "nvme":
            for key in event.keys:
                say("a", key.hex())

    def run(thread: int) -> None:
        try:
            traffic(store, thread, job.seed)
        except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
            say("x", traceback.format_exc().replace("\n", " | ")[:4000])

    try:
        store = Store(job.config)
    except BaseException:  # noqa: BLE001
        say("x", traceback.format_exc().replace("\n", " | ")[:4000])
        os._exit(1)
    store.follow(happened)
    say("r")
    for thread in range(1, THREADS):
        threading.Thread(target=run, args=(thread,), daemon=True).start()
    run(0)
    threading.Event().wait()


def main() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        pid = os.fork()
        if not pid:
            work(job)
            os._exit(1)
        say("p", pid)
        os.waitpid(pid, 0)
        say("e")


def line(job: Job) -> str:
    """A job as the zygote reads it."""
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    main()
