"""A recording has each request once and in order, with what prompts share; and nothing by which anybody knows them."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtide
from kvtide import Layout, Model, Store, Tenant, config
from kvtide.clock import SystemClock
from kvtide.errors import AuditError, ConfigError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.replay.trace import load
from kvtide.security.audit import verify
from kvtide.store.recorder import ENDED, OTHER_SHAPE, QUEUE_FULL, RecordedShape, Recorder, RecorderStatistics
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import HYBRID, MODEL, OTHER_TENANT, PLAIN, SIZE, data, prompt
from tests.node.serving import Process, Thread, eventually

SHAPE = RecordedShape(SIZE, PLAIN.geometry["full"].footprint)
Prompt = tuple[list[int], Tenant | None]


def opened(folder: Path, name: str = "trace.jsonl", **more: Any) -> Store:
    """A store in memory that records."""
    record = {"path": str(folder / name), **more.pop("record", {})}
    memory = {"budget": "4MiB", "segment": "1MiB"}
    return Store(config.read(os.devnull, {}, dram=memory, record=record, **more))


def read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the requests, of whole lines alone."""
    raw = file.read_bytes()
    if file.suffix == ".gz":
        raw = zlib.decompressobj(wbits=31).decompress(raw)  # as far as it goes: a process may have been killed
    header, *lines = map(json.loads, raw[: raw.rfind(b"\n") + 1].splitlines())
    return header, lines


def ask(session: kvtide.Session, tokens: Sequence[int], **how: Any) -> None:
    session.match(tokens, **how).release()


def _recorded(client: Client, requests: int) -> RecorderStatistics | None:
    """The statistics of a node's recording, if it has so many requests."""
    found = client.statistics().recorder
    return found if found is not None and found.requests == requests else None


def blocks(asked: Prompt) -> list[Any]:
    """What a prompt's blocks are: whose, and all tokens up to each one's end."""
    tokens, tenant = asked
    whose = tenant.name if tenant else ""
    return [(whose, *tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]


def same(lines: Sequence[dict[str, Any]], asked: Sequence[Prompt]) -> None:
    """Whether these are those prompts, in that order, and blocks have one number if and only if they are the same."""
    assert [line["input_length"] for line in lines] == [len(tokens) for tokens, _ in asked]
    numbers = [n for line in lines for n in line["hash_ids"]]
    true = [block for one in asked for block in blocks(one)]
    assert [len(line["hash_ids"]) for line in lines] == [len(blocks(one)) for one in asked]
    assert len(set(numbers)) == len(set(true)) == len(set(zip(numbers, true, strict=True)))
    assert all(0 <= n < 2**53 for n in numbers)
    tenants = {
        (tenant.name if tenant else None, line.get("tenant")) for line, (_, tenant) in zip(lines, asked, strict=True)
    }
    assert len(tenants) == len({name for name, _ in tenants}) == len({label for _, label in tenants})
    assert (None, None) in tenants or all(tenant for _, tenant in asked)
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)
    assert all(set(line) <= {"timestamp", "input_length", "hash_ids", "tenant", "have"} for line in lines)


def workload(seed: int, count: int = 60) -> list[Prompt]:
    """Prompts that branch off one another, of two tenants and of none."""
    rng, made = random.Random(seed), list[Prompt]()
    for _ in range(count):
        tokens, tenant = rng.choice(made) if made and rng.random() < 0.7 else ([], rng.choice([None, *TENANTS]))
        tokens = tokens[: rng.randrange(len(tokens) + 1)] + rng.choices(range(3), k=rng.randrange(3 * SIZE))
        made.append((tokens, tenant))
    return made


TENANTS = [OTHER_TENANT, Tenant("third", b"fedcba9876543210fedcba9876543210")]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers())
def test_what_was_asked_of_a_store_is_what_is_recorded(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whatever is stored or there meanwhile: a hit and a miss are one request each."""
    folder, asked = tmp_path_factory.mktemp("recorded"), workload(seed)
    with opened(folder) as store:
        sessions = {t: store.session(MODEL, t) if t else store.session(MODEL) for t in (None, *TENANTS)}
        for tokens, tenant in asked:
            ask(sessions[tenant], tokens)
            if len(tokens) % 2:
                full = tokens[: len(tokens) // SIZE * SIZE]
                sessions[tenant].store(full, data(PLAIN, full))
    header, lines = read(folder / "trace.jsonl")
    assert header == {"kvtide_trace": 1, "block_tokens": SIZE, "layout_bytes": SHAPE.nbytes}
    same(lines, asked)


def test_what_two_clients_asked_of_a_node_is_what_is_recorded(tmp_path: Path) -> None:
    node = Process(tmp_path, KVTIDE_RECORD_PATH=str(tmp_path / "trace.jsonl"))
    try:
        with Client(node.path) as one, Client(node.path) as two:
            sessions = [
                {t: c.session(MODEL, t) if t else c.session(MODEL) for t in (None, *TENANTS)} for c in (one, two)
            ]
            asked = workload(1)
            for number, (tokens, tenant) in enumerate(asked):
                ask(sessions[number % 2][tenant], tokens)
            found = eventually(lambda: _recorded(one, len(asked)))
            assert found is not None
            assert found.active
            assert found.bytes_written == (tmp_path / "trace.jsonl").stat().st_size
        node.stop()
    finally:
        node.kill()
    same(read(tmp_path / "trace.jsonl")[1], asked)
    assert "requests of all tenants are recorded" in node.log


def test_requests_of_many_threads_are_all_there(tmp_path: Path) -> None:
    with opened(tmp_path) as store, store.session(MODEL) as session:

        def work(number: int) -> None:
            for n in range(200):
                ask(session, prompt(number, n))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = read(tmp_path / "trace.jsonl")[1]
    assert len({tuple(line["hash_ids"]) for line in lines}) == len(lines) == 800
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)


def test_one_request_is_one_line(tmp_path: Path) -> None:
    """However often it asks for its prompt, and though others write it meanwhile."""
    with opened(tmp_path) as store, store.session(MODEL) as session, session.reserve(prompt(1, 2)) as writing:
        ask(session, prompt(1, 2), wait=0.05)
        writing.abort()
        ask(session, prompt(1, 2), again=True)
        ask(session, prompt(1, 2), record=False)
        session.prefetch(prompt(1, 2)).wait()
        session.find(prompt(1, 2))
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        ask(session, prompt(1, 2), have=SIZE)
    same(read(tmp_path / "trace.jsonl")[1], [(prompt(1, 2), None), (prompt(1, 2), None)])


def test_what_an_engine_has_itself_and_what_it_tells_of_its_speed(tmp_path: Path) -> None:
    """The blocks are in the file; the cost of computing and the lifetime of blocks are only in the statistics."""
    with opened(tmp_path) as store, store.session(MODEL) as session:
        ask(session, prompt(1, 2, 3), have=2 * SIZE)
        ask(session, prompt(1, 2, 3))
        assert store.statistics().recorder == RecorderStatistics(active=True, path=str(tmp_path / "trace.jsonl"))
        ask(session, prompt(1), prefill=500.0)
        ask(session, prompt(2))
        session.store(prompt(4), data(PLAIN, prompt(4)), ttl=30.0)
        recorder = store.statistics().recorder
        assert recorder is not None
        assert recorder.prefill is not None
        assert (recorder.prefill.speed(0, 100), recorder.ttl) == (500.0, 30.0)
        session.store(prompt(5), data(PLAIN, prompt(5)))
        assert store.statistics().recorder.ttl is None  # type: ignore[union-attr]
    assert [line.get("have") for line in read(tmp_path / "trace.jsonl")[1]] == [2, None, None, None]
    assert load(tmp_path / "trace.jsonl").have == [2, 0, 0, 0]


def test_administrators_learn_which_name_a_limited_tenant_has_in_the_file(tmp_path: Path) -> None:
    tag = OTHER_TENANT.tag.hex()
    settled = config.read(
        os.devnull, {}, record={"path": tmp_path / "trace.jsonl"}, dram={"budget": "8MiB", "quotas": f"{tag}:2MiB"}
    )
    with Store(settled) as store, store.session(MODEL, OTHER_TENANT) as theirs:
        ask(theirs, prompt(1))
        name = store.statistics().tenants[tag].recorded_as
    assert [line["tenant"] for line in read(tmp_path / "trace.jsonl")[1]] == [name]


def test_times_are_those_since_the_start(tmp_path: Path) -> None:
    clock = FakeClock()
    settled = config.read(os.devnull, {}, record={"path": tmp_path / "trace.jsonl"}, dram={"budget": "4MiB"})
    with Store(settled, clock=clock) as store, store.session(MODEL) as session:
        for seconds in (0.0, 1.5, 0.0301):
            clock.advance(seconds)
            ask(session, prompt(1))
    assert [line["timestamp"] for line in read(tmp_path / "trace.jsonl")[1]] == [0, 1500, 1530]


def test_a_client_cannot_say_what_its_blocks_do_not_show(tmp_path: Path) -> None:
    """How long a prompt is, beyond its last full block, is what a client says: at most a block."""
    node = Thread(tmp_path / "node.sock", dram={"budget": "4MiB"}, record={"path": tmp_path / "trace.jsonl"})
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            digests = session.chain(prompt(1, 2)).joined
            line, number = session.backend._session()  # type: ignore[attr-defined]
            for tokens in (33, 0, 47, 48, -1, 2**62, -(2**62)):
                line.ask_one(p.Match(number, digests, 0, tokens=tokens))
    finally:
        node.close()
    assert [r["input_length"] for r in read(tmp_path / "trace.jsonl")[1]] == [33, 32, 47, 32, 32, 32, 32]


def test_equal_blocks_of_two_trust_domains_are_two(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, SystemClock())
    for domain in (b"", b"\0blue", b""):
        recorder.request(bytes(range(32)), SIZE, SHAPE, DEFAULT_TENANT.tag, domain)
    recorder.close()
    one, two, three = (line["hash_ids"] for line in read(tmp_path / "trace.jsonl")[1])
    assert one == three != two


def test_a_reserved_share_is_recorded_too(tmp_path: Path) -> None:
    settled = config.read(
        os.devnull,
        {},
        record={"path": tmp_path / "trace.jsonl"},
        dram={"budget": "8MiB", "reserved": f"{OTHER_TENANT.tag.hex()}:2MiB"},
    )
    with Store(settled) as store, store.session(MODEL) as mine, store.session(MODEL, OTHER_TENANT) as theirs:
        ask(mine, prompt(1))
        ask(theirs, prompt(1))
    same(read(tmp_path / "trace.jsonl")[1], [(prompt(1), None), (prompt(1), OTHER_TENANT)])


# -- anonymity ------------------------------------------------------------------------------------------------------


def test_nobody_can_tell_what_was_asked(tmp_path: Path) -> None:
    """Neither tokens, keys, names nor digests are there; and two recordings of the same have no number in common."""
    asked, model = [([7_777_777] * SIZE + [8_888_888] * SIZE, OTHER_TENANT), (prompt(1, 2), None)], "Secret-Model-70B"
    hidden = ["7777777,", "8888888,", "Secret", OTHER_TENANT.name, OTHER_TENANT.tag.hex()]
    found = []
    for name in ("one.jsonl", "two.jsonl"):
        with opened(tmp_path, name) as store:
            for tokens, tenant in asked:
                with store.session(Model(PLAIN, model), *([tenant] if tenant else [])) as session:
                    ask(session, tokens)
                    digests = session.chain(tokens).digests
                    hidden += [str(int.from_bytes(d[:7], "little") >> 3) for d in digests] + [d.hex() for d in digests]
        text = (tmp_path / name).read_text()
        assert not [secret for secret in hidden if secret in text]
        found.append(read(tmp_path / name)[1])
    for part in ("hash_ids", "tenant"):
        one, two = ({str(line.get(part)) for line in lines} - {"None"} for lines in found)
        assert one
        assert not one & two
    assert not {n for line in found[0] for n in line["hash_ids"]} & {n for line in found[1] for n in line["hash_ids"]}


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(tmp_path):
            assert stat.S_IMODE((tmp_path / "trace.jsonl").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_that_it_begins_is_in_the_audit_log(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with opened(tmp_path, security={"audit": str(log)}):
        pass
    line = json.loads(log.read_text())
    assert (line["what"], line["result"], line["file"]) == ("record requests", "begun", str(tmp_path / "trace.jsonl"))
    assert not verify(log).problem
    log.unlink()
    log.mkdir()
    with pytest.raises(AuditError), opened(tmp_path, security={"audit": str(log)}):
        pass
    assert not (tmp_path / "trace.jsonl").exists(), "what cannot be written down is not done"


# -- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_at_its_limit_it_ends_with_whole_lines(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    limit, asked = 20_000, [(prompt(n, *range(n % 50)), None) for n in range(1000)]
    with opened(tmp_path, name, record={"limit": limit}) as store, store.session(MODEL) as session:
        for tokens, _ in asked:
            ask(session, tokens)
        eventually(lambda: not store.recorder.statistics().active)  # type: ignore[union-attr]
        ask(session, prompt(1))
        found = store.statistics().recorder
        assert found is not None
        assert found.requests + found.dropped[ENDED] == 1001
        ask(session, prompt(1))  # the store goes on
    assert limit - 2000 < (tmp_path / name).stat().st_size <= limit
    lines = read(tmp_path / name)[1]
    assert len(lines) == found.requests
    same(lines, asked[: len(lines)])
    if name.endswith(".gz"):
        gzip.decompress((tmp_path / name).read_bytes())  # whole, with its end
    said = [r.message for r in caplog.records if "has reached its limit" in r.message]
    assert len(said) == 1
    assert str(limit) in said[0]


def test_a_limit_too_small_for_one_request_leaves_no_broken_file(tmp_path: Path) -> None:
    with opened(tmp_path, record={"limit": 4096}) as store, store.session(MODEL) as session:
        ask(session, prompt(*range(1000)))
        eventually(lambda: not store.recorder.statistics().active)  # type: ignore[union-attr]
    assert not (tmp_path / "trace.jsonl").exists(), "nothing was recorded"


def test_another_block_size_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as store, store.session(MODEL) as first, store.session(Model(HYBRID, "other")) as second:
        for session in (first, second, first, second):
            ask(session, prompt(1))
        larger = Model(Layout.attention(layers=2, heads=2, head_dim=128, block_tokens=32), "given:contract")
        with store.session(larger) as third, store.session(Model(PLAIN, "of other weights")) as fourth:
            ask(third, prompt(1, 2))
            ask(fourth, prompt(1))
        assert store.recorder is not None
        assert store.recorder.statistics().dropped == {OTHER_SHAPE: 3}
    lines = read(tmp_path / "trace.jsonl")[1]
    assert [len(line["hash_ids"]) for line in lines] == [1, 1, 1]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] != lines[2]["hash_ids"]
    assert sum("came first" in r.message for r in caplog.records) == 1


def test_a_disk_that_is_slow_costs_requests_and_nobodys_time(tmp_path: Path) -> None:
    """The recorder's thread hangs in a write: callers go on, and what does not fit in the queue is counted."""
    os.mkfifo(tmp_path / "slow")
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 30, SystemClock())
    reader = os.open(tmp_path / "slow", os.O_RDONLY | os.O_NONBLOCK)
    os.dup2(writer := os.open(tmp_path / "slow", os.O_WRONLY), recorder._fd)
    os.close(writer)
    names, sent = os.urandom(32 * 1000), 2000
    for _ in range(sent):
        recorder.request(names, 1000 * SIZE, SHAPE, bytes(16))
    before = recorder.statistics()
    assert before.active
    assert before.dropped[QUEUE_FULL] > sent // 2
    got = io.BytesIO()
    closing = threading.Thread(target=recorder.close)
    closing.start()
    os.set_blocking(reader, True)
    while part := os.read(reader, 1 << 20):
        got.write(part)
    closing.join()
    os.close(reader)
    assert recorder.statistics().requests + before.dropped[QUEUE_FULL] == sent
    assert len(got.getvalue().splitlines()) == 1 + recorder.statistics().requests


# -- faults ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("mine")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "elsewhere")
    for name in ("trace.jsonl", "link.jsonl"):
        with pytest.raises(ConfigError, match=rf"{name}: it exists already.*Move it away"):
            opened(tmp_path, name)
    assert (tmp_path / "trace.jsonl").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_gets_a_file_at_each_start(tmp_path: Path) -> None:
    for number in range(1, 4):
        with opened(tmp_path, "") as store, store.session(MODEL) as session:
            ask(session, prompt(number))
        assert len(read(tmp_path / f"trace-{number:04}.jsonl")[1]) == 1


def test_a_file_that_cannot_be_made_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("gone/trace.jsonl", "No such file"), ("file/trace.jsonl", "Not a directory")):
        with pytest.raises(ConfigError, match=f"{name}: {why}.*give a file in an existing folder"):
            opened(tmp_path, name)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_of_others_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        opened(tmp_path, "theirs/trace.jsonl")


def test_a_store_that_does_not_open_leaves_no_file(tmp_path: Path) -> None:
    """Else the next start would be refused."""
    (tmp_path / "tier").touch()
    with pytest.raises(Exception, match="tier"):
        opened(tmp_path, nvme={"path": str(tmp_path / "tier")})
    with opened(tmp_path) as store, store.session(MODEL) as session:
        ask(session, prompt(1))
    assert len(read(tmp_path / "trace.jsonl")[1]) == 1


FULL = """
import logging, resource, sys, time
import kvtide
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
logging.basicConfig(level=logging.WARNING)
store = kvtide.open("/dev/null", dram={"budget": "4MiB", "segment": "1MiB"}, record={"path": sys.argv[1]})
with store, store.session(MODEL) as session:
    session.store(prompt(1), data(PLAIN, prompt(1)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    while store.recorder.statistics().active:
        session.match(prompt(*range(40))).release()
        time.sleep(0.0001)
    with session.match(prompt(1)) as match:
        print(match.tokens, store.statistics().recorder.requests)
"""


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    tokens, requests = map(int, done.stdout.split())
    assert tokens == SIZE, "the store goes on"
    assert done.stderr.count("recording has ended") == 1
    assert "File too large" in done.stderr
    if requests:
        assert len(read(tmp_path / name)[1]) == requests, "and what was written can be read"
    else:
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_node_that_is_killed_leaves_what_it_had_recorded(tmp_path: Path, name: str) -> None:
    node = Process(tmp_path, KVTIDE_RECORD_PATH=str(tmp_path / name))
    try:
        asked = workload(2)
        with Client(node.path) as client, client.session(MODEL) as session:
            for tokens, _ in asked:
                ask(session, tokens)
            eventually(lambda: _recorded(client, len(asked)))
            ask(session, prompt(1))
            node.signal(signal.SIGKILL)
    finally:
        node.kill()
    lines = read(tmp_path / name)[1]
    assert len(lines) >= len(asked)
    same(lines[: len(asked)], [(tokens, None) for tokens, _ in asked])


# -- the command line -----------------------------------------------------------------------------------------------


def test_a_node_is_told_to_record_on_its_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide", "node", "--socket", str(tmp_path / "node.sock")]
    command += ["--record", str(tmp_path / "trace.jsonl"), "--record-limit", "1MiB"]
    environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "8MiB"}
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(command, env=environment, stderr=log, cwd=tmp_path)
    try:
        eventually(lambda: b" serves at " in (tmp_path / "log").read_bytes())
        with Client(tmp_path / "node.sock") as client, client.session(MODEL) as session:
            ask(session, prompt(1, 2))
        status = [sys.executable, "-m", "kvtide", "status", str(tmp_path / "node.sock"), "--once"]
        said = subprocess.run(status, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert "requests are recorded" in said.stdout
        node.terminate()
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()
    same(read(tmp_path / "trace.jsonl")[1], [(prompt(1, 2), None)])
    again = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert again.returncode != 0
    assert "exists already" in again.stderr


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_replay_reads_what_was_recorded(tmp_path: Path, name: str, cut: bool) -> None:
    asked = workload(7)
    with opened(tmp_path, name) as store:
        for tokens, tenant in asked:
            with store.session(MODEL, tenant or DEFAULT_TENANT) as session:
                ask(session, tokens)
    file = tmp_path / name
    if cut:  # as a process leaves it that is killed while it writes
        file.write_bytes(file.read_bytes()[:-20])
    trace = load(file)
    assert (trace.block_tokens, trace.block_bytes) == (SIZE, SHAPE.nbytes)
    true = [found for one in asked if (found := blocks(one))]  # a replay leaves out what is shorter than a block
    read_ = trace.blocks
    assert len(read_) == len(true) if not cut else 0 < len(read_) < len(true)
    pairs = {pair for one, other in zip(read_, true, strict=False) for pair in zip(one.tolist(), other, strict=True)}
    assert len(pairs) == len({number for number, _ in pairs}) == len({block for _, block in pairs})
