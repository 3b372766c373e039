"""The page about vLLM and the manifests beside it: what they tell to do can be done."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from typer.testing import CliRunner

from kvtide import cli
from kvtide import config as configuration
from kvtide.config import Engine
from kvtide.doctor import flags
from kvtide.engines.halves.wishes import Wishes
from kvtide.units import parse_size
from tests.test_docs import ROOT, code, rows

PAGE = ROOT / "docs/vllm.md"
MANIFESTS = ROOT / "examples/kubernetes"


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
    assert rows("docs/vllm.md", "For one request") == set(Wishes.__struct_fields__)
    told = rows("docs/vllm.md", "What is stored, and when") - {"engine.store"}
    assert told == set(get_args(get_type_hints(Engine)["store"]))


def test_every_metric_of_the_connector_is_there_and_no_other() -> None:
    source = (ROOT / "src/kvtide/engines/vllm/metrics.py").read_text()
    names = re.findall(r'^    "(\w+)": "', source, re.MULTILINE)
    assert len(names) > 5
    assert set(re.findall(r"`vllm:kvtide_(\w+)`", PAGE.read_text())) == set(names)


def test_every_setting_on_the_page_is_one() -> None:
    known = {setting.name for setting in configuration.explain(env={})}
    sections = {name.partition(".")[0] for name in known}
    told = set(re.findall(r"`(\w+\.\w+)(?: = [^`]*)?`", PAGE.read_text()))
    told = {name for name in told if name.partition(".")[0] in sections}
    assert len(told) > 8
    assert told <= known


# -- Kubernetes -----------------------------------------------------------------------------------------------


def manifests() -> dict[str, dict[str, Any]]:
    files = sorted(MANIFESTS.glob("*.yaml"))
    return {part["kind"]: part for file in files for part in yaml.safe_load_all(file.read_text())}


def pod(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its only container; selector and labels agree, and every mount has its volume."""
    template = manifest["spec"]["template"]
    assert manifest["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}
    return template["spec"], container


def option(container: dict[str, Any], name: str) -> str:
    words = [*container["command"], *container["args"]]
    value: str = words[words.index(name) + 1]
    return value


def mounted(spec: dict[str, Any], container: dict[str, Any], path: str) -> Any:
    """What is mounted where a file lies."""
    (mount,) = [m for m in container["volumeMounts"] if Path(path).is_relative_to(m["mountPath"])]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    return volume


def test_the_manifests_belong_together(tmp_path: Path) -> None:
    parts = manifests()
    node, serving = pod(parts["DaemonSet"]), pod(parts["Deployment"])
    config = flags.settings(option(serving[1], "--kv-transfer-config"))
    socket = config.engine.address.removeprefix("unix:")
    assert option(node[1], "--socket") == socket
    assert mounted(*node, socket)["hostPath"]["path"] == mounted(*serving, socket)["hostPath"]["path"]
    assert node[0]["hostPID"] is True

    assert mounted(*node, option(node[1], "--config"))["configMap"]["name"] == parts["ConfigMap"]["metadata"]["name"]
    file = tmp_path / Path(option(node[1], "--config")).name
    file.write_text(parts["ConfigMap"]["data"][file.name])
    settings = configuration.read(file, {})
    assert settings.dram.budget < parse_size(f"{node[1]['resources']['limits']['memory']}B")
    assert "hostPath" in mounted(*node, settings.nvme.path)
    assert float(option(node[1], "--stop-seconds")) < node[0]["terminationGracePeriodSeconds"]


def test_the_node_is_told_what_it_understands() -> None:
    _, container = pod(manifests()["DaemonSet"])
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["kvtide", "node"]
    help_ = CliRunner().invoke(cli.app, ["node", "--help"], env={"COLUMNS": "200"}).stdout
    for word in words:
        assert not word.startswith("--") or word in help_
