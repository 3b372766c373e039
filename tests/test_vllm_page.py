"""The page about vLLM: what it tells to do can be done."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from kvtide import config as configuration
from kvtide.config import Engine
from kvtide.doctor import flags
from kvtide.engines.connector.request_options import RequestOptions
from tests.test_docs import ROOT, code, rows

PAGE = ROOT / "docs/vllm.md"


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIDE_CONFIG", raising=False)


def test_every_flag_is_one_that_the_connector_takes() -> None:
    given = code(PAGE, "json")
    for page in (PAGE, ROOT / "README.md"):
        for block in (*code(page, "sh"), *code(page, "bash")):
            words = shlex.split(block.replace("\\\n", " "), comments=True)
            given += [words[i + 1] for i, word in enumerate(words) if word == "--kv-transfer-config"]
    assert len(given) >= 5
    found = [flags.settings(flag) for flag in given]
    assert any(config.nvme.path for config in found)
    assert any(config.engine.address for config in found)


def test_every_wish_and_every_way_to_store_is_there_and_no_other() -> None:
    assert rows("docs/vllm.md", "For one request") == set(RequestOptions.__struct_fields__)
    told = rows("docs/vllm.md", "What is stored, and when") - {"engine.store"}
    assert told == set(get_args(get_type_hints(Engine)["store"]))


def test_every_metric_of_the_connector_is_there_and_no_other() -> None:
    source = (ROOT / "src/kvtide/engines/vllm/metrics.py").read_text()
    names = re.findall(r'^    "(\w+)": "', source, re.MULTILINE)
    assert len(names) > 5
    assert set(re.findall(r"`vllm:kvtide_(\w+)`", PAGE.read_text())) == set(names)


def test_every_setting_on_the_page_and_on_that_about_tuning_is_one() -> None:
    text = PAGE.read_text() + (ROOT / "docs/tuning.md").read_text()
    known = {setting.name for setting in configuration.explain(env={})}
    sections = {name.partition(".")[0] for name in known}
    told = set(re.findall(r"`(\w+\.\w+)(?: = [^`]*)?`", text))
    told = {name for name in told if name.partition(".")[0] in sections}
    assert len(told) > 8
    assert told <= known
