"""``kvtide evict``: the byte budget of shared storage, kept by a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from kvtide.cli import app
from kvtide.errors import ConfigError
from kvtide.testing.blobs import TIME, names, value
from kvtide.testing.interface import until
from kvtide.testing.servers import S3Server
from kvtide.tiers.shared.blobs import ROOT
from kvtide.tiers.shared.objects import Objects


def test_it_brings_storage_within_its_budget_and_goes_when_told(tmp_path: Path) -> None:
    root = tmp_path / ROOT
    for n in range(100):
        name = Random(n).randbytes(32).hex()
        (root / name[:2]).mkdir(parents=True, exist_ok=True)
        (root / name[:2] / name).write_bytes(bytes(10_000))
    mine = tmp_path / "not ours"
    mine.write_bytes(bytes(1_000_000))
    command = [sys.executable, "-m", "kvtide", "evict", "--path", str(tmp_path), "--budget", "300kB", "--lease", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(list(root.glob("??/" + "?" * 64))) <= 30)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, "keeps the byte budget" in told) == (0, True), told
    assert mine.stat().st_size == 1_000_000
    assert [f.name for f in (root / "ev").iterdir() if f.name.endswith("9" * 10)], "another may follow at once"


def test_it_keeps_the_budget_of_an_object_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_OBJECTS_URL", "s3://evict")
    monkeypatch.setenv("KVTIDE_OBJECTS_ENDPOINT", s3.endpoint)
    blobs = Objects(f"s3://evict/{ROOT}", endpoint=s3.endpoint)
    blobs.write([(name, [value(name, 10_000)]) for name in names(40)], TIME)
    command = [sys.executable, "-m", "kvtide", "evict", "--budget", "200kB", "--lease", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: sum(size for _, size, _ in blobs.list(TIME)) <= 200_000)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, "keeps the byte budget" in told) == (0, True), told
    blobs.close()


def test_without_storage_it_says_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIDE_OBJECTS_URL", raising=False)
    result = CliRunner().invoke(app, ["evict", "--budget", "1GiB"])
    assert isinstance(result.exception, ConfigError)
    assert "objects.url" in str(result.exception)


def test_it_ends_whatever_it_does_at_the_moment(tmp_path: Path) -> None:
    """It is nearly always at work with a lease so short."""
    command = [sys.executable, "-m", "kvtide", "evict", "--path", str(tmp_path), "--budget", "1MB", "--lease", "0.001"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / ROOT).exists)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
    result = CliRunner().invoke(app, ["evict", "--path", str(tmp_path), "--budget", "1MB", "--lease", "0"])
    assert "more than 0 seconds" in str(result.exception)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "share"
    if kind == "file":
        path.write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["evict", "--path", str(path), "--budget", "1MB"])
    assert result.exit_code
    assert isinstance(result.exception, ConfigError)
    assert str(path) in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before
