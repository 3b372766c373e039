"""``kvtide doctor vllm``: what it finds right and wrong, and what it says to do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvtide
from kvtide import cli
from kvtide import config as configuration
from kvtide.block import Group, Kind, Layout
from kvtide.doctor import disk, gain, host, model, node
from kvtide.doctor.engine import Running
from kvtide.doctor.finding import Level
from kvtide.index.keys import Tenant
from kvtide.node.client.client import Client
from kvtide.node.client.launch import open_node
from tests.node.serving import Apart, Process, apart, eventually

LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
FLAGS = {"kv_connector": "KvtideConnector", "kv_connector_module_path": "kvtide.engines.vllm", "kv_role": "kv_both"}
SMALL = {"dram": {"budget": "16MiB", "segment": "2MiB"}}
Findings = dict[str, dict[str, str]]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, caches or nodes but the test's own."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("KVTIDE_CONFIG", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)


def saved(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "dtype": "bfloat16", **config}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(tmp_path / "llama")


def doctor(*arguments: object, **settings: object) -> tuple[int, Findings]:
    """The exit status, and the findings by what they are about. Settings are those in vLLM's flag."""
    flag = json.dumps({**FLAGS, "kv_connector_extra_config": {**SMALL, **settings}})
    command = ["doctor", "vllm", "--json", "--kv-transfer-config", flag, *map(str, arguments)]
    result = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    found: Findings = {}
    for finding in json.loads(result.stdout):
        found.setdefault(finding["about"], finding)
    return result.exit_code, found


@contextmanager
def answering(metrics: str = "", version: str = "0.32.0") -> Iterator[str]:
    """A server that answers as vLLM does: a real one takes half a minute and needs an environment of its own."""
    pages = {"/version": json.dumps({"version": version}), "/metrics": metrics}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# -- the whole ------------------------------------------------------------------------------------------------


def test_a_good_plan_has_no_error_and_leaves_no_trace(llama: Path, tmp_path: Path) -> None:
    tier = tmp_path / "disk" / "kv"
    tier.parent.mkdir()
    status, found = doctor("--model", llama, nvme={"path": str(tier), "budget": "16MiB"})
    assert status == 0, found
    assert {"layout", "weights", "node", "DRAM", "memfd", "descriptors", "disk space", "disk speed", "gain"} <= set(
        found
    )
    assert list(tier.parent.iterdir()) == []
    assert list((tmp_path / "here").rglob("*.sock")) == [], "no node was started"


def test_each_finding_is_a_line_with_what_to_do(llama: Path) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "vllm", "--model", f"{llama}-gone"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"ok", "warning", "error"}
    (wrong,) = [line for line in lines if line.startswith("error")]
    assert "is neither a folder nor in the hub's cache" in wrong
    assert "give --model a folder with its config.json" in wrong


def test_it_needs_neither_torch_nor_vllm(llama: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'vllm', 'transformers', 'huggingface_hub']));"
        "from kvtide.cli import main; main()"
    )
    command = [sys.executable, "-W", "error", "-c", script, "doctor", "vllm", "--model", str(llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "256 MiB" not in done.stdout
    assert "layout: 4 layers of kind full, 2 x 64 of bfloat16: 2 KiB a token" in done.stdout


# -- flags ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        (json.dumps({**FLAGS, "kv_connector": "OffloadingConnector"}), "not 'KvtideConnector'"),
        (json.dumps({**FLAGS, "kv_role": "kv_producer"}), "not 'kv_both'"),
        (json.dumps({**FLAGS, "kv_connector_extra_config": {"dram": {"bugdet": 1}}}), "did you mean 'budget'?"),
        (json.dumps({**FLAGS, "kv_connector_extra_config": {"env": 3}}), "no section [env]"),
        ('{"kv_connector": "MultiConnector", "kv_connector_extra_config": ["x"]}', "no list of connectors"),
        ('{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": null}}', "no list of"),
        ('{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": ["x"]}}', "no list of"),
        ("@nowhere.json", "No such file"),
    ],
)
def test_a_flag_that_does_not_give_vllm_our_connector_is_an_error(llama: Path, flag: str, said: str) -> None:
    result = CliRunner().invoke(
        cli.app, ["doctor", "vllm", "--model", str(llama), "--json", "--kv-transfer-config", flag]
    )
    assert result.exit_code == 1
    assert said in json.loads(result.stdout)[-1]["found"]


def test_the_flag_may_be_a_file_and_we_one_of_several_connectors(llama: Path, tmp_path: Path) -> None:
    ours = {**FLAGS, "kv_connector_extra_config": {"dram": {"budget": "3MiB", "segment": "1MiB"}}}
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "x"}, ours]},
    }
    (tmp_path / "flag.json").write_text(json.dumps(several))
    status, found = doctor("--model", llama, "--kv-transfer-config", f"@{tmp_path}/flag.json")
    assert status == 0
    assert "dram.budget is 3 MiB" in found["DRAM"]["found"]


# -- models ---------------------------------------------------------------------------------------------------


def test_layouts_are_those_of_the_model(tmp_path: Path) -> None:
    plain = Layout.attention(layers=4, heads=2, head_dim=64)
    assert model.layout_of(saved(tmp_path / "a")) == plain
    assert model.layout_of(saved(tmp_path / "b", dtype="float32")) == plain, "vLLM computes it in 16 bits"
    assert model.layout_of(saved(tmp_path / "c"), "half").groups[0].dtype == "float16"
    assert (
        model.layout_of(saved(tmp_path / "d"), "auto", "fp8").geometry["full"].nbytes * 2
        == plain.geometry["full"].nbytes
    )
    mla = model.layout_of(saved(tmp_path / "e", kv_lora_rank=512, qk_rope_head_dim=64))
    assert mla.groups == (Group("mla", Kind.MLA, 4, 1, 576, "bfloat16"),)
    inner = {**LLAMA, "head_dim": 32, "dtype": "float16"}
    nested = model.layout_of(saved(tmp_path / "f", text_config=inner))
    assert nested == Layout.attention(layers=4, heads=2, head_dim=32, dtype="float16")


def test_of_a_window_only_its_last_blocks_count(tmp_path: Path) -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"]
    mixed = model.layout_of(saved(tmp_path / "m", layer_types=types, sliding_window=512))
    full, window = (mixed.geometry[name].footprint for name in ("full", "window"))
    assert model.nbytes(mixed, 256) == full + window
    assert model.nbytes(mixed, 2560) == 10 * full + 2 * window
    types[0] = "chunked_attention"
    chunks = model.layout_of(saved(tmp_path / "c", layer_types=types, attention_chunk_size=8192))
    assert chunks.group("window").window == 8192


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"layer_types": ["linear_attention"] * 4}, [], "linear_attention"),
        ({"ssm_state_size": 16}, [], "ssm_state_size"),
        ({"is_encoder_decoder": True}, [], "encoder"),
        ({"index_topk": 2048}, [], "sparse attention"),
        ({"num_hidden_layers": None}, [], "does not contain the model's shape"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            [],
            "does not contain the model's shape: it has no sliding_window",
        ),
        ({"kv_lora_rank": 512}, [], "does not contain the model's shape"),
        ({}, ["--kv-cache-dtype", "nvfp4"], "nvfp4"),
        ({}, ["--dtype", "float64"], "float64"),
    ],
)
def test_what_the_connector_refuses_is_an_error(
    tmp_path: Path, config: dict[str, object], options: list[str], said: str
) -> None:
    status, found = doctor("--model", saved(tmp_path / "model", **config), *options)
    assert status == 1
    assert found["model"]["level"] == "error"
    assert said in found["model"]["found"]


def test_heads_that_cannot_be_cut_are_an_error(llama: Path) -> None:
    assert doctor("--model", llama, "--tensor-parallel-size", 4)[0] == 0, "two ranks have the same head"
    status, found = doctor("--model", llama, "--tensor-parallel-size", 3)
    assert status == 1
    assert "2 heads cannot be cut for 3 ranks" in found["tensor parallelism"]["found"]


def test_weights_are_named_as_the_engine_will_name_them(tmp_path: Path, llama: Path) -> None:
    assert "digest of their files, 7 B" in doctor("--model", llama)[1]["weights"]["found"]
    assert "given:mine" in doctor("--model", llama, engine={"weights_id": "mine"})[1]["weights"]["found"]
    home, commit = tmp_path / "hub" / "models--org--name", "ab" * 20
    snapshot = saved(home / "snapshots" / commit)
    (home / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(home / "blobs" / "x")
    (snapshot / "model.safetensors").symlink_to(home / "blobs" / "x")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    assert f"hub:{commit}" in doctor("--model", "org/name")[1]["weights"]["found"]


# -- an engine that runs --------------------------------------------------------------------------------------

WORKING = """# HELP vllm:kvtide_loads_total Prefixes
vllm:kvtide_loads_total{engine="0"} 3.0
vllm:kvtide_loads_total{engine="1"} 4.0
vllm:kvtide_stores_total{engine="0"} 1e+01
vllm:prompt_tokens_total{engine="0"} 90000.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 50000.0
vllm:request_prefill_time_seconds_sum{engine="0"} 100.0
vllm:cache_config_info{block_size="128",cache_dtype="fp8",kv_cache_dtype_skip_layers="[]",num_gpu_blocks="64"} 1.0
"""


def test_a_running_engine_tells_its_version_flags_and_speed(llama: Path) -> None:
    with answering(WORKING) as url:
        status, found = doctor("--model", llama, "--url", url, "--disk-speed", "1GB", engine={"store": "through"})
    assert status == 0
    assert found["vLLM"] == {"level": "ok", "about": "vLLM", "found": "0.32.0", "do": ""}
    assert found["connector"]["found"] == "7 loads and 10 stores so far"
    assert "float8" in found["layout"]["found"]
    assert "(500 tokens a second" in found["gain"]["found"]
    assert found["store"]["found"] == "through, as set"


@pytest.mark.parametrize(
    ("metrics", "about", "level", "said"),
    [
        ("vllm:prompt_tokens_total 5.0\n", "connector", "error", "runs without kvtide"),
        ("vllm:kvtide_loads_total 0.0\nvllm:prompt_tokens_total 9e4\n", "connector", "warning", "nothing was loaded"),
        (WORKING + "vllm:kvtide_failed_total 2.0\n", "failures", "warning", "2 loads failed"),
        (WORKING.replace('"[]"', '"[1, 2]"'), "flags", "error", "[1, 2]"),
        (
            WORKING.replace('num_gpu_blocks="64"', 'num_gpu_blocks="6400"'),
            "store",
            "warning",
            "only what is used again",
        ),
    ],
)
def test_what_a_running_engine_has_wrong(llama: Path, metrics: str, about: str, level: str, said: str) -> None:
    with answering(metrics) as url:
        status, found = doctor("--model", llama, "--url", url)
    assert found[about]["level"] == level
    assert said in found[about]["found"]
    assert status == (level == "error")


def _greet(server: socket.socket) -> None:
    """As something does that is no engine."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"SSH-2.0-OpenSSH\r\n")


def test_an_untested_version_and_an_engine_that_is_not_there(llama: Path) -> None:
    with answering(WORKING, "0.9.1") as url:
        assert doctor("--model", llama, "--url", url)[1]["vLLM"]["level"] == "warning"
    status, found = doctor("--model", llama, "--url", url)
    assert (status, found["engine"]["level"]) == (1, "error")
    assert f"no vLLM answers at {url}" in found["engine"]["found"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = threading.Thread(target=_greet, args=(server,))
        other.start()
        for url in (f"http://127.0.0.1:{server.getsockname()[1]}", "http://localhost:abc"):
            assert doctor("--model", llama, "--url", url)[1]["engine"]["level"] == "error"
        other.join()


def test_a_speed_needs_enough_tokens_to_be_known() -> None:
    figures = {"vllm:request_prefill_kv_computed_tokens_sum": 100.0, "vllm:request_prefill_time_seconds_sum": 1.0}
    assert Running("0.32.0", figures).prefill is None
    assert Running("0.32.0", {name: 100 * value for name, value in figures.items()}).prefill == 100


# -- what there is to gain ------------------------------------------------------------------------------------


@given(speed=st.floats(1e3, 1e11), prefill=st.floats(1, 1e6))
def test_it_says_that_loading_pays_only_where_it_does(speed: float, prefill: float) -> None:
    layout = Layout.attention(layers=4, heads=2, head_dim=64)
    (found,) = gain.check(layout, speed, prefill)
    load, compute = model.nbytes(layout, 4096) / speed, 4096 / prefill
    assert ("will compute instead" in found.found) == (compute < load)
    assert (found.level is Level.OK) == (compute >= 1.5 * load)


def test_without_a_speed_it_says_at_which_one_they_are_even(llama: Path) -> None:
    found = doctor("--model", llama, "--disk-speed", 2048 * 7000)[1]["gain"]
    assert "faster than an engine that computes fewer than 7,000 tokens a second" in found["found"]
    known = doctor("--model", llama, "--disk-speed", 2048 * 7000, "--prefill-tokens-per-second", 700)[1]["gain"]
    assert "4,096 tokens are 8 MiB: 585 ms from this disk against 5.85 s computing" in known["found"]
    assert known["found"].endswith("10.0 times as fast")


# -- the host -------------------------------------------------------------------------------------------------


def test_more_dram_than_there_is_is_an_error(llama: Path) -> None:
    status, found = doctor("--model", llama, dram={"budget": "4PB"})
    assert (status, found["DRAM"]["level"]) == (1, "error")


def machine(root: Path, groups: str, **files: str) -> Path:
    """What the kernel says of a machine with 8 GiB free, in control groups."""
    for name, text in {"proc/meminfo": f"MemAvailable: {8 << 20} kB\n", "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(place: str, limit: str, used: int, names: tuple[str, str, str]) -> dict[str, str]:
    values = (limit, str(used), f"anon 1\n{names[2]} 100\n")
    return {f"sys/fs/cgroup/{place}{n}": v for n, v in zip((*names[:2], "memory.stat"), values, strict=True)}


NEW = ("memory.max", "memory.current", "inactive_file")
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_the_tightest_control_group_limits_memory(tmp_path: Path) -> None:
    assert host.available(machine(tmp_path / "none", "")) == (8 << 30, "free on this machine")
    new = {**group("a/b/", "max", 500, NEW), **group("a/", "1000", 300, NEW), **group("", "5000", 300, NEW)}
    assert host.available(machine(tmp_path / "new", "0::/a/b\n", **new))[0] == 1000 - (300 - 100)
    old = group("memory/", "1000", 300, OLD)
    assert host.available(machine(tmp_path / "old", "5:cpu:/\n4:memory:/\n", **old))[0] == 800
    wide = group("", str(1 << 40), 300, NEW)
    assert host.available(machine(tmp_path / "wide", "0::/\n", **wide))[0] == 8 << 30


def test_more_ranks_need_shared_memory_of_vllms_own(llama: Path) -> None:
    assert "/dev/shm" not in doctor("--model", llama)[1]
    assert "/dev/shm" in doctor("--model", llama, "--tensor-parallel-size", 2)[1]


# -- the disk -------------------------------------------------------------------------------------------------


def test_without_a_disk_it_says_so(llama: Path) -> None:
    assert doctor("--model", llama)[1]["disk"]["do"] == "set nvme.path"


def test_a_folder_that_cannot_be_used_is_an_error(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "kvtide.json").write_text('{"format": "kvtide nvme", "version": 99}')
    for path, said in (
        ("/proc/kvtide", "/proc"),
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "full", "not kvtide's"),
        (newer, "format 99"),
    ):
        status, found = doctor("--model", llama, "--disk-speed", "1GB", nvme={"path": str(path)})
        assert (status, found["disk"]["level"]) == (1, "error")
        assert said in found["disk"]["found"]


def test_a_budget_beyond_the_disk_is_an_error_but_what_a_tier_has_is_its_own(llama: Path, tmp_path: Path) -> None:
    status, found = doctor(
        "--model", llama, "--disk-speed", "1GB", nvme={"path": str(tmp_path / "kv"), "budget": "4PB"}
    )
    assert (status, found["disk space"]["level"]) == (1, "error")
    tier = tmp_path / "tier"
    nvme = {"path": str(tier), "budget": "16MiB", "segment": "8MiB"}
    kvtide.open(nvme=nvme, dram=SMALL["dram"]).close()
    before = sorted(tier.iterdir())
    assert doctor("--model", llama, nvme=nvme)[0] == 0
    assert sorted(tier.iterdir()) == before


def test_a_disk_in_memory_is_no_disk() -> None:
    found = {f.about: f for f in disk.check(configuration.read(env={}, nvme={"path": "/dev/shm/kvtide-none"}).nvme)}
    assert "tmpfs, which is memory" in found["disk"].found


# -- the node -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("node"))
    yield process
    process.stop()


def test_a_node_that_answers_and_one_that_does_not(llama: Path, served: Process, tmp_path: Path) -> None:
    status, found = doctor("--model", llama, engine={"address": f"unix:{served.path}"})
    assert status == 0
    assert f"process {served.process.pid} answers" in found["node"]["found"]
    assert "memfd" not in found, "the node has its memory already"
    assert "the node has read nothing yet" in found["disk speed"]["found"]
    gone = tmp_path / "none.sock"
    status, found = doctor("--model", llama, engine={"address": f"unix:{gone}"})
    assert (status, found["node"]["level"]) == (1, "error")
    assert f"start it with: kvtide node --socket {gone}" in found["node"]["do"]


def test_a_runtime_folder_that_is_not_there_is_an_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    status, found = doctor("--model", llama)
    assert (status, found["node"]["level"]) == (1, "error")
    assert "set XDG_RUNTIME_DIR" in found["node"]["found"]


def test_an_engine_that_wants_all_on_a_disk_that_is_the_nodes(llama: Path, served: Process) -> None:
    address = f"unix:{served.path}"
    found = doctor("--model", llama, engine={"address": address, "store": "through"})[1]
    assert 'nvme.store = "through"' in found["store"]["do"]


def test_engines_that_should_share_and_do_not(llama: Path, served: Process) -> None:
    layout = Layout.attention(layers=4, heads=2, head_dim=64)
    half = Layout((replace(layout.groups[0], dtype="float16"),))
    one, other = kvtide.Model(layout, "given:one"), kvtide.Model(layout, "given:other")

    def said(*models: kvtide.Model, tenant: Tenant | None = None) -> list[str]:
        with Client(served.path) as client:
            sessions = [client.session(m, tenant) if tenant else client.session(m) for m in models]
            for session in sessions:
                session.match(range(256)).release()  # a session is opened by its first request
            status = client.status()
            for session in sessions:
                session.close()
        return [f"{f.level.value} {f.found}" for f in node.sharing(status, layout)]

    (nobody,) = said()
    assert nobody.startswith("ok no other engine")
    (alike,) = said(one, one)
    assert alike.startswith("ok")
    assert "under one name" in alike
    (names,) = said(one, other)
    assert names.startswith("warning")
    assert "models of one shape under 2 names" in names
    (dtype,) = said(one, kvtide.Model(half, "given:one"))
    assert "KV of this shape in float16, this engine bfloat16" in dtype
    (unlike,) = said(kvtide.Model(Layout.attention(layers=5, heads=2, head_dim=64), "given:one"))
    assert unlike == nobody
    assert said(one, other, tenant=Tenant("a", bytes(32))) == [nobody], "of tenants nothing is told"


def test_the_dtype_of_a_running_engine_is_that_of_its_requests_at_the_node(llama: Path, served: Process) -> None:
    layout = Layout.attention(layers=4, heads=2, head_dim=64, dtype="float32")
    address = f"unix:{served.path}"
    with Client(served.path) as client, client.session(kvtide.Model(layout, "given:one")) as session:
        session.match(range(256)).release()
        with answering(WORKING.replace('cache_dtype="fp8"', 'cache_dtype="auto"')) as url:
            found = doctor("--model", llama, "--url", url, engine={"address": address})[1]
            told = doctor("--model", llama, "--url", url, "--dtype", "float16", engine={"address": address})[1]
    assert found["namespaces"]["level"] == "ok", found["namespaces"]
    assert "in float32, this engine float16" in told["namespaces"]["found"], "what the user says stands"


@apart
def test_a_node_that_cannot_see_its_clients(llama: Path, tmp_path: Path) -> None:
    hidden = Apart(tmp_path)
    try:
        status, found = doctor("--model", llama, engine={"address": f"unix:{hidden.path}"})
    finally:
        hidden.kill()
    assert (status, found["node"]["level"]) == (1, "error")
    assert "hostPID" in found["node"]["found"]


def test_a_node_that_engines_started_is_found(tmp_path: Path) -> None:
    nvme = {"path": str(tmp_path / "kv"), "budget": "64MiB", "segment": "8MiB"}
    config = configuration.read(env={}, dram=SMALL["dram"], nvme=nvme, engine={"store": "through"})
    status, found = node.ask(config)
    assert (status, found.level) == (None, Level.OK)
    with open_node(config, idle=0.2) as client:
        status, found = node.ask(config)
        assert status is not None
        assert status.node.pid == client.status().node.pid
    eventually(lambda: not client.path.exists())
