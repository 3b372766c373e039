"""``kvtide replay``: a table, a report, a picture, and plain words for what is wrong."""

from __future__ import annotations

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
        (["--warm", "100"], ConfigError, "below 100"),
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
