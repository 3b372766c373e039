"""The page about vLLM and the manifests beside it: what they tell to do can be done."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import kvtide
from kvtide import cli
from kvtide import config as configuration
from kvtide.config import Engine
from kvtide.doctor import flags
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.units import parse_size
from tests.node.serving import eventually
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
    assert rows("docs/vllm.md", "For one request") == set(RequestOptions.__struct_fields__)
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


class Host:
    """A folder that stands for a host of a cluster: what its pods mount lies there."""

    def __init__(self, folder: Path, parts: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        self.spec, self.container = pod(parts["DaemonSet"])
        self.paths = {mount["mountPath"]: f"{folder}{mount['mountPath']}" for mount in self.container["volumeMounts"]}
        for path in self.paths.values():
            Path(path).mkdir(parents=True)
        for name, text in parts["ConfigMap"]["data"].items():
            small = text.replace("GiB", "MiB")  # as much as this machine has
            Path(self.here("/etc/kvtide"), name).write_text(self.here(small))

    def here(self, text: str) -> str:
        for path, mine in self.paths.items():
            text = re.sub(rf"(?<![\w/]){re.escape(path)}(?![\w])", mine, text)
        return text

    def command(self, words: list[str]) -> list[str]:
        assert words[0] == "kvtide"
        return [sys.executable, "-m", "kvtide", *map(self.here, words[1:])]

    def start(self, args: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """The container, with a port that is free. It sees nothing of our environment's settings."""
        words = [word.replace(":9410", ":0") for word in (*self.container["command"], *args)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
        return subprocess.Popen(
            [*self.command(words), "--verbose"],
            env=clean | env,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def cluster_host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a short path: a socket's has 107 letters at most
        yield Host(Path(folder), manifests())


def test_the_node_of_the_manifests_starts_and_an_engine_of_theirs_uses_it(cluster_host: Host) -> None:
    process = cluster_host.start(cluster_host.container["args"], {})
    try:
        serving = pod(manifests()["Deployment"])[1]
        address = flags.settings(cluster_host.here(option(serving, "--kv-transfer-config"))).engine.address
        socket = Path(address.removeprefix("unix:"))
        assert socket.is_relative_to(cluster_host.folder)
        eventually(lambda: socket.exists() or process.poll() is not None)
        probe = cluster_host.container["readinessProbe"]["exec"]["command"]
        ready = subprocess.run(cluster_host.command(probe), capture_output=True, text=True, timeout=60)
        assert ready.returncode == 0, ready.stderr + (
            process.stderr.read() if process.poll() and process.stderr else ""
        )
        with kvtide.connect(address) as client:
            layout = kvtide.Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=16)
            with client.session(kvtide.Model(layout, "weights")) as session:
                tokens = np.arange(16, dtype=np.uint32)
                assert session.store(tokens, [bytes(layout.geometry["full"].nbytes)]).stored == 1
                with session.match(tokens) as match:
                    assert match.tokens == 16
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert list(Path(cluster_host.here("/kv/tier")).glob("*.segment")), "nothing was written down"


def test_the_node_of_the_page_serves_prometheus(cluster_host: Host) -> None:
    """With the lines that docs/vllm.md has for that."""
    (part,) = code(PAGE, "yaml")
    lines = yaml.safe_load(part)
    (command,) = [block for block in code(PAGE, "sh") if "create secret" in block]
    assert "secret generic kvtide-tokens --from-literal=tokens=" in command
    secret, setting = lines["env"]
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "kvtide-tokens", "key": "tokens"}
    token = "0123456789abcdef0123456789abcdef"
    process = cluster_host.start(
        lines["args"], {secret["name"]: f"prometheus read {token}", setting["name"]: setting["value"]}
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"serving (http://\S+):(\d+)/metrics", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        url = f"http://127.0.0.1:{found[2]}"
        assert httpx.get(url + lines["readinessProbe"]["httpGet"]["path"]).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert "kvtide_" in httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
