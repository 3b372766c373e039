"""A process that forks, for tests: ``python -m tests.fork_worker NAME FOLDER [SOCKET]`` prints what it saw as JSON.

Forking in the tests' own process would copy pytest and all that it has open.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvtide
from kvtide.block import Layout
from kvtide.index.keys import Model
from kvtide.store.session import Session, SessionHost
from kvtide.store.store import Store

PATIENCE = 30.0
"""Seconds after which a child hangs."""
MODEL = Model(Layout.attention(layers=1, heads=1, head_dim=64, block_tokens=16), "fork")
SIZE = MODEL.layout.geometry["full"].nbytes


def tokens(seed: int, blocks: int = 2) -> list[int]:
    return [seed] * (16 * blocks)


def data(seed: int, blocks: int = 2) -> list[np.ndarray[Any, Any]]:
    return [np.full(SIZE, (seed + i) % 256, np.uint8) for i in range(blocks)]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "dram": {"budget": "8MiB", "segment": "1MiB"},
        "nvme": {"path": str(folder / "nvme"), "budget": "16MiB", "segment": "1MiB", "store": "through"},
        **more,
    }


def everything(folder: Path) -> dict[str, Any]:
    """The settings of a store with shared storage, keys and a learning policy."""
    (folder / "kek").touch(0o600)
    (folder / "kek").write_text("01" * 32)
    return settings(
        folder,
        files={"path": str(folder / "files"), "budget": "64MiB"},
        objects={"url": f"file://{folder / 'objects'}"},
        security={
            "encrypt": True,
            "key_source": f"file:{folder / 'kek'}",
            "key_file": str(folder / "keys.json"),
        },
    )


def answer(what: Callable[[], object]) -> str:
    """What came of a call."""
    try:
        what()
    except Exception as e:  # noqa: BLE001 - it is what is asked for
        return f"{type(e).__name__}: {e}"
    return "fine"


def in_child(what: Callable[[], object]) -> Any:
    """What a child answers, or that it hangs."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.write(theirs, json.dumps(what()).encode())
        os._exit(0)
    os.close(theirs)
    try:
        if not select.select([ours], [], [], PATIENCE)[0]:
            return "hangs"
        with os.fdopen(ours, "rb", closefd=False) as said:
            return json.loads(said.read() or b'"died"')
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def holding(locks: list[Any]) -> Any:
    """Other threads have these locks meanwhile, as when a fork comes in the middle of what they do."""
    taken, over = threading.Semaphore(0), threading.Event()

    def hold(lock: Any) -> None:
        with lock:
            taken.release()
            over.wait()

    threads = [threading.Thread(target=hold, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for _ in threads:
        taken.acquire()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def descriptors(folder: Path) -> list[str]:
    """The files under ``folder``, and the sockets and memory of ours, that this process has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(fd.readlink())
            if name.startswith(str(folder)) or "memfd:kvtide" in name:
                found.append(name)
    return sorted(found)


def uses(home: SessionHost, session: Session, match: kvtide.Match, reservation: kvtide.Reservation, load: Any) -> Any:
    """What comes of every verb, of things that were made before the fork."""
    more = {"forget": lambda: home.forget(b"x" * 16)} if isinstance(home, Store) else {}
    chain = session.chain(tokens(1))
    verbs: dict[str, Callable[[], object]] = {
        "session": lambda: home.session(MODEL),
        "statistics": home.statistics,  # type: ignore[attr-defined]
        "flush": lambda: home.flush(1.0),  # type: ignore[attr-defined]
        "follow": lambda: home.follow(lambda event: None),  # type: ignore[attr-defined]
        "match": lambda: session.match(tokens(1)),
        "match of a chain": lambda: session.match(chain),
        "find": lambda: session.find(tokens(1)),
        "explain": lambda: session.explain(tokens(1)),
        "explain_request": lambda: session.explain_request("one"),
        "load": lambda: session.load(match),
        "store": lambda: session.store(tokens(9), data(9)),
        "reserve": lambda: session.reserve(tokens(9)),
        "prefetch": lambda: session.prefetch(tokens(1)),
        "pin": lambda: session.pin(tokens(1)),
        "unpin": lambda: session.unpin(tokens(1)),
        "drop": lambda: session.drop(tokens(1)),
        "seal": reservation.seal,
        "wait": load.wait,
        "transfer": lambda: load.transfer.wait(1.0),
        "on_end": lambda: load.transfer.on_end(lambda: None),
        **more,
    }
    return {name: answer(verb) for name, verb in verbs.items()}


def ends(home: SessionHost, session: Session, match: kvtide.Match, reservation: kvtide.Reservation, load: Any) -> Any:
    """What comes of letting go of them."""

    def leave() -> None:
        with home, session, match, reservation:
            pass

    verbs = [load.cancel, reservation.abort, match.release, session.close, home.close, home.close, leave]
    said = [answer(verb) for verb in verbs]
    gc.collect()
    return said


def opened(home: SessionHost) -> tuple[SessionHost, Session, kvtide.Match, kvtide.Reservation, Any]:
    session = home.session(MODEL)
    for seed in (1, 2):
        session.store(tokens(seed), data(seed))
    match = session.match(tokens(1))
    return home, session, match, session.reserve(tokens(3)), session.load(match)


def goes_on(
    home: SessionHost, session: Session, match: kvtide.Match, reservation: kvtide.Reservation, load: Any
) -> bool:
    """Whether all is as before for the parent."""
    good = load.wait().tokens == 32 and bytes(load.wait().blocks[0][:1]) == b"\x01"
    reservation.seal()
    match.release()
    session.store(tokens(5), data(5))
    with session.match(tokens(5)) as found:
        good = good and session.load(found).wait().tokens == 32
    return good and home.flush(PATIENCE).complete  # type: ignore[attr-defined]


def locks_of(store: Store) -> list[Any]:
    nvme: Any = store.main.colds[0].tier
    volume = nvme._volume
    mine = [store.index.lock, store._lock, store.dram.book_lock, store.feed._lock, store.guard.lock()]
    return [
        *mine,
        volume.lock,
        volume._journal_lock,
        volume._grow_lock,
        *(cold.lane._lock for cold in store.main.colds),
    ]


# -- what the tests ask for -----------------------------------------------------------------------------------


def embedded(folder: Path) -> Any:
    """A child uses a store of its parent's, while other threads there hold every lock."""
    things = opened(kvtide.open(**everything(folder)))
    store = things[0]
    assert isinstance(store, Store)
    store.flush()
    journal = (folder / "nvme" / "journal").read_bytes()
    with holding([*locks_of(store), things[1]._guard.lock(), things[4].transfer._lock]):
        used = in_child(lambda: uses(*things))
        ended = in_child(lambda: ends(*things))
        left = in_child(lambda: descriptors(folder / "nvme"))
    untouched = journal == (folder / "nvme" / "journal").read_bytes()
    good = goes_on(*things)
    store.close()
    with kvtide.open(**everything(folder)) as again, again.session(MODEL) as session:
        found = [session.match(tokens(seed)).tokens for seed in (1, 2, 3, 5)]
    return {"used": used, "ended": ended, "left": left, "untouched": untouched, "good": good, "found": found}


def through_node(folder: Path, socket: str) -> Any:
    things = opened(kvtide.connect(f"unix:{socket}"))
    client: Any = things[0]
    line = client.link
    with holding([line._lock, line._rights_lock, client._lock, client._following, client._feed._lock]):
        used = in_child(lambda: uses(*things))
        ended = in_child(lambda: ends(*things))
        worker = in_child(lambda: answer(lambda: client.join("x" * 32, 0)))
    good = goes_on(*things) and client.connected and client.link is line
    client.close()
    return {"used": used, "ended": ended, "worker": worker, "good": good}


def lock_after_close(folder: Path) -> Any:
    """The parent closes, and opens again while its child lives."""
    store = kvtide.open(**settings(folder))
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    store.close()
    said = answer(lambda: kvtide.open(**settings(folder)).close())
    os.close(theirs)
    os.waitpid(pid, 0)
    return said


def orphan(folder: Path) -> Any:
    """Killed by the test, with a child that lives on until its standard input ends, and that has closed the store."""
    store = kvtide.open(**settings(folder))
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        store.close()
        os.write(theirs, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(ours, 1)
    print(pid, flush=True)
    signal.pause()


def owner_stays(folder: Path) -> Any:
    """Whether a child that closes everything, and one that exits as programs do, leave the lock to their parent."""
    store = kvtide.open(**everything(folder))
    pid = os.fork()
    if not pid:
        store.close()
        sys.exit(0)  # with all that atexit does
    os.waitpid(pid, 0)
    locked = in_child(lambda: answer(lambda: kvtide.open(**settings(folder))))
    with store.session(MODEL) as session:
        session.store(tokens(1), data(1))
    flushed = store.flush(PATIENCE).complete
    store.close()
    return {"locked": locked, "flushed": flushed}


def recorded(folder: Path) -> Any:
    """A child has nothing of a recording, even where a thread of its parent's just records; the parent records on."""
    file = folder / "trace.jsonl"
    store = kvtide.open(**settings(folder, record={"path": str(file)}))
    assert store.recorder is not None
    with store.session(MODEL) as session:
        session.match(tokens(1)).release()
        with holding([store.recorder._lock]):
            said = in_child(lambda: [answer(lambda: session.match(tokens(2))), answer(store.close), descriptors(file)])
        session.match(tokens(3)).release()
    store.close()
    return {"said": said, "lines": file.read_text().splitlines()}


def _work(session: Session, queue: Any) -> None:
    queue.put(answer(lambda: session.match(tokens(1))))


def processes(folder: Path) -> Any:
    """As multiprocessing forks."""
    fork = multiprocessing.get_context("fork")
    with kvtide.open(**settings(folder)) as store, store.session(MODEL) as session:
        queue = fork.SimpleQueue()
        process = fork.Process(target=_work, args=(session, queue))
        process.start()
        said = queue.get()
        process.join()
    return {"said": said, "code": process.exitcode}


def traffic(folder: Path) -> Any:
    """Forks at any moment, while threads store, load and open other directories."""
    store = kvtide.open(**settings(folder))
    over = threading.Event()
    errors: list[str] = []

    def work(number: int) -> None:
        try:
            with store.session(MODEL) as session:
                for i in range(1 << 30):
                    if over.is_set():
                        return
                    session.store(tokens(number * 100 + i % 50), data(i % 50))
                    with session.match(tokens(number * 100 + i % 50)) as match:
                        session.load(match).wait()
        except Exception as e:  # noqa: BLE001 - the test shows it
            errors.append(repr(e))

    def reopen() -> None:
        while not over.is_set():
            kvtide.open(**settings(folder / "other")).close()

    (folder / "other").mkdir()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)] + [threading.Thread(target=reopen)]
    for thread in threads:
        thread.start()
    said = []
    with store.session(MODEL) as session:
        for _ in range(40):
            said.append(
                in_child(
                    lambda: [
                        answer(lambda: session.match(tokens(1))).split(":")[0],
                        answer(store.close),
                        [name for name in descriptors(folder) if name.endswith("/lock")],
                    ]
                )
            )
    over.set()
    for thread in threads:
        thread.join()
    store.close()
    return {"said": said, "errors": errors, "again": answer(lambda: kvtide.open(**settings(folder)).close())}


def grandchild(folder: Path) -> Any:
    """A child opens a store of its own, and forks."""
    with kvtide.open(**settings(folder)) as store:

        def child() -> Any:
            (folder / "own").mkdir()
            with kvtide.open(**settings(folder / "own")) as own, own.session(MODEL) as session:
                session.store(tokens(1), data(1))
                mine = session.match(tokens(1)).tokens
                return [mine, in_child(lambda: [answer(own.statistics), answer(store.statistics)])]

        return {"said": in_child(child), "pid": os.getpid()}


if __name__ == "__main__":
    name, path, *rest = sys.argv[1:]
    print(json.dumps(globals()[name](Path(path), *rest)))
