"""``kvtide inspect``: what it says of good, damaged, foreign and busy directories, and that it touches nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from xxhash import xxh3_128_digest

import kvtide
from kvtide import cli
from kvtide.block import ALIGN
from kvtide.errors import TierError, TierLockedError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.testing.blocks import keys
from kvtide.testing.clock import FakeClock
from kvtide.testing.keys import ring_in
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.nvme.directory import SegmentHeader
from kvtide.tiers.nvme.inspect import InspectionReport, advice, look
from kvtide.tiers.nvme.tier import Nvme

LAYOUT = kvtide.Layout.attention(layers=2, heads=1, head_dim=16, block_tokens=16)  # 4 sections, a page each
MODEL = kvtide.Model(LAYOUT, weights="given:test")
NBYTES = LAYOUT.geometry["full"].nbytes
SLOT = 5 * ALIGN
BLOCKS = 24
PER_PROMPT = 8


def tokens(prompt: int, blocks: int = PER_PROMPT) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(16 * blocks, dtype=np.uint32) + prompt * 100_000


def content(prompt: int, block: int) -> bytes:
    return np.random.default_rng([prompt, block]).bytes(NBYTES)


def unpadded(view: memoryview) -> bytes:
    """A loaded block without the padding of its sections."""
    geometry = LAYOUT.geometry["full"]
    return b"".join(bytes(view[i * geometry.stride :][: geometry.section]) for i in range(geometry.sections))


def open_store(path: Path, **nvme: Any) -> kvtide.Store:
    tier = {"path": path, "budget": "16MiB", "segment": "1MiB", "threads": 2, **nvme}
    return kvtide.open(dram={"budget": "16MiB", "segment": "1MiB"}, nvme=tier)


def fill(path: Path, prompts: int = BLOCKS // PER_PROMPT, ttl: float | None = None, **nvme: Any) -> None:
    with open_store(path, **nvme) as store:
        session = store.session(MODEL)
        for prompt in range(prompts):
            blocks = [content(prompt, i) for i in range(PER_PROMPT)]
            assert session.store(tokens(prompt), blocks, ttl=ttl).stored == PER_PROMPT
            assert store.flush(60)  # a disk may be slower than we store: then there would be no room for the next


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "kv"
    fill(path)
    return path


@pytest.fixture
def directory(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "kv"))


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def as_json(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code))
    return found


def refused(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says, in one line of errors, when it gives up."""
    monkeypatch.setattr(sys, "argv", ["kvtide", "inspect", str(path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, "")
    assert shown.err.startswith("kvtide: ")
    assert shown.err.count("\n") == 1
    return shown.err


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def snapshot(path: Path) -> dict[str, tuple[int, int, str]]:
    return {
        f.name: (f.stat().st_size, f.stat().st_mtime_ns, sha256(f.read_bytes()).hexdigest()) for f in path.iterdir()
    }


# -- what is there ----------------------------------------------------------------------------------------


def test_a_good_directory_is_described_as_it_was_filled(directory: Path) -> None:
    found = as_json(directory, "--verify")
    assert (found["blocks"], found["stale"], found["damaged"], found["expired"]) == (BLOCKS, 0, [], 0)
    assert (found["verified_blocks"], found["verified_bytes"]) == (BLOCKS, BLOCKS * SLOT)
    (kind,) = found["kinds"]
    assert kind["namespace"] == MODEL.namespace().hex()
    assert kind["layout"] == LAYOUT.digest.hex()
    assert (kind["group"], kind["codec"], kind["block_tokens"]) == ("full", "raw", 16)
    assert kind["raw"] == BLOCKS * NBYTES
    assert found["depths"] == [
        {"first": 0, "last": 0, "blocks": 3},
        {"first": 1, "last": 3, "blocks": 9},
        {"first": 4, "last": 15, "blocks": 12},
    ]
    assert found["journal"]["trusted"]
    assert found["journal"]["nbytes"] == (directory / "journal").stat().st_size
    (segment,) = found["segments"]
    assert (segment["slot"], segment["blocks"]) == (SLOT, BLOCKS)
    assert segment["nbytes"] == (directory / "00000.segment").stat().st_size


def test_the_tables_show_it(directory: Path) -> None:
    shown = run(directory, "--verify", "--blocks", "2")
    assert "24 blocks, 480 KiB: 0 damaged" in shown
    assert MODEL.namespace().hex()[:12] in shown
    assert "20 KiB" in shown
    newest = kvtide.Chain(MODEL.namer())
    newest.extend(tokens(2))
    assert newest.digests[-1].hex()[:16] in shown
    assert newest.digests[-3].hex()[:16] not in shown
    assert "trusted; " in shown


def test_compression_and_expiry_are_counted(tmp_path: Path) -> None:
    layout = kvtide.Layout.attention(layers=1, heads=2, head_dim=64, block_tokens=64)  # 2 sections, 4 pages each
    nbytes = layout.geometry["full"].nbytes
    prompt = np.arange(256, dtype=np.uint32)
    nvme = {"path": str(tmp_path / "kv"), "budget": "16MiB", "segment": "1MiB", "codec": "zstd"}
    config = kvtide.config.read(env={}, dram={"budget": "16MiB", "segment": "1MiB"}, nvme=nvme)
    # The clock of this store stands years ago, so nothing has expired while it is open.
    with kvtide.Store(config, clock=FakeClock()) as store:
        session = store.session(kvtide.Model(layout, weights="given:test"))
        session.store(prompt, [np.random.default_rng(i).bytes(nbytes) for i in range(4)])
        session.store(prompt + 256, [bytes(nbytes)] * 4, ttl=1.0)
        assert store.flush(60).complete
    found = as_json(tmp_path / "kv", "--verify")
    kinds = {kind["codec"]: kind for kind in found["kinds"]}
    assert kinds["raw"]["stored"] == kinds["raw"]["raw"] == 4 * nbytes, "random bytes do not shrink"
    assert kinds["zstd"]["raw"] == 4 * nbytes
    assert kinds["zstd"]["stored"] == 3 * nbytes, "of zeros the mantissas stay: 3 pages of 4"
    assert kinds["zstd"]["blocks"] == found["expired"] == 4
    assert any("4 blocks have expired" in line for line in found["advice"])


def test_blocks_of_two_models_are_kept_apart(tmp_path: Path) -> None:
    other = kvtide.Model(LAYOUT, weights="given:other")
    tenant = kvtide.Tenant("them", b"s" * 32)
    with open_store(tmp_path / "kv") as store:
        store.session(MODEL).store(tokens(0), [content(0, 0)])
        store.session(other).store(tokens(0), [content(0, i) for i in range(2)])
        store.session(MODEL, tenant).store(tokens(0), [content(0, i) for i in range(3)])
        store.flush(60)
    found = as_json(tmp_path / "kv")
    assert {(k["namespace"], k["tenant"], k["blocks"]) for k in found["kinds"]} == {
        (MODEL.namespace().hex(), DEFAULT_TENANT.tag.hex(), 1),
        (other.namespace().hex(), DEFAULT_TENANT.tag.hex(), 2),
        (MODEL.namespace(tenant).hex(), tenant.tag.hex(), 3),
    }


def test_evicted_blocks_are_stale_not_blocks(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store:
        session = store.session(MODEL)
        for prompt in range(200):
            session.store(tokens(prompt), [content(prompt, i) for i in range(PER_PROMPT)])
            store.flush(60)
        evicted = store.statistics().counts["blocks evicted from nvme"]
        held = store.statistics().tiers["nvme"].blocks
    found = look(tmp_path / "kv", verify=True)
    assert evicted > 0
    assert (found.blocks, found.damaged) == (held, [])
    (tmp_path / "kv" / "journal").unlink()
    by_headers = look(tmp_path / "kv", verify=True)
    assert by_headers.journal.doubt == "missing"
    assert by_headers.blocks == found.blocks + found.stale
    assert any("reads all headers" in line for line in advice(by_headers))
    with open_store(tmp_path / "kv") as store:
        assert store.statistics().blocks == by_headers.blocks


def test_an_empty_tier_is_fine(tmp_path: Path) -> None:
    open_store(tmp_path / "kv").close()
    assert as_json(tmp_path / "kv", "--verify")["blocks"] == 0
    assert "0 damaged" in run(tmp_path / "kv", "--verify", "--blocks", "3")


# -- that nothing is touched ------------------------------------------------------------------------------


def test_nothing_is_changed_and_nothing_is_left_open(directory: Path) -> None:
    before, files = snapshot(directory), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    look(directory, verify=True, newest=5)
    assert snapshot(directory) == before
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208


def test_a_directory_that_is_open_is_read_and_stays_locked(directory: Path) -> None:
    with open_store(directory) as store:
        found = look(directory, verify=True)
        assert found.holder == os.getpid()
        assert (found.blocks, found.damaged) == (BLOCKS, [])
        assert any(f"Process {os.getpid()} has this directory open" in line for line in advice(found))
        with pytest.raises(TierLockedError):
            open_store(directory)
        with store.session(MODEL).match(tokens(1)) as match:
            assert match.tokens == 16 * PER_PROMPT
    assert look(directory).holder is None


def test_a_directory_that_only_can_be_read_is_enough(directory: Path) -> None:
    for file in directory.iterdir():
        file.chmod(0o400)
    directory.chmod(0o500)
    try:
        assert look(directory, verify=True).verified_blocks == BLOCKS
    finally:
        directory.chmod(0o700)


def test_a_busy_directory_does_not_look_damaged(tmp_path: Path) -> None:
    looked = threading.Event()
    with open_store(tmp_path / "kv") as store:
        session = store.session(MODEL)

        def churn() -> None:
            prompt = 0
            while not looked.is_set():
                prompt += 1
                session.store(tokens(prompt), [content(prompt, i) for i in range(PER_PROMPT)])
                store.flush(60)

        for prompt in range(1000, 1100):  # near the budget, so that slots change hands from now on
            session.store(tokens(prompt), [content(prompt, i) for i in range(PER_PROMPT)])
        store.flush(60)
        worker = threading.Thread(target=churn)
        worker.start()
        try:
            reports = [look(tmp_path / "kv", verify=True) for _ in range(8)]
        finally:
            looked.set()
            worker.join()
    assert [report.damaged for report in reports] == [[]] * len(reports)
    assert len({report.journal.records for report in reports}) > 1, "nothing moved meanwhile"


# -- damage -----------------------------------------------------------------------------------------------


def block_at(report: InspectionReport, segment: int, slot: int) -> str:
    assert report.newest_blocks is not None
    return next(b.key + b.group.encode().hex() for b in report.newest_blocks if (b.segment, b.slot) == (segment, slot))


def test_a_flipped_bit_in_a_payload_is_found_by_verify_alone(directory: Path) -> None:
    key = block_at(look(directory, newest=BLOCKS), 0, 7)
    flip(directory / "00000.segment", ALIGN + 7 * SLOT + 3 * ALIGN + 17, 0x01)
    assert as_json(directory)["damaged"] == []
    found = as_json(directory, "--verify", code=1)
    assert found["damaged"] == [
        {"segment": 0, "slot": 7, "key": key, "reason": "corrupt payload", "code": "corrupt payload"}
    ]
    shown = run(directory, "--verify", code=1)
    assert "corrupt payload" in shown
    assert key[:16] in shown
    assert "1 damaged" in shown


@pytest.mark.parametrize("journal", [True, False])
def test_a_damaged_header_is_found_without_reading_payloads(directory: Path, journal: bool) -> None:
    key = block_at(look(directory, newest=BLOCKS), 0, 3)
    flip(directory / "00000.segment", ALIGN + 3 * SLOT + 200)
    if not journal:
        (directory / "journal").unlink()
    found = look(directory)
    (damage,) = found.damaged
    assert (damage.segment, damage.slot, damage.reason) == (0, 3, "corrupt header")
    assert damage.key == (key if journal else "")
    assert found.blocks == BLOCKS - 1
    run(directory, "--verify", code=1)


def test_a_slot_that_was_wiped_behind_the_journals_back_is_a_miss(directory: Path) -> None:
    with (directory / "00000.segment").open("r+b") as file:
        file.seek(ALIGN + 5 * SLOT)
        file.write(bytes(ALIGN))
    (damage,) = look(directory).damaged
    assert (damage.slot, damage.reason) == (5, "no such record: dropped or never finished")


def test_a_truncated_segment_and_what_the_advice_promises(directory: Path) -> None:
    segment = directory / "00000.segment"
    whole = segment.stat().st_size
    os.truncate(segment, ALIGN + 10 * SLOT + 2 * ALIGN)
    found = look(directory, verify=True)
    assert found.segments[0].problem.startswith("truncated")
    assert any("makes it whole again" in line for line in advice(found))
    run(directory, "--verify", code=1)
    with open_store(directory) as store:
        session = store.session(MODEL)
        good = 0
        for prompt in range(BLOCKS // PER_PROMPT):
            with session.match(tokens(prompt)) as match:
                loaded = session.load(match).wait(60)
                good += loaded.tokens // 16
                for i, view in enumerate(loaded.blocks):
                    assert unpadded(view) == content(prompt, i)
    assert segment.stat().st_size == whole
    assert 0 < good < BLOCKS


def test_a_segment_without_a_header_and_what_the_advice_promises(directory: Path) -> None:
    flip(directory / "00000.segment", 0)
    found = look(directory)
    assert found.segments[0].problem == "no segment"
    assert len(found.damaged) == BLOCKS, "the journal knows what was in it"
    assert any("The next opening deletes it" in line for line in advice(found))
    run(directory, "--verify", code=1)
    open_store(directory).close()
    assert not (directory / "00000.segment").exists()


@pytest.mark.parametrize(
    ("harm", "doubt"),
    [
        (lambda journal: journal.unlink(), "missing"),
        (lambda journal: os.truncate(journal, journal.stat().st_size - 20), "torn"),
        (lambda journal: flip(journal, 100), "torn"),
        (lambda journal: journal.write_bytes(b""), "empty"),
    ],
)
def test_a_lost_journal_loses_no_block(directory: Path, harm: Any, doubt: str) -> None:
    harm(directory / "journal")
    found = look(directory, verify=True)
    assert (found.journal.trusted, found.journal.doubt) == (False, doubt)
    assert (found.blocks, found.damaged) == (BLOCKS, [])
    assert f"not trusted: {doubt}" in run(directory, "--verify")


def test_files_of_others_are_named(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    (directory / "journal.new").write_text("half")
    said = advice(look(directory))
    assert any(line.startswith("notes.txt: not a file of kvtide") for line in said)
    assert any(line.startswith("journal.new: left by a process") for line in said)


def test_the_advised_budget_keeps_every_segment(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", budget="64MiB") as store:
        session = store.session(MODEL)
        for prompt in range(140):
            session.store(tokens(prompt), [content(prompt, i) for i in range(PER_PROMPT)])
            store.flush(60)
    found = look(tmp_path / "kv")
    assert found.budget > 16 << 20
    mib = -(-found.budget // 2**20)
    assert any(f"nvme.budget at {mib} MiB" in line for line in advice(found))
    with open_store(tmp_path / "kv", budget=f"{mib}MiB") as store:
        assert store.statistics().blocks == found.blocks
    with open_store(tmp_path / "kv", budget=f"{mib - 2}MiB") as store:
        assert store.statistics().blocks < found.blocks


# -- what is not a directory of ours ----------------------------------------------------------------------


def test_what_is_not_ours_is_refused_with_a_reason(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(path: Path) -> str:
        return refused(path, monkeypatch, capsys)

    assert "does not exist" in said(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    assert "is not a directory" in said(directory / "journal")
    (tmp_path / "empty").mkdir()
    assert "has no kvtide.json" in said(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    (directory / "kvtide.json").write_text("{}")
    assert "damaged or not kvtide's" in said(directory)


def test_newer_formats_are_refused_with_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = directory / "kvtide.json"
    good = about.read_text()
    about.write_text(json.dumps({"format": "kvtide nvme", "version": 2}))
    assert "Upgrade kvtide" in refused(directory, monkeypatch, capsys)
    about.write_text(good)
    page = bytearray(SegmentHeader(SLOT, 4, 1).pack())
    page[8:10] = (2).to_bytes(2, "little")
    page[32:48] = bytes(16)
    page[32:48] = xxh3_128_digest(page[:48])
    with (directory / "00000.segment").open("r+b") as file:
        file.write(page)
    assert "has format 2" in refused(directory, monkeypatch, capsys)


@pytest.fixture(scope="module")
def victim(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("victim") / "kv"
    shutil.copytree(filled, path)
    yield path
    shutil.rmtree(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_error_or_a_report(victim: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["00000.segment", "journal", "kvtide.json"]))
    file = victim / name
    whole = file.read_bytes()
    top = min(len(whole), ALIGN + BLOCKS * SLOT)
    try:
        for _ in range(data.draw(st.integers(1, 3))):
            flip(file, data.draw(st.integers(0, top - 1)), data.draw(st.integers(1, 255)))
        if data.draw(st.booleans()):
            os.truncate(file, data.draw(st.integers(0, len(whole))))
        try:
            found = look(victim, verify=True)
        except TierError:
            assert name != "journal", "the journal is a hint: damage to it is no error"
            return
        assert found.blocks <= BLOCKS
        if name == "journal":
            assert (found.blocks, found.damaged) == (BLOCKS, [])
    finally:
        file.write_bytes(whole)


def test_sealed_records_are_verified_with_their_keys_and_told_of_without(tmp_path: Path) -> None:
    key_ring = ring_in(tmp_path)
    tier = Nvme(tmp_path / "tier", 4 << 20, segment=1 << 20, threads=1, encryption=Encryption(key_ring))
    caller = Caller(tier)
    caller.write(keys(5), shaped(4, 5000))
    caller.close()
    found = look(tmp_path / "tier", verify=True, encryption=Encryption(key_ring))
    assert (found.blocks, found.verified_blocks, found.damaged) == (5, 5, [])
    without = look(tmp_path / "tier", verify=True)
    assert (without.blocks, without.journal.doubt) == (0, "sealed, and its key is not here")
    assert {d.reason for d in without.damaged} == {"its key is not here"}
    assert any("only be read with their keys" in line for line in advice(without))
    segment = tmp_path / "tier" / "00000.segment"
    data = bytearray(segment.read_bytes())
    data[ALIGN + ALIGN + 100] ^= 1
    segment.write_bytes(data)
    assert [d.reason for d in look(tmp_path / "tier", verify=True, encryption=Encryption(key_ring)).damaged] == [
        "corrupt payload"
    ]


def test_a_directory_may_have_more_files_than_a_shell_lets_be_open(tmp_path: Path) -> None:
    fill(tmp_path / "kv", 200, budget="64MiB")
    assert len(list((tmp_path / "kv").glob("*.segment"))) > 30
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    result = subprocess.run(
        [sys.executable, "-m", "kvtide", "inspect", "--json", tmp_path / "kv"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, most)),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["blocks"] == 200 * PER_PROMPT
