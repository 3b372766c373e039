"""Bad input: each command says in plain words what is wrong with it, names the value, and ends with exit code 2."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide import cli

PYTHON = re.compile(
    r"Traceback|\[Errno|invalid literal|could not convert|NoneType|Exception|codec can't decode|<class|object of type|"
    r"positional argument|\bb'|PosixPath|is not a valid (float|integer)|"
    r"Input should be|unable to parse|Value error|Error\("
)
"""Phrases of Python, which tell a user nothing."""

CASES = """
nonsense
config --nonsense
config --config missing.toml
config --config folder
config --config not.toml
config --config binary
config --config unknown-section.toml
config --config unknown-setting.toml
config --config negative.toml
config --config nonsense-size.toml
config --config wrong-type.toml
config --config section-is-a-number.toml
config --config trailing.toml extra
config --explain --minimal
node --config missing.toml
node --config negative.toml
node --socket missing/node.sock
node --socket folder
node --socket file
node --socket long-socket
node --http nonsense
node --http 127.0.0.1:nonsense
node --http 127.0.0.1:99999
node --http 127.0.0.1:-1
node --record missing/file
node --record-limit -1
node --record-limit nonsense
node --stop-seconds -1
node --stop-seconds nonsense
node --stop-seconds nan
node --stop-seconds 1e20
node --idle-seconds -1
node --idle-seconds inf
node --socket https://host:9410
cluster missing.sock
cluster folder
cluster https://host:9410
cluster missing.sock --every 0
cluster missing.sock --config missing.toml
drain missing.sock
drain folder
drain https://host:9410
stop missing.sock
stop folder
stop file
stop missing/node.sock
stop file/node.sock
stop long-socket
stop https://host:9410
status missing.sock
status folder
status file
status long-socket
status missing.sock --every 0
status missing.sock --every -1
status missing.sock --every nonsense
status http://127.0.0.1:1 --once
status https://
status ftp://nonsense --once
status http://127.0.0.1:nonsense --once
inspect missing
inspect file
inspect folder
inspect folder --blocks -1
inspect folder --blocks many
inspect folder --config missing.toml
evict
evict --budget -1 --path folder
evict --budget nonsense --path folder
evict --budget 0 --path folder
evict --budget 1GiB --path missing
evict --budget 1GiB --path file
evict --budget 1GiB --path folder --lease -1
evict --budget 1GiB --path folder --lease 0
evict --budget 1GiB --path folder --lease soon
forget
forget --tenant nonsense
forget --tenant 123
forget --tenant default
forget --tenant default --config audited.toml --node nonsense
forget --tenant default --config audited.toml --node https://host:nonsense
hold --tenant default
hold --tenant nonsense
hold --tenant default --config audited.toml
keys list
keys list --config keys-in-folder.toml
keys list --config keys-not-ours.toml
keys rotate --config keys-in-folder.toml
keys rotate --config keys-not-ours.toml --to file:missing
keys nonsense
audit verify
audit verify missing
audit verify folder
audit nonsense
bench store nonsense
bench store --path missing
bench store --path file
bench store --json missing/file
bench store --json folder
bench overlap --tokens -1
bench overlap --tokens nonsense
bench overlap --disk -1
bench overlap --disk nonsense
doctor vllm
doctor vllm --model folder --tensor-parallel-size -1
doctor vllm --model folder --disk-speed fast
doctor vllm --model folder --prefill-tokens-per-second -1
doctor node missing.sock
doctor node folder
doctor node file
doctor node long-socket
doctor node missing.sock --record missing
doctor node missing.sock --disk missing
doctor node missing.sock --time -1
doctor node missing.sock --time nonsense
doctor node missing.sock --prefill-tokens-per-second nonsense
doctor node https://host:nonsense
doctor node missing.sock --config missing.toml
explain
explain --request last --tokens file
explain --tokens missing --node missing.sock
explain --text file --node missing.sock
explain --tokens file --tokenizer folder
explain --request last --node missing.sock
explain --request last --node folder
explain --request last --node file
explain --request last --node long-socket
explain --request last --node https://host:9410
explain --tokens file --secret missing --node missing.sock
explain --tokens file --prefill-tokens-per-second -1
explain --tokens file --prefill-tokens-per-second nonsense
plan
plan nonsense
plan folder
plan file
plan binary
plan llama-3.1-8b --gpu nonsense
plan llama-3.1-8b --gpus -1
plan llama-3.1-8b --gpus many
plan llama-3.1-8b --context -1
plan llama-3.1-8b --context nonsense
plan llama-3.1-8b --users -1
plan llama-3.1-8b --hit-rate 2
plan llama-3.1-8b --hit-rate nonsense
plan llama-3.1-8b --target -1
plan llama-3.1-8b --target soon
plan llama-3.1-8b --at-once 0
plan llama-3.1-8b --dram -1
plan llama-3.1-8b --nvme nonsense
plan llama-3.1-8b --nvme-speed fast
plan llama-3.1-8b --bus nonsense
plan llama-3.1-8b --network nonsense
plan llama-3.1-8b --drives 0
plan llama-3.1-8b --matmul 0
plan llama-3.1-8b --attention -1
plan llama-3.1-8b --gpu-price -1
plan llama-3.1-8b --prefill-cost nonsense
plan llama-3.1-8b --prefill-cost 1e-5,-1
plan llama-3.1-8b --prefill-cost 1e-5,nan
plan llama-3.1-8b --prefill-tokens-per-second 0
plan llama-3.1-8b --block-tokens 0
plan llama-3.1-8b --measure --disk missing
plan llama-3.1-8b --trace missing --hit-rate 0.5
plan llama-3.1-8b --trace trace.jsonl
plan llama-3.1-8b --plot folder
plan llama-3.1-8b --kv-cache-dtype nonsense
replay
replay missing
replay folder
replay file
replay binary
replay trace.jsonl --dram -1
replay trace.jsonl --dram nonsense
replay trace.jsonl --dram -5%
replay trace.jsonl --nvme 0%
replay trace.jsonl --policy nonsense
replay trace.jsonl --warm -1
replay trace.jsonl --warm 100
replay trace.jsonl --block-tokens 0
replay trace.jsonl --warm nonsense
replay trace.jsonl --block -1
replay trace.jsonl --block-tokens -1
replay trace.jsonl --block-tokens nonsense
replay trace.jsonl --model missing --block-tokens 16
replay trace.jsonl --json missing/file
replay trace.jsonl --plot folder
replay trace.jsonl --disk missing
replay trace.jsonl --config missing.toml
serve missing --port -1
serve missing --port nonsense
serve missing --config missing.toml
serve missing --dtype nonsense
serve missing --max-tokens-limit 0
serve missing --store missing.sock --config missing.toml
serve missing --waiting -1
serve missing --stop-seconds nonsense
demo --tokens -1
demo --tokens nonsense
demo --seconds inf
demo --engine nonsense
node --socket .
stop .
demo --new-tokens 0
demo --path missing
""".strip().splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    (path / "folder").mkdir()
    (path / "file").write_text("nothing of interest\n")
    (path / "binary").write_bytes(bytes(range(256)))
    key_file = '[security]\nkey_source = "env:KVTIDE_NONE"\nkey_file'
    files = {
        "not.toml": "this is = = not toml",
        "unknown-section.toml": "[drm]\nbudget = 1",
        "unknown-setting.toml": "[dram]\nbudgt = 1",
        "negative.toml": "[dram]\nbudget = -1",
        "nonsense-size.toml": '[dram]\nbudget = "many"',
        "wrong-type.toml": "[dram]\nbudget = [1]",
        "section-is-a-number.toml": "dram = 5",
        "trailing.toml": "",
        "audited.toml": f'[security]\naudit = "{path}/audit.jsonl"',
        "keys-in-folder.toml": f'{key_file} = "{path}/folder"\naudit = "{path}/audit.jsonl"',
        "keys-not-ours.toml": f'{key_file} = "{path}/file"\naudit = "{path}/audit.jsonl"',
        "trace.jsonl": '{"hash_ids": [1, 2, 3], "input_length": 1536, "output_length": 1, "timestamp": 0}\n' * 3,
    }
    for name, text in files.items():
        (path / name).write_text(text)
    return path


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    for name in list(os.environ):
        if name.startswith("KVTIDE_"):
            monkeypatch.delenv(name)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.mark.parametrize("command", CASES)
def test_it_says_what_is_wrong(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = command.replace("long-socket", "x" * 120).split()
    monkeypatch.setattr(sys, "argv", ["kvtide", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capfd.readouterr().err
    assert ended.value.code == 2, said
    assert said.strip()
    assert not PYTHON.search(said), said
