"""Users that share a trust domain can read each other's blocks in memory: whoever runs a node is told so."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from kvtide import config
from kvtide.cli.status import frame
from kvtide.doctor import node as doctor
from kvtide.doctor.finding import Level
from kvtide.node.statistics import least
from kvtide.node.trust import Trusted
from tests.node.serving import Served

DRAM = {"budget": "16MiB", "segment": "2MiB"}
TWO = "60001:blue 60002:blue:read 60003:green"


def told(text: str) -> bool:
    words = " ".join(text.split())
    return all(part in words for part in ("60001, 60002", "'blue'", "read all blocks of the others", "node.users"))


@pytest.mark.parametrize("users", ["", "60001:blue 60002:green", "60001::admin", "60001:blue"])
def test_there_is_no_warning_where_nobody_shares(users: str) -> None:
    assert Trusted(users).warnings == []


@pytest.mark.parametrize("users", ["60001:blue 60002:blue", "@60001:blue", "60001::read"])
def test_several_users_a_group_and_the_nodes_own_domain_are_warned_of(users: str) -> None:
    (said,) = Trusted(users).warnings
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
