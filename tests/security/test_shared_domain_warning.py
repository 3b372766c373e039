"""Users that share a trust domain can read each other's blocks in memory: a node warns of that."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtide import cli, config
from kvtide.cli.status import frame
from kvtide.doctor import node as doctor
from kvtide.doctor.finding import Level
from kvtide.node.client.admin import HttpAdminClient
from kvtide.node.server.access import AccessList
from kvtide.store.node_statistics import least
from tests.node.serving import Served
from tests.node.test_http import Watched

DRAM = {"budget": "16MiB", "segment": "2MiB"}
TWO = "60001:blue 60002:blue:read 60003:green"


def told(text: str) -> bool:
    words = " ".join(text.split())
    return all(part in words for part in ("60001, 60002", "'blue'", "read all blocks of the others", "node.users"))


@pytest.mark.parametrize("users", ["", "60001:blue 60002:green", "60001::admin", "60001:blue"])
def test_there_is_no_warning_where_nobody_shares(users: str) -> None:
    assert AccessList(users).warnings == []


@pytest.mark.parametrize("users", ["60001:blue 60002:blue", "@60001:blue", "60001::read"])
def test_several_users_a_group_and_the_nodes_own_domain_are_warned_of(users: str) -> None:
    (said,) = AccessList(users).warnings
    assert "60001" in said


def test_start_status_and_doctor_say_who_shares_what_and_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Served(tmp_path / "n", dram=DRAM, node={"users": TWO}) as client:
        assert [told(r.getMessage()) for r in caplog.records if "trust domain" in r.getMessage()] == [True]
        status = client.status()
        assert [told(text) for text in status.node.warnings] == [True]
        shown = io.StringIO()
        Console(file=shown, width=200).print(frame(status))
        assert told(shown.getvalue())
        assert least(status).node.warnings == [], "nothing is told to strangers"
        findings = list(doctor.domains(config.read(env={}), status))
        assert [f.level for f in findings] == [Level.WARNING]
        assert told(f"{findings[0].found} {findings[0].do}")
    planned = list(doctor.domains(config.read(env={}, node={"users": TWO}), None))
    assert [f.level for f in planned] == [Level.WARNING]


def test_over_http_those_who_are_known_are_told_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIDE_TOKEN", "o" * 32)
    how = {"KVTIDE_NODE_HTTP": "127.0.0.1:0", "KVTIDE_NODE_USERS": TWO}
    node = Watched(tmp_path, KVTIDE_NODE_TOKENS="env:TOKENS", TOKENS=f"ops read {'o' * 32}", **how)
    try:
        assert told(node.log)
        address = f"http://127.0.0.1:{node.port}"
        assert [told(text) for text in HttpAdminClient(address, config.Node()).status().node.warnings] == [True]
        shown = CliRunner().invoke(cli.app, ["status", address, "--once"], env={"COLUMNS": "200"})
        assert (shown.exit_code, told(shown.output)) == (0, True), shown.output
        assert node.get("/status")[0] == 401
        status, finding = doctor.ask(config.read(env={}, engine={"address": f"unix:{node.path}"}))
        assert finding.level is Level.OK
        assert [told(f"{f.found} {f.do}") for f in doctor.domains(config.read(env={}), status)] == [True]
    finally:
        node.stop()
    node = Watched(tmp_path, **how)
    try:
        said = node.get("/status")[2]
        assert json.loads(said)["node"]["warnings"] == []
        assert not [word for word in ("60001", "60002", "blue", "green") if word in said]
    finally:
        node.stop()
