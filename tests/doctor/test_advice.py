"""What the doctor predicts from a recording comes true when it is set, in a real store with the same traffic."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide.doctor import advice as advising
from kvtide.doctor import host
from kvtide.doctor.advice import LEAST_REQUESTS, Advice, AdviceRequest, AdviceResult, advise
from kvtide.doctor.advice_findings import findings
from kvtide.doctor.candidates import ChangeKind
from kvtide.doctor.finding import Level
from kvtide.errors import ConfigError, TraceError
from kvtide.store.node_statistics import Status, least
from tests.doctor.recorded import Recorded, changed, replayed, settings, users

TOLERANCE = 0.01


def texts(advice: Advice) -> str:
    return "\n".join(f"{f.level.value} {f.about}: {f.found}. {f.do}" for f in findings(advice))


def test_the_predicted_hit_rate_comes_true_with_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))  # no space for a tier below
    run = Recorded(settings(), users(30, 400), tmp_path / "trace.jsonl.gz")
    advice = run.advice()
    assert advice.result is AdviceResult.CHANGES
    assert advice.hit_rate == pytest.approx(run.hit_rate(), abs=TOLERANCE)
    assert advice.hit_rate is not None
    first = advice.changes[0]
    assert first.kind is ChangeKind.DRAM_SIZE
    assert first.matters
    assert first.points > 20
    assert first.seconds_per_hour is not None
    assert advice.tokens
    saved = first.points / 100 * advice.tokens / 1000.0 / (advice.seconds / 3600)
    assert first.seconds_per_hour == pytest.approx(saved), "each token takes a millisecond"
    assert replayed(changed(run, first, tmp_path / "kv")) == pytest.approx(
        advice.hit_rate + first.points / 100, abs=TOLERANCE
    )
    said = texts(advice)
    assert "set dram.budget = " in said
    assert "(now 1 MiB)" in said
    assert "s of prefill saved an hour" in said


def test_the_predicted_hit_rate_comes_true_with_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available", lambda: (0, "all is taken"))
    run = Recorded(settings(), users(30, 400), tmp_path / "trace.jsonl")
    advice = run.advice(disk=tmp_path)
    assert ChangeKind.DRAM_SIZE not in {change.kind for change in advice.tried}, "no more memory than the host has"
    first = advice.changes[0]
    assert first.kind is ChangeKind.NVME_SIZE
    assert first.disk > 0
    assert first.written_per_day > 0
    assert advice.read_speed is not None
    assert advice.hit_rate is not None
    assert replayed(changed(run, first, tmp_path / "kv")) == pytest.approx(
        advice.hit_rate + first.points / 100, abs=TOLERANCE
    )


def test_nothing_is_advised_where_nothing_helps(tmp_path: Path) -> None:
    run = Recorded(settings(dram="16MiB"), users(5, 300), tmp_path / "trace.jsonl")
    advice = run.advice()
    assert advice.result is AdviceResult.NOTHING
    assert advice.changes == []
    assert "the best possible cache 0.0 points more" in advice.reason
    assert not [f for f in findings(advice) if f.level is not Level.OK]


def test_without_a_recording_it_says_how_to_record(tmp_path: Path) -> None:
    run = Recorded(settings(), users(5, 20))
    advice = run.advice(how="kvtide node --socket k.sock --record FILE")
    assert advice.result is AdviceResult.NOT_RECORDED
    assert "kvtide node --socket k.sock --record FILE" in texts(advice)
    assert advice.tried == []


@pytest.mark.parametrize("requests", [0, LEAST_REQUESTS - 1])
def test_a_short_recording_is_no_ground_for_advice(tmp_path: Path, requests: int) -> None:
    run = Recorded(settings(), users(30, requests), tmp_path / "trace.jsonl")
    advice = run.advice()
    assert advice.result is AdviceResult.TOO_FEW
    assert f"{requests} requests" in advice.reason
    assert advice.tried == []
    assert advice.hit_rate is None


def test_full_tiers_and_a_recording_that_does_not_fill_them(tmp_path: Path) -> None:
    """Ten prompts since the start, and after them only the same few: nothing leaves in the replay."""
    run = Recorded(settings(), users(2, 250), tmp_path / "trace.jsonl")
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        dram = status.store.tiers["dram"]
        full = replace(status.store, tiers={"dram": replace(dram, bytes_used=dram.budget)})
        advice = advise(replace(status, store=full), AdviceRequest(seconds=1000.0))
    assert advice.result is AdviceResult.NOTHING
    assert "too short to fill them" in advice.reason


def test_requests_that_were_left_out_are_said(tmp_path: Path) -> None:
    run = Recorded(settings(), users(30, 250), tmp_path / "trace.jsonl")
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        assert status.store.recorder is not None
        partly = replace(status.store.recorder, dropped={"queue full": 250}, active=False)
        advice = advise(replace(status, store=replace(status.store, recorder=partly)), AdviceRequest(seconds=1000.0))
    assert "250 requests (50%) are not in the recording" in texts(advice)
    assert "the recording has ended" in texts(advice)


def test_a_long_recording_is_cut_to_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advising, "_MOST_BLOCKS", 1800)
    run = Recorded(settings(), users(30, 400), tmp_path / "trace.jsonl.gz")
    advice = run.advice()
    assert LEAST_REQUESTS <= advice.requests < 400
    assert f"only the last {advice.requests} of 400 requests are replayed" in texts(advice)


def test_when_the_time_is_up_it_says_what_was_not_tried(tmp_path: Path) -> None:
    run = Recorded(settings(), users(30, 300), tmp_path / "trace.jsonl")
    advice = run.advice(seconds=0.0)
    assert advice.tried == []
    assert any("dram.budget" in name for name in advice.not_tried)
    assert "for lack of time" in texts(advice)


def test_one_of_each_kind_is_tried_before_a_second_one_of_any(tmp_path: Path) -> None:
    advice = Recorded(settings(), users(30, 300), tmp_path / "trace.jsonl").advice()
    kinds = [change.kind for change in advice.tried]
    several = set(kinds)
    assert len(several) >= 3
    assert set(kinds[: len(several)]) == several
    assert len(kinds) > len(several)


def test_that_shared_storage_is_not_tried_is_said(tmp_path: Path) -> None:
    given = settings(files={"path": str(tmp_path / "shared")})
    run = Recorded(given, users(30, 250), tmp_path / "trace.jsonl")
    said = texts(run.advice())
    assert "shared storage is not tried: no change of files.budget or files.store" in said
    assert "is not in this node's recording" in said
    assert "shared storage" not in texts(Recorded(settings(), users(30, 250), tmp_path / "other.jsonl").advice())


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_that_ends_anywhere_is_read_up_to_there(tmp_path: Path, name: str) -> None:
    """As it is seen while a node writes it."""
    run = Recorded(settings(), users(30, 400), tmp_path / name)
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        whole = (tmp_path / name).read_bytes()
        cut = tmp_path / f"cut-{name}"
        cut.write_bytes(whole[: int(0.8 * len(whole))])
        advice = advise(status, AdviceRequest(record=cut, seconds=1000.0))
    assert 200 < advice.requests < 400
    assert advice.changes


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 100,
        b"not a recording\n",
        b'{"timestamp": 1, "input_length": 512, "hash_ids": [1]}\n' * 300,
        b'{"kvtide_trace": 2, "block_tokens": 16, "layout_bytes": 4096}\n',
        b'{"kvtide_trace": 1, "block_tokens": 16, "layout_bytes": -5}\n',
        b'{"kvtide_trace": 1, "block_tokens": 16, "layout_bytes": 4096}\n{"hash_ids": "x"}\n',
        b'{"kvtide_trace": 1, "block_tokens": 16, "layout_bytes": 4096}\n'
        b'{"timestamp": 1, "input_length": 16, "hash_ids": [1], "have": -3}\n',
        gzip.compress(b"x" * 100)[:-20] + b"\0" * 20,
    ],
)
def test_a_file_of_something_else_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    run = Recorded(settings(), [])
    with run.open() as store, pytest.raises((TraceError, ConfigError)) as error:
        advise(run.status(store), AdviceRequest(record=tmp_path / "other"))
    assert "other" in str(error.value)


def test_what_cannot_be_asked_here_is_said(tmp_path: Path) -> None:
    run = Recorded(settings(), users(3, 5), tmp_path / "trace.jsonl")
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        with pytest.raises(ConfigError, match="copy it here, and give it with --record"):
            advise(status, AdviceRequest(here=False))
        with pytest.raises(ConfigError, match="ask as its administrator"):
            advise(least(status), AdviceRequest())
        with pytest.raises(TraceError, match="gone"):
            advise(status, AdviceRequest(record=tmp_path / "gone"))
    stranger = least(status)
    assert stranger.store.recorder is not None
    assert stranger.store.recorder.path == ""
    assert stranger.node.settings == {}


def test_the_cost_of_computing_is_the_callers_or_what_engines_say_or_a_setting(tmp_path: Path) -> None:
    given = settings(plan={"prefill_tokens_per_second": 50.0})
    run = Recorded(given, users(5, 200), tmp_path / "trace.jsonl")
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        file = tmp_path / "trace.jsonl"
        unsaid = replace(status, store=replace(status.store, recorder=None))
        costs = [
            advise(status, AdviceRequest(record=file, prefill=10.0, seconds=0.0)).prefill,
            advise(status, AdviceRequest(seconds=0.0)).prefill,
            advise(unsaid, AdviceRequest(record=file, seconds=0.0)).prefill,
        ]
    assert [cost and cost.speed(0, 100) for cost in costs] == [10.0, 1000.0, 50.0]


def test_unknown_settings_of_a_newer_node_are_no_error(tmp_path: Path) -> None:
    run = Recorded(settings(), users(5, 200), tmp_path / "trace.jsonl")
    with run.open() as store:
        run.drive(store)
        status = run.status(store)
        newer = {**status.node.settings, "dram.colour": "blue", "moon.phase": 3}
        advice = advise(Status(status.store, replace(status.node, settings=newer)), AdviceRequest(seconds=0.0))
    assert advice.hit_rate is not None


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    run = Recorded(settings(), users(30, 200), tmp_path / "trace.jsonl")
    before = Path.cwd(), {p.name for p in tmp_path.iterdir()}
    run.advice(disk=tmp_path, seconds=0.0)
    assert (Path.cwd(), {p.name for p in tmp_path.iterdir()} - {"trace.jsonl"}) == before
