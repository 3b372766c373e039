"""``kvtide demo --engine vllm`` with a real vLLM and the shortest document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide import cli


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_document_comes_from_every_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["demo", "--engine", "vllm", "--path", str(tmp_path), "--tokens", "1024"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, (result.output, result.exception)
    assert "4 of 4 answers are, token for token," in result.stdout.replace("\n", " ")
    for way in ("DRAM", "NVMe, after a restart"):
        assert re.search(rf"{way}\s+│\s+\d+ │\s+1,(024|280) │", result.stdout)
    assert [file.name for file in tmp_path.iterdir()] == ["demo-out"]
