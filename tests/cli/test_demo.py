"""``kvtide demo`` in small: what it verifies, what it leaves behind, and that it notices a wrong byte."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtide import Layout, cli
from kvtide.block import ALIGN
from kvtide.cli._demo_session import TURNS, USERS, Checker, Result, Shape, affordable, filesystem, play
from kvtide.errors import ConfigError
from kvtide.tiers import nvme

LAYOUT = Layout.attention(layers=2, heads=8, head_dim=128)  # 2 MiB a block
SMALL = ("--gib", "0.0625", "--layers", "2")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["demo", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_a_session_is_stored_reloaded_and_verified(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_DRAM_BUDGET", "nonsense")  # the demo is not about the settings in force
    shown = run(*SMALL, "--path", str(place), "--prefill", "1000")
    shape = Shape.of(LAYOUT, 1 << 26)
    blocks = (2 * 2 + USERS) * shape.prompt
    assert f"{blocks} blocks, {blocks * shape.block:,} bytes verified, 0 wrong." in shown.replace("\n", " ")
    assert "missing" not in shown
    assert "loaded from NVMe, verified" in shown
    tokens = USERS * shape.prompt * 256
    assert f"{tokens:,} tokens were back in memory" in shown.replace("\n", " ")
    assert f"computes those tokens in {tokens / 1000:.2f} s" in shown.replace("\n", " ")
    assert list(place.iterdir()) == [], "what was stored is deleted"
    plot, page = Path("demo-out/demo.png"), Path("demo-out/index.html")
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert not re.search(r'(src|href)="(?!data:)', text), "the page needs no other file"
    assert str(page.resolve()) in shown


def test_it_works_without_matplotlib(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = run(*SMALL, "--path", str(place), "--out", "elsewhere")
    assert "kvtide[plot]" in shown
    assert "<table>" in Path("elsewhere/index.html").read_text()
    assert not Path("elsewhere/demo.png").exists()


def damaged(folder: Path) -> Result:
    """Play, and flip one bit of the document's second block on disk before the restart."""

    def flip(what: str, done: int, total: int) -> None:
        if what == "reload from DRAM, as copies" and done == total:
            at = ALIGN + (ALIGN + LAYOUT.geometry["full"].nbytes) + 5 * ALIGN + 123
            with (folder / "00000.segment").open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x10]))

    return play(Shape.of(LAYOUT, 1 << 26), folder, flip)


def test_damage_on_disk_is_missing_not_wrong(tmp_path: Path) -> None:
    result = damaged(tmp_path / "nvme")
    assert result.wrong_bytes == 0
    assert result.missing > 0


def test_a_wrong_byte_is_noticed(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "verify", lambda *_: None)  # a store that does not verify
    result = damaged(tmp_path / "nvme")
    assert result.missing == 0
    assert result.wrong_bytes == USERS, "one byte, in what every user shares"
    monkeypatch.setattr("kvtide.cli._demo_session.play", lambda *_: result)
    assert f"{USERS} bytes that came back were wrong" in run(*SMALL, "--path", str(place), code=1)


def test_the_checker_counts_exactly_the_wrong_bytes() -> None:
    checker, block = Checker(1 << 20), np.zeros(1 << 17, np.uint64)
    checker.fill(block, b"A" * 32)
    checker.check(block, b"A" * 32)
    assert (checker.blocks, checker.nbytes, checker.wrong) == (1, 1 << 20, 0)
    block.view(np.uint8)[[0, 70_000, (1 << 20) - 1]] ^= 1
    checker.check(block, b"A" * 32)
    assert checker.wrong == 3
    checker.check(block, b"B" * 32)
    assert checker.wrong > 1 << 19, "another key's block is wrong nearly everywhere"
    other = np.zeros_like(block)
    Checker(1 << 20).fill(other, b"A" * 32)
    checker.fill(block, b"A" * 32)
    assert np.array_equal(block, other), "every run makes the same bytes"


@pytest.mark.parametrize("blocks", [24, 31, 32, 50, 96, 400])
def test_every_size_leaves_room_for_two_conversations_in_memory(blocks: int) -> None:
    shape = Shape.of(LAYOUT, blocks * LAYOUT.geometry["full"].nbytes)
    assert shape.blocks == blocks
    assert shape.document > 0
    assert (shape.prompt + TURNS * shape.turn) * shape.block <= shape.memory < blocks * shape.block


def test_what_does_not_fit_is_scaled_down_with_the_reason(tmp_path: Path) -> None:
    asked = 1 << 60
    room, why = affordable(LAYOUT, asked, tmp_path)
    assert 0 < room < asked
    assert "has room for a session of" in why
    assert affordable(LAYOUT, 1 << 26, tmp_path) == (1 << 26, "")


def test_too_small_a_session_is_refused_with_the_least_size() -> None:
    with pytest.raises(ConfigError, match=r"give --gib 0\.0469 or more"):
        Shape.of(LAYOUT, 1 << 24)


def test_a_path_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtide", "demo", "--path", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "is not a directory" in capsys.readouterr().err


def test_the_filesystem_of_a_folder_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/sys")
    assert filesystem(tmp_path / "link") == filesystem(Path("/proc")) == "proc"
    assert filesystem(tmp_path) != "proc"
