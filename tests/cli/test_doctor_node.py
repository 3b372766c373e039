"""``kvtide doctor node``: what it says about a real node that records, or does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide import cli
from kvtide.errors import AccessError, ConfigError, TierError, TraceError
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt
from tests.cli.test_doctor import doctor as doctor_vllm
from tests.cli.test_doctor import saved
from tests.doctor.recorded import users
from tests.node.serving import Process, eventually

REQUESTS = 300
TOKEN = "A-token-that-may-read-0123456789"


def drive(node: Process, requests: int) -> None:
    """Users who come back to a node that has too little memory for them; wait until all of it is recorded."""
    with Client(node.path) as client, client.session(MODEL) as session:
        for blocks, _ in users(30, requests):
            tokens = prompt(*blocks)
            with session.match(tokens, prefill=1000.0) as match:
                found = session.load(match).wait(60).tokens // SIZE
                session.store(tokens, data(PLAIN, tokens)[found:], start=found)

        def recorded() -> bool:
            recorder = client.statistics().recorder
            return recorder is None or recorder.requests == requests

        eventually(recorded)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("recording")
    (folder / "tokens").write_text(f"prometheus read {TOKEN}\n")
    (folder / "tokens").chmod(0o600)
    node = Process(
        folder,
        KVTIDE_DRAM_BUDGET="1MiB",
        KVTIDE_DRAM_SEGMENT="1MiB",
        KVTIDE_NVME_PATH="",
        KVTIDE_RECORD_PATH=str(folder / "traffic.jsonl.gz"),
        KVTIDE_NODE_HTTP="127.0.0.1:0",
        KVTIDE_NODE_TOKENS=f"file:{folder / 'tokens'}",
    )
    drive(node, REQUESTS)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    node = Process(tmp_path_factory.mktemp("silent"))
    yield node
    node.stop()


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("KVTIDE_CONFIG", raising=False)


def run(*arguments: object, **environment: str) -> str:
    command = ["doctor", "node", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, command, env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_ends_with_the_changes_that_bring_most(recording: Process) -> None:
    lines = run(recording.path).splitlines()
    (about,) = [line for line in lines if line.startswith("ok      recording")]
    assert f"{REQUESTS} requests" in about
    changes = [line for line in lines if re.match(r"warning change \d", line)]
    assert 1 <= len(changes) <= 3
    assert any("Set dram.budget = " in line and "(now 1 MiB)" in line for line in changes)
    for line in changes:
        assert "s of prefill saved an hour (± " in line
        assert "points of the tokens (± " in line
        assert "costs " in line


def test_the_same_as_json(recording: Process) -> None:
    found = json.loads(run(f"unix:{recording.path}", "--json", "--time", "0s"))
    assert found["findings"] == []
    advice = found["advice"]
    assert advice["requests"] <= REQUESTS
    assert advice["prefill"] == {"per_token": 0.001, "per_token_context": 0.0}
    assert 0 < advice["hit_rate"] < advice["unlimited"] < 1
    assert advice["changes"] == []
    assert "dram.budget = 2 MiB" in advice["not_tried"]


def test_a_node_that_records_nothing_says_how_to(silent: Process) -> None:
    text = run(silent.path)
    assert "no requests are recorded at this node" in text
    assert f"kvtide node --socket {silent.path} --record FILE" in text
    assert json.loads(run(silent.path, "--json"))["advice"]["result"] == "not recorded"


def test_a_recording_of_before_at_a_node_that_records_nothing(recording: Process, silent: Process) -> None:
    found = json.loads(run(silent.path, "--record", recording.folder / "traffic.jsonl.gz", "--json", "--time", "0s"))
    assert found["advice"]["requests"] > 0
    assert found["advice"]["prefill"] is None
    assert any("--prefill-tokens-per-second" in note for note in found["advice"]["notes"])


def test_a_node_asked_over_http(recording: Process) -> None:
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)", recording.log)[-1:]
    address = f"http://127.0.0.1:{port}"
    with pytest.raises(AccessError):
        run(address)
    with pytest.raises(ConfigError, match="copy it here, and give it with --record FILE"):
        run(address, KVTIDE_TOKEN=TOKEN)
    copied = recording.folder / "traffic.jsonl.gz"
    found = json.loads(run(address, "--record", copied, "--time", "0s", "--json", KVTIDE_TOKEN=TOKEN))
    assert found["advice"]["requests"] > 0


def test_what_is_not_there_is_an_error(recording: Process, tmp_path: Path) -> None:
    with pytest.raises(TierError, match="no node answers"):
        run(tmp_path / "none.sock")
    with pytest.raises(TraceError, match=r"nothing\.gz cannot be read"):
        run(recording.path, "--record", tmp_path / "nothing.gz")
    with pytest.raises(ConfigError, match="there is no folder"):
        run(recording.path, "--disk", tmp_path / "nowhere")


def test_the_examination_of_an_engine_ends_with_them_too(
    recording: Process, silent: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    llama = saved(tmp_path / "llama")
    address = {"address": f"unix:{recording.path}"}
    status, found = doctor_vllm("--model", llama, "--disk-speed", "1GB", "--time", "30s", engine=address)
    assert status == 0
    assert "recording" in found
    assert "dram.budget" in found["change 1"]["do"] + found.get("change 2", {"do": ""})["do"]
    other = {"address": f"unix:{silent.path}"}
    quiet = doctor_vllm("--model", llama, "--disk-speed", "1GB", engine=other)[1]
    assert not {"recording", "changes", "change 1"} & quiet.keys()
    gone = doctor_vllm("--model", llama, "--disk-speed", "1GB", "--record", recording.folder / "traffic.jsonl.gz")[1]
    assert "no node is running" in gone["changes"]["found"]
