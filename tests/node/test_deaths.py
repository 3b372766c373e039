"""Nodes and clients that die, stop, or hang up: no wrong byte, no wait, nothing lost but what must be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.block import Layout
from kvtide.errors import ForkedError, TierError
from kvtide.index.keys import Model
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, check, data, length, prompt
from tests.node.serving import Process, eventually

WRITER = """
import sys, kvtide
from kvtide.node.client.client import connect
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
client = connect("unix:" + sys.argv[1])
session = client.session(MODEL)
reservation = session.reserve(prompt(7, 8))
part = 1 if "whole" in sys.argv else 2
for view, block in zip(reservation.views, data(PLAIN, prompt(7, 8))):
    view[: len(block) // part] = block.data.cast("B")[: len(block) // part]
match = session.match(prompt(1, 2))
held = client.statistics().held
if "hang-up" in sys.argv:
    client._link.close()
print("ready", held, flush=True)
if sys.stdin.readline() == "seal\\n":
    reservation.seal()
    print("sealed", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def writer(node: Process, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a half-written reservation and a match."""
    command = [sys.executable, "-c", WRITER, str(node.path), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready 4"), "two blocks to write, two to read"
        yield process
        process.kill()


def test_without_a_node_everything_is_a_miss_and_it_comes_back(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(30)
        with session.match(prompt(1, 2)) as match:
            loaded = session.load(match).wait()
            node.kill()
            eventually(lambda: not client.connected)
            check(PLAIN, loaded, prompt(1, 2))  # what was handed out stays
            assert length(session, prompt(1, 2)) == 0
            assert session.store(prompt(3), data(PLAIN, prompt(3))).dropped == 1
            assert session.pin(prompt(1)) == 0
            assert session.reserve(prompt(5)).keys == []
            with pytest.raises(TierError, match="went away"):
                session.drop(prompt(1))
            assert not client.flush(1)
        node.start()
        eventually(lambda: client.connected)
        assert length(session, prompt(1, 2)) == 32, "from its disk"
        assert session.store(prompt(3), data(PLAIN, prompt(3))).stored == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_rights_of_a_dead_client_are_given_back(node: Process, how: signal.Signals) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with writer(node) as child:
            assert client.statistics().held == 4
            child.send_signal(how)
            child.wait()
            eventually(lambda: client.statistics().held == 0)
            assert length(session, prompt(7, 8)) == 0, "half a block is no block"
            assert session.store(prompt(7, 8), data(PLAIN, prompt(7, 8))).stored == 2


def test_a_closed_socket_of_a_living_writer_frees_nothing(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with writer(node, "hang-up") as child:
            eventually(lambda: "kept until its process exits" in node.log)
            assert client.statistics().held == 4
            with session.match(prompt(7)) as match:
                assert match.pending
            child.kill()
            child.wait()
            eventually(lambda: client.statistics().held == 0)


def test_a_stopped_writer_keeps_its_slots(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with writer(node) as child:
            child.send_signal(signal.SIGSTOP)
            many = prompt(*range(100, 400))
            done = session.store(many, data(PLAIN, many))
            assert done.stored
            assert client.statistics().held >= 4, "others want the room, and do not get it"
            child.send_signal(signal.SIGCONT)
            child.communicate("\n", timeout=30)
            eventually(lambda: client.flush(30) and client.statistics().held == 0)


@pytest.mark.parametrize("end", ["seal", "die", "die stopped"])
def test_a_stopped_writer_does_not_keep_others_from_storing_the_same(node: Process, end: str) -> None:
    tokens = prompt(7, 8)
    with Client(node.path) as client, client.session(MODEL) as session, client.session(MODEL) as other:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with writer(node, "whole") as child:
            child.send_signal(signal.SIGSTOP)
            with session.reserve(tokens) as second:
                assert len(second.keys) == 2
                done = other.store(tokens, data(PLAIN, tokens))
                assert (done.stored, done.present, done.dropped, done.pending) == (0, 0, 0, 2)
            done = session.store(tokens, data(PLAIN, tokens))
            assert (done.stored, done.present, done.pending) == (2, 0, 0)
            assert length(session, tokens) == 32
            done = other.store(tokens, data(PLAIN, tokens))
            assert (done.stored, done.present) == (0, 2), "now they are there"
            assert client.statistics().pipeline.reservations == 1, "that of who is stopped"
            if end == "seal":
                child.send_signal(signal.SIGCONT)
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write("seal\n")
                child.stdin.flush()
                assert child.stdout.readline() == "sealed\n"
            if end != "die stopped":
                child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait()
        eventually(lambda: client.flush(30) and client.statistics().held == 0)
        pipeline = client.statistics().pipeline
        assert (pipeline.leases, pipeline.reservations, pipeline.pending, pipeline.doomed) == (0, 0, 0, 0)
        assert client.statistics().tiers["dram"].blocks == 4
        assert length(session, tokens) == 32


def test_a_stop_keeps_what_is_worth_keeping(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        node.stop()
        assert not node.path.exists()
        node.start()
        eventually(lambda: client.connected)
        assert length(session, prompt(1, 2)) == 32


def test_a_child_that_was_forked_has_no_line_to_the_node(node: Process) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with session.match(prompt(1, 2)) as match:
            if (child := os.fork()) == 0:
                told = 1
                with contextlib.suppress(ForkedError):
                    told = 2
                    session.match(prompt(1))
                    told = 1
                client._link.close()  # type: ignore[union-attr]
                os._exit(told)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2, "it is told so"
            assert client.connected, "the parent's goes on"
            check(PLAIN, session.load(match).wait(), prompt(1, 2))
            assert client.statistics().held == 2
        assert length(session, prompt(1, 2)) == 32


def test_a_client_maps_any_number_of_segments_and_lets_go_of_them(tmp_path: Path) -> None:
    """Two models whose blocks waste each other's segments take turns: what the node gave back, its client does too."""
    settings = {"KVTIDE_DRAM_BUDGET": "96MiB", "KVTIDE_DRAM_SEGMENT": "1MiB", "KVTIDE_NVME_PATH": ""}
    node = Process(tmp_path, **settings)
    other = Layout.attention(layers=1, heads=3, head_dim=400, block_tokens=16, dtype="float32")
    many = prompt(*range(3000))
    try:
        with Client(node.path) as client, Client(node.path) as fresh:
            for layout in (PLAIN, other, PLAIN):
                model = Model(layout, "given:turns")
                with client.session(model) as session:
                    nbytes = layout.geometry["full"].nbytes
                    done = session.store(many, [bytes(nbytes)] * 3000)
                    assert done.stored > 66, "in more segments than descriptors go with one message"
                    with fresh.session(model) as late, late.match(many) as match:
                        assert len(late.load(match).wait().blocks) == match.blocks
            client.statistics()  # each answer says what is gone
            assert client._link is not None
            assert sum(len(memory) for memory in client._link._segments.values()) <= 97 << 20
    finally:
        node.kill()
