"""The files of docs/routers.md: what they say agrees, and what a node publishes arrives where routers look for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
import zmq

from bench.peers.environments import ENVIRONMENTS, interpreter
from kvtide import config as configuration
from kvtide.node.client.client import Client
from kvtide.node.events import wire
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt
from kvtide.testing.servers import free_ports
from kvtide.units import parse_size
from tests.deploy.container import Container, container, tool
from tests.deploy.test_docker import instructions
from tests.deploy.test_kubernetes import CHART, FOLDER, MANIFESTS, accepted, labels, option, parts, rendered
from tests.node.serving import eventually
from tests.test_docs import ROOT, code

ROUTERS, PAGE = FOLDER / "routers", ROOT / "docs/routers.md"
VALUES = {name: ROUTERS / f"{name}-kvtide.yaml" for name in ("llm-d", "dynamo")}
NAME = "Qwen/Qwen3-8B"


def chart(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return parts(rendered("--values", str(VALUES[name])))


def settings(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    text: str = found["ConfigMap", "kvtide-node"]["data"]["kvtide.toml"]
    return text


def forwarders(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The containers beside vLLM."""
    _, *others = found["Deployment", "kvtide-vllm"]["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one for one in others}


# -- the chart --------------------------------------------------------------------------------------------------------


def test_without_events_nothing_is_published_and_forwarded() -> None:
    text = MANIFESTS.read_text()
    assert "[events]" not in text
    assert "socat" not in text


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_accepts_the_chart_with_events(name: str, tmp_path: Path) -> None:
    accepted(rendered("--values", str(VALUES[name])), "1.25.0", tmp_path / "rendered.yaml")


@pytest.mark.parametrize("version", ["1.25.0", "1.37.0"])
def test_kubernetes_accepts_dynamos_selection_service(version: str, tmp_path: Path) -> None:
    accepted((ROUTERS / "dynamo.yaml").read_text(), version, tmp_path / "dynamo.yaml")


@pytest.mark.parametrize("name", VALUES)
def test_what_the_chart_tells_the_node_are_settings_of_its_own(name: str, tmp_path: Path) -> None:
    file = tmp_path / "kvtide.toml"
    file.write_text(settings(chart(name)))
    config = configuration.read(file, {})
    assert config.events.token_ids, "no router recognises blocks without tokens"
    assert config.events.block_tokens == 16
    assert config.events.topic == f"kv@node@{NAME}"
    assert config.events.form == "map"
    assert config.nvme.budget == parse_size("500GiB"), "the chart's other settings stay"


def test_settings_of_the_user_come_after_those_of_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "kvtide.toml"
    values = "events.enabled=true,events.model=m,node.settings.events.shared=no,node.settings.events.block_tokens=32"
    file.write_text(settings(parts(rendered("--set", values))))
    events = configuration.read(file, {}).events
    assert (events.shared, events.block_tokens, events.topic) == ("no", 32, "kv@node@m")


def test_the_image_has_what_events_need() -> None:
    (command,) = [rest for name, rest in instructions() if name == "RUN" and "--constraint" in rest]
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', command)
    assert "events" in extras.split(",")


@pytest.mark.parametrize("name", VALUES)
def test_the_forwarders_open_the_sockets_of_the_node_as_its_user(name: str) -> None:
    found = chart(name)
    node = found["DaemonSet", "kvtide-node"]["spec"]["template"]["spec"]
    engine = found["Deployment", "kvtide-vllm"]["spec"]["template"]["spec"]
    given = tomllib.loads(settings(found))["events"]
    made = forwarders(found)
    assert set(made) == {"events", "replay"}
    volumes = [{volume["name"]: volume for volume in pod["volumes"]}["socket"] for pod in (node, engine)]
    assert volumes[0] == volumes[1]
    for one, endpoint in ((made["events"], given["endpoint"]), (made["replay"], given["replay"])):
        listen, connect = one["command"][1:]
        assert connect == endpoint.replace("ipc://", "UNIX-CONNECT:")
        assert listen.startswith(f"TCP-LISTEN:{one['ports'][0]['containerPort']},fork")
        assert [mount["mountPath"] for mount in one["volumeMounts"]] == [option(node["containers"][0], "--socket")[:11]]
        rights, nodes = one["securityContext"], node["containers"][0]["securityContext"]
        assert rights.pop("seccompProfile")
        assert rights == nodes, "nobody else may open them"
    assert "9411" not in json.dumps(found["NetworkPolicy", "kvtide-node"])
    assert [port["name"] for port in node["containers"][0]["ports"]] == ["metrics"], "the node opens no port for events"


def test_only_the_router_reaches_the_ports_of_events() -> None:
    for found, router in (
        (parts(rendered("--set", "events.enabled=true")), "router"),
        (chart("dynamo"), "dynamo"),
    ):
        policy = found["NetworkPolicy", "kvtide-vllm"]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels(found["Deployment", "kvtide-vllm"])
        assert policy["policyTypes"] == ["Ingress"]
        space = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": router}}}
        assert policy["ingress"] == [{"ports": [{"port": "http"}]}, {"from": [space]}]
    (_, pods) = chart("llm-d")["NetworkPolicy", "kvtide-vllm"]["spec"]["ingress"]
    assert pods == {"from": [{"podSelector": {"matchLabels": {"llm-d-router-gateway": "router-epp"}}}]}
    nobody = parts(rendered("--set", "events.enabled=true,events.from=null"))
    assert nobody["NetworkPolicy", "kvtide-vllm"]["spec"]["ingress"] == [{"ports": [{"port": "http"}]}]
    assert ("NetworkPolicy", "kvtide-vllm") not in parts(MANIFESTS.read_text())


def test_helm_understands_the_values_of_the_page() -> None:
    ours = [
        line.split() for block in code(PAGE, "sh") for line in block.splitlines() if line.startswith("helm upgrade")
    ]
    assert {words[-1] for words in ours} == {str(path.relative_to(ROOT)) for path in VALUES.values()}
    for words in ours:
        assert words[3] == str(CHART.relative_to(ROOT))
        assert f"#   {' '.join(words)}" in Path(ROOT, words[-1]).read_text()
    for name in set(re.findall(r"(?<![\w/])deploy/[\w/.-]+\w", PAGE.read_text())):
        assert (ROOT / name).exists(), name


# -- llm-d ------------------------------------------------------------------------------------------------------------

PARAMETERS: dict[str, dict[str, Any]] = {
    "token-producer": {"modelName": str, "vllm": {"url": str}},
    "endpoint-notification-source": {},
    "precise-prefix-cache-producer": {
        "tokenProcessorConfig": {"blockSizeTokens": int},
        "indexerConfig": {"kvCacheBackendConfigs": list},
        "kvEventsConfig": {"topicFilter": str, "discoverPods": bool, "podDiscoveryConfig": {"socketPort": int}},
    },
    "prefix-cache-scorer": {"prefixMatchInfoProducerName": str},
    "kv-cache-utilization-scorer": {},
    "queue-scorer": {},
    "single-profile-handler": {},
    "max-score-picker": {},
}
"""Plugins of llm-d's router and parameters that they have, by its documentation and source of August 2026. It refuses
plugins and parameters that it does not know."""


def known(given: Any, schema: Any, where: str) -> None:
    if isinstance(schema, type):
        assert isinstance(given, schema), where
        return
    for name, value in given.items():
        assert name in schema, f"{where}: {name}"
        known(value, schema[name], f"{where}.{name}")


def router() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((ROUTERS / "llm-d-router.yaml").read_text())
    return made


def test_the_configuration_of_llm_d_has_names_that_it_knows() -> None:
    made = router()
    assert (made["apiVersion"], made["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    assert set(made) == {"apiVersion", "kind", "plugins", "dataLayer", "schedulingProfiles"}
    plugins = {one.get("name", one["type"]): one for one in made["plugins"]}
    assert len(plugins) == len(made["plugins"])
    for name, one in plugins.items():
        assert set(one) <= {"name", "type", "parameters"}
        known(one.get("parameters", {}), PARAMETERS[one["type"]], name)
    (source,) = made["dataLayer"]["sources"]
    producers = {name for name, one in plugins.items() if one["type"] == "precise-prefix-cache-producer"}
    assert plugins[source["pluginRef"]]["type"] == "endpoint-notification-source"
    assert {one["pluginRef"] for one in source["extractors"]} == producers
    scorers = [one for one in plugins.values() if one["type"] == "prefix-cache-scorer"]
    assert {one["parameters"]["prefixMatchInfoProducerName"] for one in scorers} == producers
    (profile,) = made["schedulingProfiles"]
    assert {one["pluginRef"] for one in profile["plugins"]} <= set(plugins)
    assert {one["name"] for one in scorers} <= {one["pluginRef"] for one in profile["plugins"]}


def test_llm_d_looks_for_streams_where_they_are_and_in_the_node_s_blocks() -> None:
    found = chart("llm-d")
    plugins = {one.get("name", one["type"]): one.get("parameters", {}) for one in router()["plugins"]}
    vllm, *_ = found["Deployment", "kvtide-vllm"]["spec"]["template"]["spec"]["containers"]
    engine = json.loads(option(vllm, "--kv-events-config"))
    streams = {name: plugins[name]["kvEventsConfig"] for name in ("engine-blocks", "node-blocks")}
    ports = {name: stream["podDiscoveryConfig"]["socketPort"] for name, stream in streams.items()}
    assert ports["engine-blocks"] == int(engine["endpoint"].rpartition(":")[2])
    assert ports["node-blocks"] == forwarders(found)["events"]["ports"][0]["containerPort"]
    events = tomllib.loads(settings(found))["events"]
    assert plugins["node-blocks"]["tokenProcessorConfig"]["blockSizeTokens"] == events["block_tokens"]
    for topic, name in ((engine["topic"], "engine-blocks"), (events["topic"], "node-blocks")):
        assert topic.startswith(streams[name]["topicFilter"])
        assert topic.split("@")[2:] == [plugins["token-producer"]["modelName"]], "it splits the topic at each @"
    assert engine["topic"] == f"kv@$(POD_IP):{vllm['ports'][0]['containerPort']}@{NAME}"
    assert vllm["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    replays = forwarders(found)["replay"]["ports"][0]["containerPort"]
    assert replays not in range(ports["node-blocks"], ports["node-blocks"] + 32), (
        "there llm-d looks for events of ranks"
    )
    media = {medium.lower() for medium, _ in wire._NAMES.values()}
    assert {one["name"] for one in plugins["node-blocks"]["indexerConfig"]["kvCacheBackendConfigs"]} == media


# -- what arrives -----------------------------------------------------------------------------------------------------


@contextmanager
def publishing(name: str) -> Iterator[Container]:
    """The node of the chart with these values; it has a disk."""
    found = chart(name)
    node = found["DaemonSet", "kvtide-node"]["spec"]["template"]["spec"]["containers"][0]
    with container() as made:
        made.settings("kvtide.toml", settings(found).replace("ipc:///run", f"ipc://{made.folder}/run"))
        made.start([*node["command"], "--stop-seconds", "60"], {"KVTIDE_NVME_STORE": "through"})
        yield made


@contextmanager
def forwarded(made: Container, name: str) -> Iterator[int]:
    """A port at which a forwarder of the chart listens."""
    (port,) = free_ports(1)
    program, listen, connect = forwarders(chart("llm-d"))[name]["command"]
    listen = re.sub(r":\d+", f":{port}", listen) + ",bind=127.0.0.1"
    command = [tool(program, "apt-get install socat"), listen, made.here(connect)]
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: answers(port))
            yield port
        finally:
            process.terminate()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def store(made: Container, tokens: list[int]) -> None:
    with Client(made.socket) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))
        assert client.flush(60)


def heard(at: str, tokens: list[int]) -> set[str]:
    """The media in which a subscriber, as llm-d is one, has heard of all blocks of a prompt."""
    media: dict[str, int] = {}
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        sub.connect(at)
        while set(media.values()) != {len(tokens)} or len(media) < 2:
            assert sub.poll(60_000), media
            topic, number, batch = sub.recv_multipart()
            assert topic.decode().split("@") == ["kv", "node", NAME]
            assert len(number) == 8
            _, events, rank = msgspec.msgpack.decode(batch)
            assert rank == 0
            for event in events:
                if event["type"] == "BlockStored":
                    assert event["block_size"] == SIZE
                    media[event["medium"]] = media.get(event["medium"], 0) + len(event["token_ids"])
    return set(media)


def test_a_node_of_the_chart_publishes_what_it_has_in_memory_and_on_its_disk() -> None:
    with publishing("llm-d") as made:
        store(made, prompt(1, 2, 3))
        assert heard(f"ipc://{made.here('/run/kvtide')}/events", prompt(1, 2, 3)) == {"CPU", "STORAGE"}
        made.stop()


def test_a_forwarder_of_the_chart_passes_events_on() -> None:
    with publishing("llm-d") as made, forwarded(made, "events") as port:
        store(made, prompt(1, 2, 3))
        assert heard(f"tcp://127.0.0.1:{port}", prompt(1, 2, 3)) == {"CPU", "STORAGE"}
        made.stop()


# -- Dynamo -----------------------------------------------------------------------------------------------------------

dynamo = [
    pytest.mark.long,
    pytest.mark.skipif(
        not interpreter("dynamo").exists(), reason="Dynamo is not here: python bench/peers/environments.py dynamo"
    ),
]
WORKER = Path(__file__).parent / "selection_worker.py"
OWN = ("unshare", "--user", "--map-root-user", "--net")
apart = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OWN, "true"], capture_output=True).returncode != 0,
    reason="this system lets nobody make namespaces",
)


def test_an_engine_is_registered_at_dynamo_with_the_ports_of_its_forwarders() -> None:
    found = chart("dynamo")
    made, worker = forwarders(found), json.loads((ROUTERS / "dynamo-worker.json").read_text())
    events, replay = (f"tcp://ENGINE:{made[name]['ports'][0]['containerPort']}" for name in ("events", "replay"))
    assert (worker["kv_events_endpoints"], worker["replay_endpoint"]) == ({"0": events}, replay)
    assert worker["block_size"] == tomllib.loads(settings(found))["events"]["block_tokens"]
    vllm, *_ = found["Deployment", "kvtide-vllm"]["spec"]["template"]["spec"]["containers"]
    assert worker["endpoint"] == f"http://ENGINE:{vllm['ports'][0]['containerPort']}"
    assert worker["model_name"] == vllm["command"][-1]
    page = PAGE.read_text()
    assert events.replace("ENGINE", "10.0.0.7") in page
    assert replay.replace("ENGINE", "10.0.0.7") in page


def asked(command: list[str], environment: dict[str, str], nodes: list[Container]) -> str:
    """What a program prints. Meanwhile the nodes are given new prompts: Dynamo asks for what it missed, for example
    while it connected, when it is told of a change."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for number in count(100):
            try:
                printed, errors = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                for node in nodes:
                    store(node, prompt(number))
    assert process.returncode == 0, errors
    return printed


class TestDynamo:
    pytestmark = dynamo

    @apart
    def test_the_selection_service_chooses_the_engine_whose_node_has_the_prompt(self) -> None:
        (service,) = parts((ROUTERS / "dynamo.yaml").read_text())["Deployment", "dynamo-select"]["spec"]["template"][
            "spec"
        ]["containers"]
        python, *command = service["command"]
        assert python == "python"
        weights = [one["name"] for one in service["env"]]
        assert len(weights) == 2
        text, ports = (ROUTERS / "dynamo-worker.json").read_text(), forwarders(chart("dynamo"))
        prompts = [prompt(1, 2, 3), prompt(4, 5)]
        given: dict[str, Any] = {
            "command": command,
            "service": f"http://127.0.0.1:{service['ports'][0]['containerPort']}",
            "forwarders": [],
            "workers": [],
            "requests": [{"model_name": NAME, "token_ids": tokens} for tokens in reversed(prompts)],
        }
        nodes: list[Container] = []
        with ExitStack() as stack:
            for number, tokens in enumerate(prompts, 1):
                made = stack.enter_context(publishing("dynamo"))
                nodes.append(made)
                store(made, tokens)
                engine = f"127.0.0.{number}"
                given["workers"].append(json.loads(text.replace("ENGINE", engine)) | {"worker_id": number})
                for one in ports.values():
                    path = one["command"][2].removeprefix("UNIX-CONNECT:")
                    given["forwarders"].append([engine, one["ports"][0]["containerPort"], made.here(path)])
            environment = {**os.environ, **dict(zip(weights, ("0.5", "0.125"), strict=True))}
            answers = asked([*OWN, str(interpreter("dynamo")), str(WORKER), json.dumps(given)], environment, nodes)
        for answer, number in zip(json.loads(answers), (2, 1), strict=True):
            length = len(prompts[number - 1])
            assert answer["worker_id"] == number
            assert answer["endpoint"] == f"http://127.0.0.{number}:8000"
            assert answer["overlap"]["gpu"] == 0
            assert answer["overlap"]["cpu"] == answer["overlap"]["disk"] == length
            assert answer["effective_prefill_tokens"] == length / 2, "half of a block in memory counts as there"

    def test_the_frontend_has_the_options_of_the_page(self, tmp_path: Path) -> None:
        """It downloads the package of Dynamo's frontend."""
        wanted = [
            f"ai-dynamo=={ENVIRONMENTS['dynamo'].version}",
            "msgspec",
            "packaging",
            "pyyaml",
        ]  # of all it asks for
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), *wanted]
        subprocess.run(pip, check=True)
        (line,) = [
            line
            for block in code(PAGE, "sh")
            for line in block.splitlines()
            if line.startswith("python -m dynamo.frontend")
        ]
        parse = (
            "import argparse, sys; from dynamo.frontend.frontend_args import FrontendArgGroup; "
            "parser = argparse.ArgumentParser(); FrontendArgGroup().add_arguments(parser); "
            "given = parser.parse_args(sys.argv[1:]); "
            "print(given.router_mode, given.host_cache_hit_weight, given.disk_cache_hit_weight, given.use_kv_events)"
        )
        ended = subprocess.run(
            [str(interpreter("dynamo")), "-c", parse, *line.split()[3:]],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert ended.stdout.split() == ["kv", "0.75", "0.25", "True"]
