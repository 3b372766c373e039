"""``kvtide replay``: a table, a report, a picture, and plain words for what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli import app
from kvtide.errors import ConfigError, TraceError


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty users who each come five times with a block more."""
    monkeypatch.chdir(tmp_path)  # where no kvtide.toml is
    path = tmp_path / "trace.jsonl"
    requests = [(turn, user) for turn in range(5) for user in range(20)]
    lines = [
        {"timestamp": 1000 * i, "hash_ids": [100 * user + block for block in range(turn + 1)]}
        for i, (turn, user) in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_table_has_tiers_and_optimum(trace: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), "--dram", "20%", "--nvme", "100%", "--store", "through"])
    assert done.exit_code == 0, done.output
    for word in ("dram", "nvme", "optimum", "100 requests", "bytes written to the colder tier"):
        assert word in done.output


def test_the_report_as_json_and_the_picture(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "replay.svg"
    command = ["replay", str(trace), "--dram", "100%", "--policy", "lru", "--json", "-", "--plot", str(picture)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["tiers"][0]["policy"] == "lru"
    assert report["hit_rate"] == report["optimum"] > 0.7
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (["--dram", "much%"], ConfigError, "share of the trace's blocks"),
        (["--policy", "best"], ConfigError, "one of 'auto', 'lru', 'reuse'"),
        (["--dram", "inf%"], ConfigError, "share of the trace's blocks"),
        (["--dram", "-5%"], ConfigError, "share of the trace's blocks"),
        (["--warm", "100"], ConfigError, "below 100"),
        (["--block", "0"], ConfigError, "such as 2MiB"),
        (["--disk", "/nowhere"], ConfigError, "no folder /nowhere"),
        (["--plot", "/nowhere/x.svg"], ConfigError, "no folder /nowhere"),
    ],
)
def test_bad_options_are_refused(trace: Path, options: list[str], error: type[Exception], said: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert isinstance(done.exception, error)
    assert said in str(done.exception)


def test_a_bad_trace_is_said_with_its_line(trace: Path) -> None:
    trace.write_text(trace.read_text() + "{\n")
    done = CliRunner().invoke(app, ["replay", str(trace)])
    assert isinstance(done.exception, TraceError)
    assert "line 101" in str(done.exception)


def test_a_replay_with_real_bytes_touches_nothing_of_ours(trace: Path, tmp_path: Path) -> None:
    """Neither the disk nor the shared storage that kvtide.toml names, whether --nvme is given or not."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    (tmp_path / "kvtide.toml").write_text(f'[nvme]\npath = "{disk}"\n[files]\npath = "{shared}"\n')
    for options in ([], ["--nvme", "32MiB"]):
        command = ["replay", str(trace), "--real", "--block", "64KiB", "--dram", "16MiB", "--json", "-", *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert [tier["name"] for tier in json.loads(done.stdout)["tiers"]] == ["dram", "nvme"]
        assert (disk.exists(), shared.exists()) == (False, False)


@pytest.mark.parametrize(
    "line",
    [
        '{"ts": null, "events": [{"type": "BlockStored", "block_hashes": [1]}]}',
        '{"ts": 1, "events": 5}',
        '[1.0, [["BlockStored", [[1]], null, [], 16]]]',
        '{"timestamp": 1, "input_length": -600, "hash_ids": [1, 2, 3]}',
    ],
)
def test_a_bad_event_is_said_with_its_line(trace: Path, line: str) -> None:
    trace.write_text(line + "\n")
    done = CliRunner().invoke(app, ["replay", str(trace)])
    assert isinstance(done.exception, TraceError), done.exception
    assert "line 1" in str(done.exception)


def test_a_spoilt_archive_is_said(trace: Path) -> None:
    packed = bytearray(gzip.compress(trace.read_bytes()))
    packed[len(packed) // 2] ^= 0xFF
    trace.write_bytes(packed)
    done = CliRunner().invoke(app, ["replay", str(trace)])
    assert isinstance(done.exception, TraceError), done.exception
