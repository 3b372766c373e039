"""``kvtide plan``: tables that fit a terminal, JSON, a picture, and plain words for what is wrong."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli import app
from kvtide.errors import ConfigError, KvtideError, LayoutError
from tests.sizing.traces import returning_users

PAGE = Path(__file__).parents[2] / "docs/planning.md"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings and no models of the hub but the test's own; a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return returning_users(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("model", ["llama-3.1-70b", "deepseek-v3", "mistral-7b-v0.1"])
def test_the_tables_fit_80_columns(model: str) -> None:
    done = run(model, "--users", "8", "--requests-per-hour", "100", "--gpu-price", "2", "--target", "500ms")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    for words in ("Time to the first token", "Contexts that fit", "GPU memory", "computed", "help", "saves"):
        assert words in done.output, words
    assert "Estimates, not measurements" in done.output


def test_the_figures_are_those_of_the_function() -> None:
    from kvtide.sizing.plan import plan

    done = run("qwen3-8b", "--gpu", "h100", "--context", "4096,64k", "--json")
    found = json.loads(done.stdout)
    assert found["trace"] is None
    assert [at["tokens"] for at in found["plan"]["contexts"]] == [4096, 65_536]
    expected = plan("qwen3-8b", "h100", contexts=[4096, 65_536])
    assert found["plan"]["contexts"][1]["compute"] == expected.contexts[1].compute
    assert found["plan"]["verdicts"][0]["tier"] == "dram"


def test_the_models_and_the_hardware_are_listed_with_their_sources() -> None:
    done = run("--models")
    assert done.exit_code == 0, done.output
    for word in ("deepseek-v3", "Qwen/Qwen3-8B", "h200", "nvlink-c2c", "400gbe", "data sheet"):
        assert word in done.output, word


def test_a_picture_has_a_line_for_each_tier_and_the_break_even(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    done = run("llama-3.1-8b", "--nvme-speed", "2GB", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    drawn = picture.read_text()
    assert "<svg" in drawn
    for words in ("computed", "GPU memory", "dram", "network", "nvme: quicker from 100,096 tokens"):
        assert words in drawn, words
    assert "and computing" not in drawn, "vLLM does not compute one part while it loads the other"
    run("llama-3.1-8b", "--nvme-speed", "2GB", "--plot", str(picture), "--engine", "transformers")
    assert "nvme and computing" in picture.read_text()


def test_a_trace_gives_the_bytes_to_buy(trace: Path) -> None:
    wanted = ("llama-3.1-8b", "--trace", str(trace), "--hit-rate", "0.5", "--policy", "lru")
    shown = run(*wanted)
    assert shown.exit_code == 0, shown.output
    assert "of the blocks, of 50.0% wanted" in " ".join(shown.output.split())
    found = json.loads(run(*wanted, "--json").stdout)
    assert found["trace"]["reached"] >= 0.5
    assert found["plan"]["model"] == "llama-3.1-8b"


def test_this_host_is_measured_if_asked() -> None:
    found = json.loads(run("llama-3.1-8b", "--measure", "--json").stdout)["plan"]
    assert [tier["link"] for tier in found["tiers"]] == ["this host", "this host", "100gbe"]
    assert found["tiers"][0]["source"].startswith("measured here")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ([], ConfigError, "name a model"),
        (["llama-3.1-9b"], LayoutError, "did you mean llama-3.1-8b?"),
        (["llama-3.1-8b", "--gpu", "h300"], ConfigError, "did you mean h"),
        (["llama-3.1-8b", "--context", "8k,long"], ConfigError, "'long' is no number of tokens"),
        (["llama-3.1-8b", "--trace", "t.jsonl"], ConfigError, "--trace needs the hit rate"),
        (["llama-3.1-8b", "--gpu-price", "3"], ConfigError, "--gpu-price has no effect without --requests-per-hour"),
        (["llama-3.1-8b", "--disk", "/"], ConfigError, "--disk has no effect without --measure"),
        (["llama-3.1-8b", "--measure", "--disk", "/nowhere"], ConfigError, "there is no folder"),
        (["llama-3.1-8b", "--prefill-cost", "1"], ConfigError, "give two numbers"),
        (["llama-3.1-8b", "--prefill-cost", "0,1"], ConfigError, "must be above 0"),
        (["llama-3.1-8b", "--plot", "/nowhere/plan.svg"], ConfigError, "there is no folder"),
        (["llama-3.1-8b", "--target", "soon"], ConfigError, "'soon' is not a time"),
        (
            ["llama-3.1-8b", "--prefill-cost", "1,1", "--prefill-tokens-per-second", "1"],
            ConfigError,
            "both say how fast computing is",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], error: type[KvtideError], words: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, error), done.output
    assert words in str(done.exception)


def test_weights_that_do_not_fit_are_said(tmp_path: Path) -> None:
    assert "which do not fit: give --gpus" in " ".join(run("deepseek-v3", "--gpus", "2").output.split())


def test_a_name_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    from kvtide.sizing.models import MODELS

    folder = tmp_path / "mine [red] model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3-8b"][1]))
    assert "mine [red] model on 1 x h200" in " ".join(run(str(folder)).output.split())


def test_a_measured_cost_is_used() -> None:
    found = json.loads(run("llama-3.1-8b", "--prefill-cost", "1e-5,1e-9", "--json").stdout)["plan"]
    assert (found["per_token"], found["per_token_context"], found["cost_given"]) == (1e-5, 1e-9, True)


def test_the_commands_of_the_page_print_what_it_shows(trace: Path) -> None:
    """Each block of commands is followed by a block with some lines of its output."""
    parts = re.findall(
        r"^```sh\n(kvtide plan .*?)\n```\n\n```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(parts) >= 3
    for command, expected in parts:
        arguments = shlex.split(command)[2:]
        done = run(*arguments)
        assert done.exit_code == 0, done.output
        shown = [" ".join(line.split()) for line in done.output.splitlines()]
        for line in expected.splitlines():
            assert " ".join(line.split()) in shown, f"{command}: {line}"


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(part, "docs/planning.md", "exec"), {"__name__": "planning"})
    assert capsys.readouterr().out.strip()
