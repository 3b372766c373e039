"""The units: systemd accepts them, the command of the node's serves, and what they name belongs together."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvtide import config as configuration
from kvtide.doctor import flags
from kvtide.tiers.peers.cluster import announced_address, check_cluster
from tests.deploy.container import container, tool
from tests.test_docs import ROOT

UNITS = ROOT / "deploy/systemd"
NODE, ENGINE = UNITS / "kvtide-node.service", UNITS / "vllm@.service"


def unit(file: Path) -> dict[str, list[str]]:
    """The values of each name of a unit."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", file.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("file", [NODE, ENGINE], ids=lambda file: file.name)
def test_systemd_accepts_the_unit(file: Path, tmp_path: Path) -> None:
    verify = tool("systemd-analyze", "apt install systemd")
    for other in (NODE, ENGINE):  # programs that are not installed here would be refused
        text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", other.read_text(), flags=re.MULTILINE)
        (tmp_path / other.name).write_text(text)
    target = tmp_path / file.name.replace("@", "@a")
    if target.name != file.name:
        target.symlink_to(tmp_path / file.name)
    ended = subprocess.run([verify, "verify", "--man=no", str(target)], capture_output=True, text=True)
    about = [line for line in ended.stderr.splitlines() if file.stem.rstrip("@") in line]
    assert (ended.returncode, about) == (0, []), ended.stderr


def test_the_node_of_the_unit_is_hardened() -> None:
    analyze = tool("systemd-analyze", "apt install systemd")
    ended = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(NODE)], capture_output=True, text=True
    )
    if "offline" in ended.stderr:
        pytest.skip(f"this systemd is too old: {ended.stderr.strip()}")
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", ended.stdout)
    assert float(exposure) < 2, "0 is safe, and 10 is not"


def test_the_node_sees_the_processes_of_its_clients() -> None:
    """It reads when they were started, and watches them."""
    assert not {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivatePIDs"} & unit(NODE).keys()


def test_the_command_of_the_unit_starts_a_node_with_the_settings_beside_it() -> None:
    given = unit(NODE)
    (line,) = given["ExecStart"]
    words = shlex.split(line)
    assert float(words[words.index("--stop-seconds") + 1]) < float(given["TimeoutStopSec"][0])
    settings = (UNITS / "kvtide.toml").read_text()
    config = configuration.read(UNITS / "kvtide.toml", {})
    (state,) = given["StateDirectory"]
    assert Path(config.nvme.path).is_relative_to(f"/var/lib/{state}")
    assert given["RuntimeDirectoryPreserve"] == ["yes"], "a stopped node leaves kvtide.lent, and containers mount it"
    with container() as made:
        made.settings(Path(words[words.index("--config") + 1]).name, settings)
        made.start(words, {})
        assert httpx.get(f"{made.url}/healthz").json()["status"] == "serving"
        made.stop()


def test_the_settings_for_other_nodes_beside_the_unit_fit_together(tmp_path: Path) -> None:
    """They are comments, to be filled in."""
    text = (UNITS / "kvtide.toml").read_text()
    wanted = re.sub(r"^# (\[peers\]|\w+ = .*)$", r"\1", text.partition("over TCP")[2], flags=re.MULTILINE)
    file = tmp_path / "kvtide.toml"
    file.write_text("#" + wanted)
    peers = configuration.read(file, {}).peers
    check_cluster(peers)
    assert announced_address(peers, peers.listen) == "10.0.0.7:9411"
    assert peers.token_file
    assert peers.directory_password_file


def test_the_engine_uses_the_node() -> None:
    node, engine = unit(NODE), unit(ENGINE)
    (line,) = engine["ExecStart"]
    words = shlex.split(line)
    config = flags.settings(words[words.index("--kv-transfer-config") + 1])
    assert config.engine.address == f"unix:{shlex.split(node['ExecStart'][0])[3]}"
    assert config.engine.address.startswith(f"unix:/run/{node['RuntimeDirectory'][0]}/")
    assert engine["User"] == node["User"], "others need an entry in node.users"
    assert NODE.name in engine["Wants"][0]
    assert NODE.name in engine["After"][0]


def test_the_user_of_the_units_is_made() -> None:
    (line,) = [line for line in (UNITS / "kvtide.sysusers").read_text().splitlines() if line[0] != "#"]
    assert shlex.split(line)[:2] == ["u", unit(NODE)["User"][0]]
    subprocess.run(
        [tool("systemd-sysusers", "apt install systemd"), "--dry-run", str(UNITS / "kvtide.sysusers")], check=True
    )
