"""``kvtide replay``: a table, a report, a picture, and plain words for what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli import app
from kvtide.errors import ConfigError, LayoutError, TraceError
from kvtide.replay.compare import policies


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


def test_every_other_policy_is_beside_the_configured_one(trace: Path) -> None:
    command = ["replay", str(trace), "--dram", "20%", "--policy", "reuse"]
    report = json.loads(CliRunner().invoke(app, [*command, "--json", "-"]).stdout)
    assert [other["policy"] for other in report["compared"]] == [name for name in policies() if name != "reuse"]
    alone = json.loads(CliRunner().invoke(app, [*command[:-1], "lru", "--json", "-"]).stdout)
    by_name = {other["policy"]: other for other in report["compared"]}
    assert by_name["lru"] == {"policy": "lru", "hits": alone["hits"], "hit_rate": alone["hit_rate"]}
    shown = CliRunner().invoke(app, command).output
    assert "lru instead" in shown
    assert "auto instead" in shown
    assert "instead" not in CliRunner().invoke(app, [*command, "--no-compare"]).output


def test_a_sweep_has_a_row_for_each_size(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "sizes.svg"
    command = ["replay", str(trace), "--plot", str(picture), "--sweep"]
    done = CliRunner().invoke(app, [*command, "20MiB,5%,200MiB", "--json", "-"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(row["size"], row["blocks"]) for row in found["rows"]] == [("5%", 5), ("20MiB", 10), ("200MiB", 100)]
    for row in found["rows"]:
        alone = ["replay", str(trace), "--dram", row["size"], "--no-compare", "--json", "-"]
        report = json.loads(CliRunner().invoke(app, alone).stdout)
        assert row["hit_rates"]["auto"] == report["hit_rate"]
        assert row["hit_rates"]["lru"] <= row["optimum"] == report["optimum"] <= found["unlimited"]
    assert found["rows"][-1]["optimum"] == found["unlimited"]
    assert picture.read_text().count("<polyline") == 3


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_sweep_has_usual_sizes(trace: Path, order: list[int]) -> None:
    arguments = [str(trace), "--sweep"]
    done = CliRunner().invoke(app, ["replay", *(arguments[i] for i in order)])
    assert done.exit_code == 0, done.output
    for word in ("GiB", "lru", "auto", "optimum", "5%", "10%", "25%", "50%", "0.1% is left out"):
        assert word in done.output
    alone = CliRunner().invoke(app, ["replay", str(trace), "--sweep", "--no-compare", "--no-optimum"]).output
    assert "lru" not in alone
    assert "optimum" not in alone


def test_a_sweep_leaves_the_disk_of_the_configuration_out(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "kvtide.toml").write_text('[nvme]\npath = "disk"\n')
    plain = ["replay", str(trace), "--sweep", "10%", "--json", "-"]
    assert json.loads(CliRunner().invoke(app, plain).stdout)["rows"][0]["blocks"] == 10


LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_bytes_of_a_block_are_those_of_a_model(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(LLAMA))
    for model, options, tokens in ((file.parent, [], 128 << 10), (file, ["--kv-cache-dtype", "fp8"], 64 << 10)):
        command = ["replay", str(trace), "--model", str(model), "--block-tokens", "16", "--dram", "50%", *options]
        done = CliRunner().invoke(app, [*command, "--no-compare", "--json", "-"])
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        assert (report["block_bytes"], report["block_tokens"]) == (16 * tokens, 16)


def test_bytes_of_a_block_are_those_that_were_recorded(trace: Path) -> None:
    header = {"kvtide_trace": 1, "block_tokens": 256, "layout_bytes": 3 << 20}
    lines = [{"timestamp": i, "input_length": 512, "hash_ids": [1, 2], "tenant": "ab"[i % 2]} for i in range(10)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    command = ["replay", str(trace), "--json", "-", "--warm", "0"]
    report = json.loads(CliRunner().invoke(app, command).stdout)
    assert (report["block_bytes"], report["unique"], report["hits"]) == (3 << 20, 4, 16)
    report = json.loads(CliRunner().invoke(app, [*command, "--block", "64KiB", "--real"]).stdout)
    assert (report["block_bytes"], report["hits"]) == (64 << 10, 16)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (["--dram", "much%"], ConfigError, "share of the trace's blocks"),
        (["--policy", "best"], ConfigError, "one of 'auto', 'lru', 'reuse'"),
        (["--dram", "inf%"], ConfigError, "share of the trace's blocks"),
        (["--dram", "-5%"], ConfigError, "share of the trace's blocks"),
        (["--block", "0"], ConfigError, "such as 2MiB"),
        (["--disk", "/nowhere"], ConfigError, "no folder /nowhere"),
        (["--plot", "/nowhere/x.svg"], ConfigError, "no folder /nowhere"),
        (["--plot", "."], ConfigError, ". is a folder"),
        (["--plot", "trace.jsonl"], ConfigError, "the trace itself"),
        (["--json", "trace.jsonl"], ConfigError, "the trace itself"),
        (["--dram", "1.5MiB"], ConfigError, "--dram 1.5MiB is less than one block, which takes 2 MiB"),
        (["--dram", "0.5%"], ConfigError, "is less than one block: give --dram 1% or more"),
        (["--dram", "5%", "--block", "4KiB"], ConfigError, "--dram 5% is 20 KiB, for blocks of 4 KiB"),
        (
            ["--nvme", "17MiB", "--block", "32MiB", "--dram", "64MiB"],
            ConfigError,
            "--nvme 17MiB is less than one block",
        ),
        (["--block", "8GiB"], ConfigError, "dram.budget is 4 GiB, less than one block"),
        (["--store", "ghost"], ConfigError, "--store has no effect without a colder tier"),
        (["--cold-policy", "lru"], ConfigError, "--cold-policy has no effect without a colder tier"),
        (["--disk", "."], ConfigError, "--disk has no effect without a colder tier"),
        (["--sweep", "--dram", "5%"], ConfigError, "--dram has no effect with --sweep"),
        (["--sweep", "5%", "--nvme", "5%"], ConfigError, "--nvme has no effect with --sweep"),
        (["--sweep", "--real"], ConfigError, "--real has no effect with --sweep"),
        (["--sweep", "0.1%"], ConfigError, "less than one block"),
        (["--sweep", "5%,"], ConfigError, "'' is not a size"),
        (["--sweep", "--policy", "best"], ConfigError, "one of 'auto', 'lru', 'reuse'"),
        (["--model", "x", "--block", "2MiB"], ConfigError, "give one of them"),
        (["--model", "x"], ConfigError, "give --block-tokens"),
        (["--model", "/nowhere", "--block-tokens", "16"], LayoutError, "'/nowhere' is neither a folder"),
        (["--kv-cache-dtype", "fp8"], ConfigError, "no effect without --model"),
    ],
)
def test_bad_options_are_refused(trace: Path, options: list[str], error: type[Exception], said: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert isinstance(done.exception, error)
    assert said in str(done.exception)


@pytest.mark.parametrize("options", [[], ["--dram", "5%"], ["--sweep"]])
def test_a_trace_without_a_full_block_is_refused(trace: Path, options: list[str]) -> None:
    trace.write_text('{"timestamp": 0, "input_length": 100, "hash_ids": [1]}\n')
    done = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert isinstance(done.exception, TraceError), done.exception
    assert "no request with a full block of 512 tokens" in str(done.exception)


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
