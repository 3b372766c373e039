"""Nodes that die, hang or lose blocks while a connector uses them: every request ends, with the right
bytes, no loop of an engine waits, and hits come back."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvtide.engines.connector import node_thread
from kvtide.engines.connector.node_thread import NodeThread
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.errors import TierError
from kvtide.node.client import link
from kvtide.node.client.client import Client
from kvtide.node.client.workers import Step, Worker
from kvtide.testing.faults import FaultyDisk
from tests.engines.connector.conftest import Engines
from tests.engines.connector.test_connector import prompt, serve
from tests.engines.connector.toy import Request, Toy
from tests.node.serving import Process, Thread, eventually


def hits(toy: Toy) -> bool:
    """Whether what is computed now is found afterwards."""
    serve(toy, "writer", prompt("after"))
    return serve(toy, "reader", prompt("after")).cached == 256


def matching(toy: Toy, request: Request, fault: Callable[[], None]) -> None:
    fault()
    toy.add(request)


def loading(toy: Toy, request: Request, fault: Callable[[], None]) -> None:
    """After the promise, before the load."""
    toy.add(request)
    toy._admit()
    assert request.loading
    fault()


def storing(toy: Toy, request: Request, fault: Callable[[], None]) -> None:
    """After the workers were given their orders, before they copy."""
    request.tokens += prompt("unknown")
    toy.add(request)
    compute = toy._compute

    def dying(request: Request, stop: int) -> None:
        toy._compute = compute  # type: ignore[method-assign]
        fault()
        compute(request, stop)

    toy._compute = dying  # type: ignore[method-assign]


POINTS = [matching, loading, storing]
Point = Callable[[Toy, Request, Callable[[], None]], None]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_node_is_killed_and_comes_back(node: Process, engines: Engines, point: Point, ranks: int) -> None:
    toy = engines(ranks=ranks, idle=0.1)
    serve(toy, "first", prompt(1))
    request = Request("unlucky", prompt(1))
    point(toy, request, node.kill)
    toy.run()
    assert serve(toy, "without a node", prompt(2)).cached == 0
    node.start()
    eventually(lambda: hits(toy))


@contextlib.contextmanager
def hung(node: Process, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Stop the node when the answer is called, and let it go on in the end. Nobody gives it up meanwhile, and no loop
    has a moment for it; so a loop that waited for it all the same would wait for ever."""
    with monkeypatch.context() as patch:

        def stop() -> None:
            patch.setattr(node_thread, "_MOMENT", 0.0)
            node.signal(signal.SIGSTOP)

        yield stop
    node.signal(signal.SIGCONT)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_loop_waits_for_a_node_that_hangs(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch, point: Point, ranks: int
) -> None:
    monkeypatch.setattr(link, "_ANSWER", 1000.0)
    toy = engines(ranks=ranks, idle=0.1)
    serve(toy, "first", prompt(1))
    request = Request("unlucky", prompt(1))
    with hung(node, monkeypatch) as stop:
        point(toy, request, stop)
        toy.run()
        toy.run(*[Request(f"r{i}", prompt(i)) for i in range(4)])
        assert request.cached in (0, 256)
    eventually(lambda: hits(toy))


def test_a_node_that_hangs_too_long_is_left_and_found_again(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_ANSWER", 1.0)
    toy = engines(ranks=2, idle=0.1)
    serve(toy, "first", prompt(1))
    with hung(node, monkeypatch) as stop:
        stop()
        toy.run(Request("unlucky", prompt(1)))
        toy.flush()
        assert serve(toy, "without a node", prompt(1)).cached == 0
    eventually(lambda: hits(toy))


@pytest.mark.parametrize(("options", "seconds"), [(RequestOptions(), 10), (RequestOptions(max_load_ms=50), 0.05)])
def test_a_load_that_takes_too_long_is_computed(tmp_path: Path, options: RequestOptions, seconds: float) -> None:
    path, disk = tmp_path / "node.sock", FaultyDisk()
    dram, nvme = {"budget": "2MiB", "segment": "1MiB"}, {"budget": "16MiB", "path": str(tmp_path / "tier")}
    with contextlib.closing(Thread(path, dram=dram, nvme=nvme)), contextlib.closing(Toy(lambda: Client(path))) as toy:
        serve(toy, "first", prompt(1))
        assert toy.scheduler._session_pool.client().flush(60)
    with contextlib.closing(Thread(path, disk, dram=dram, nvme=nvme)):
        toy = Toy(lambda: Client(path), idle=0.01)
        with contextlib.closing(toy), disk.gate("read"):
            began = toy.clock.monotonic()
            assert serve(toy, "impatient", prompt(1), options).cached == 0
            assert toy.clock.monotonic() - began <= seconds + 0.05


def test_when_the_rest_is_late_the_engine_is_promised_what_is_held(tmp_path: Path) -> None:
    path, disk = tmp_path / "node.sock", FaultyDisk()
    dram, nvme = {"budget": "2MiB", "segment": "1MiB"}, {"budget": "16MiB", "path": str(tmp_path / "tier")}
    with contextlib.closing(Thread(path, dram=dram, nvme=nvme)), contextlib.closing(Toy(lambda: Client(path))) as toy:
        serve(toy, "first", prompt(1))
    with contextlib.closing(Thread(path, disk, dram=dram, nvme=nvme)):
        toy = Toy(lambda: Client(path), idle=0.01)
        with contextlib.closing(toy):
            assert serve(toy, "short", prompt(1)[: toy.layout.block_tokens + 1]).cached == toy.layout.block_tokens
            with disk.gate("read"):
                request = serve(toy, "impatient", prompt(1), RequestOptions(max_load_ms=50))
            assert request.cached == toy.layout.block_tokens, "neither nothing nor what is still on disk"


def test_a_request_may_say_how_long_it_waits_for_an_answer(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_ANSWER", 1000.0)
    toy = engines(idle=0.01)
    serve(toy, "first", prompt(1))
    with hung(node, monkeypatch) as stop:
        stop()
        for options, seconds in (
            (RequestOptions(max_load_ms=50), 0.05),
            (RequestOptions(max_load_ms=0), 0),
            (RequestOptions(), 2),
        ):
            began = toy.clock.monotonic()
            toy.run(Request(f"{options}", prompt(1), options=options))
            assert seconds <= toy.clock.monotonic() - began <= seconds + 0.05


def test_an_engine_that_loses_pages_while_it_waits_is_given_all_that_it_lacks(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_ANSWER", 1000.0)
    serve(engines(), "first", prompt(1))
    toy = engines(prefix_cache=True)
    serve(toy, "part", prompt(1, 130), RequestOptions(no_load=True, no_store=True))
    request = Request("loses", prompt(1))
    with hung(node, monkeypatch) as stop:
        stop()
        toy.add(request)
        toy.step()
        assert toy._known(request)
        toy.forget()
    toy.run()
    assert (request.own, request.cached) == (0, 256)


def test_room_that_comes_too_late_is_given_back(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the engine makes no step any more. What is held at the end, the fixture asks."""
    monkeypatch.setattr(link, "_ANSWER", 1000.0)
    toy = engines(idle=0.1)
    serve(toy, "first", prompt(1))
    with hung(node, monkeypatch) as stop:
        stop()
        toy.run(*[Request(f"r{i}", prompt(i), options=RequestOptions(no_load=True)) for i in range(2, 5)])


def test_an_aborted_request_keeps_its_pages_until_the_workers_are_through(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_ANSWER", 1000.0)
    toy = engines(ranks=2)
    serve(toy, "first", prompt(1))
    free = toy.free
    request, other = Request("aborted", prompt(1)), Request("other", prompt(1))
    toy.add(request)
    toy._admit()
    with hung(node, monkeypatch) as stop:
        stop()
        toy.step()
        toy.abort(request)
        toy.add(other)
        for _ in range(5):
            toy.step()
        assert toy.free < free
    toy.run()
    assert (other.cached, toy.free) == (256, free)


def test_pages_that_may_have_changed_are_not_stored(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears where the blocks are to be when the request is over and its pages are others'."""
    toy, late = engines(chunk=1000), threading.Event()
    serve(toy, "first", prompt(1))
    toy.workers[0]._node_thread.ask(late.wait, None)
    with monkeypatch.context() as patch:
        storing(toy, Request("second", []), lambda: patch.setattr(node_thread, "_MOMENT", 0.0))
        toy.run()
        late.set()
        toy.flush()
        toy.step()
    found = serve(toy, "third", prompt("unknown"))
    assert (found.cached, toy.workers[0].take().missed) == (0, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_cut_off_costs_one_store(engines: Engines, rank: int) -> None:
    toy = engines(ranks=2)
    serve(toy, "first", prompt(1))

    def cut() -> None:
        client = toy.workers[rank]._node_access.client()
        client.link.close()
        eventually(lambda: client.connected)

    storing(toy, Request("unlucky", prompt(1)), cut)
    toy.run()
    toy.flush()
    loading(toy, Request("unlucky too", prompt(1)), cut)
    toy.run()
    eventually(lambda: hits(toy))


def test_blocks_that_rot_on_disk_are_computed_again(node: Process, engines: Engines) -> None:
    serve(engines(), "first", prompt(1))
    with Client(node.path) as client:
        assert client.flush(60)
    node.stop()
    (file,) = (node.folder / "tier").glob("*.segment")
    content = bytearray(file.read_bytes())
    for at in range(4096 + 100, len(content), 4096):  # but for the first header: that block is promised
        content[at] ^= 1
    file.write_bytes(content)
    node.start()
    toy = engines()
    assert serve(toy, "again", prompt(1)).cached == 0
    assert serve(toy, "and again", prompt(1)).cached == 256


def test_a_store_that_is_full_refuses_and_nothing_else(tmp_path: Path) -> None:
    node = Process(tmp_path, KVTIDE_DRAM_BUDGET="1MiB", KVTIDE_DRAM_SEGMENT="1MiB", KVTIDE_NVME_PATH="")
    toy = Toy(lambda: Client(node.path), pages=400, ranks=2)
    many = [Request(f"r{i}", prompt(i % 5, 900)) for i in range(15)]
    for some in range(0, 15, 5):
        toy.run(*many[some : some + 5])
    toy.close()
    node.at_rest()
    node.kill()


# -- no node at all -----------------------------------------------------------------------------------------------


def test_a_node_that_cannot_be_had_is_tried_now_and_then_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def dial() -> Client:
        tried.append(1)
        raise TierError("there is no node in this test")

    toy = Toy(dial)
    with caplog.at_level(logging.INFO, "kvtide"):
        for i in range(5):
            serve(toy, f"r{i}", prompt(1))
        assert len(tried) == len(caplog.records) == 2, "for each half"
        toy.clock.advance(31)
        for i in range(5):
            serve(toy, f"later {i}", prompt(1))
        assert len(tried) == len(caplog.records) == 3, "a worker that is told nothing needs none"
    toy.close()


def test_a_node_that_comes_later_is_found(node: Process) -> None:
    there: list[Path] = []

    def dial() -> Client:
        return Client(there[0] if there else node.folder / "nothing.sock")

    toy = Toy(dial)
    serve(toy, "first", prompt(1))
    there.append(node.path)
    toy.clock.advance(31)
    assert hits(toy)
    toy.close()
    node.at_rest()


# -- the end of an engine -----------------------------------------------------------------------------------------


def test_closing_does_not_wait_for_a_node_that_hangs(node: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_ANSWER", 1000.0)
    monkeypatch.setattr(node_thread, "_CLOSING", 0.01)
    toy = Toy(lambda: Client(node.path), ranks=2, idle=0.1)
    serve(toy, "first", prompt(1))
    request = Request("under way", prompt(1))
    with hung(node, monkeypatch) as stop:
        loading(toy, request, stop)
        toy.step()
        toy.close()
    node.at_rest()  # what was left to do was done when the node went on


def test_a_thread_that_hangs_does_not_keep_a_process_alive() -> None:
    program = """
import threading
from kvtide.engines.connector import node_thread
node_thread._CLOSING = 0.01
one = node_thread.NodeThread("hangs")
one.ask(threading.Event().wait, None)
one.close()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0


def test_while_an_answer_is_late_nobody_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, result = [], Future.result

    def counted(answer: Future[bool], timeout: float | None = None) -> bool:
        waits.append(timeout)
        return result(answer, timeout)

    monkeypatch.setattr(Future, "result", counted)
    monkeypatch.setattr(node_thread, "_MOMENT", 0.001)
    thread, back = NodeThread("late"), threading.Event()
    first = thread.ask(back.wait, False)
    second = thread.ask(lambda: True, False)
    assert [thread.soon(first), thread.soon(second), thread.soon(first)] == [False] * 3
    assert waits == [0.001]
    back.set()
    eventually(lambda: thread.soon(first) and thread.soon(second))
    assert first.result()
    assert second.result()
    thread.close()


def test_what_a_worker_cannot_fill_is_given_up(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its blocks would stay as if they were just being written, and nobody could ever store them."""
    toy = engines()

    def refused(worker: Worker, loads: Sequence[str] = (), stores: Sequence[str] = ()) -> Step:
        return Step([None] * len(loads), [None] * len(stores), lambda good: None)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "step", refused)
        serve(toy, "without", prompt(1))
    serve(toy, "writer", prompt(1))
    assert serve(toy, "reader", prompt(1)).cached == 256
