"""The rules: promtool accepts them, and each metric that they and the dashboard name is one that a node exposes.

With a Prometheus here, it scrapes a real node, and evaluates every query of the rules and the dashboard.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

import kvtide
from kvtide.metrics import METRICS
from tests.deploy.container import Container, container, tool
from tests.node.serving import eventually
from tests.test_docs import ROOT
from tests.test_metrics import named

FOLDER = ROOT / "deploy/prometheus"
SOURCE = "apt install prometheus"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    """Of the rules and the dashboard."""
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    found = [query.replace("$__rate_interval", "1m").replace("$instance", ".*") for query in found]
    assert not [query for query in found if "$" in query]
    return [rule["expr"] for rule in rules()] + found


def test_promtool_accepts_the_rules() -> None:
    subprocess.run([tool("promtool", SOURCE), "check", "rules", "--lint-fatal", "rules.yml"], cwd=FOLDER, check=True)


def test_the_unit_tests_of_the_rules_pass() -> None:
    subprocess.run([tool("promtool", SOURCE), "test", "rules", "rules_test.yml"], cwd=FOLDER, check=True)


def test_each_rule_has_a_unit_test() -> None:
    told = (FOLDER / "rules_test.yml").read_text()
    for rule in rules():
        assert (rule.get("alert") or rule["record"]) in told


def test_each_alert_says_what_happened_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) > 5
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}


def test_the_rules_name_metrics_that_exist() -> None:
    known = {metric.name for metric in METRICS}
    for query in queries():
        assert named(query) <= known | {rule.get("record") for rule in rules()}, query


@pytest.fixture(scope="module")
def node() -> Iterator[Container]:
    """A node with a disk, to which something was stored, and from which something was loaded, and something was not;
    other nodes may read from it. It is in a cluster whose directory does not answer."""
    with container() as made:
        secret = Path(made.here("/etc/kvtide/peers"))
        secret.write_text("0" * 64)
        secret.chmod(0o600)
        made.start(
            ["kvtide", "node", "--socket", "/run/kvtide/kvtide.sock", "--http", "127.0.0.1:9410"],
            {
                "KVTIDE_DRAM_BUDGET": "16MiB",
                "KVTIDE_NVME_PATH": "/var/lib/kvtide/tier",
                "KVTIDE_NVME_BUDGET": "64MiB",
                "KVTIDE_PEERS_LISTEN": "127.0.0.1:0",
                "KVTIDE_PEERS_TOKEN_FILE": "/etc/kvtide/peers",
                "KVTIDE_PEERS_DIRECTORY": "valkey://127.0.0.1:1",  # nothing is there
            },
        )
        layout = kvtide.Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=16)
        with kvtide.connect(f"unix:{made.socket}") as client, client.session(kvtide.Model(layout, "w")) as session:
            tokens = np.arange(16, dtype=np.uint32)
            session.store(tokens, [bytes(layout.geometry["full"].nbytes)])
            with session.match(tokens) as match:
                assert match.tokens == 16
            with session.match(tokens + 1, request="missed") as match:
                assert match.tokens == 0
        yield made
        made.stop()


def test_a_scrape_is_what_prometheus_expects(node: Container) -> None:
    text = httpx.get(f"{node.url}/metrics").text
    subprocess.run([tool("promtool", SOURCE), "check", "metrics"], input=text, text=True, check=True)


def test_a_node_exposes_each_metric_that_rules_and_dashboard_name(node: Container) -> None:
    exposed = set(re.findall(r"^# TYPE (\w+) ", httpx.get(f"{node.url}/metrics").text, re.MULTILINE))
    only_with = {"kvtide_tenant_refused_blocks_total", "kvtide_steward_silence_seconds"}  # quotas; shared storage
    wanted = set().union(*map(named, queries())) - {rule.get("record") for rule in rules()}
    assert wanted - only_with <= exposed
    assert only_with <= wanted


class Prometheus:
    """A Prometheus that scrapes a node."""

    def __init__(self, folder: Path, program: str, target: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = {
            # A scrape may take as long as the interval; what is slower counts as a node that does not answer.
            "global": {"scrape_interval": "5s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "rules.yml")],
            "scrape_configs": [{"job_name": "kvtide", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._http = httpx.Client()
        self._log = (folder / "log").open("wb")
        command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        listen = f"--web.listen-address={self.url.removeprefix('http://')}"
        self._process = subprocess.Popen([*command, listen], stdout=self._log, stderr=self._log)

    def get(self, path: str, **given: str) -> Any:
        return self._http.get(f"{self.url}/api/v1/{path}", params=given).raise_for_status().json()

    @property
    def scraped(self) -> bool:
        """Whether it has the node's metrics twice, so that there are rates."""
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            found = self.get("query", query="count_over_time(kvtide_blocks[1m])")
        except httpx.HTTPError:  # it is not ready
            return False
        result = found["data"]["result"]
        return bool(result) and int(result[0]["value"][1]) >= 2

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._http.close()


def test_a_prometheus_evaluates_each_query_of_rules_and_dashboard(node: Container, tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path, tool("prometheus", SOURCE), node.url.removeprefix("http://"))
    try:
        eventually(lambda: prometheus.scraped)
        (target,) = prometheus.get("targets")["data"]["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        for query in queries():
            answer = prometheus.get("query", query=query)
            assert answer["status"] == "success", f"{query}: {answer}"
            assert "warnings" not in answer, f"{query}: {answer}"
        answered = [
            "kvtide_tier_used_bytes / kvtide_tier_budget_bytes",
            "kvtide_node_clients",
            "kvtide_peer_blocks_total",
        ]
        for query in answered:
            assert prometheus.get("query", query=query)["data"]["result"], query
        eventually(lambda: all(rule["health"] == "ok" for rule in evaluated(prometheus)))
        assert len(evaluated(prometheus)) == len(rules())
        # Not "pending": before the first scrape there is no node, and a scrape may be late.
        assert [rule["name"] for rule in evaluated(prometheus) if rule.get("state") == "firing"] == []
    finally:
        prometheus.close()


def evaluated(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.get("rules")["data"]["groups"] for rule in group["rules"]]
