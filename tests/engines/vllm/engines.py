"""A real vLLM behind its own HTTP interface, on this machine's processor, to test with.

Threads are bound to one core: vLLM chooses their number by whether it has a connector, and sums of floats depend on it.
Requests one after another are then deterministic; several at once are not, with or without a connector.

``terminate`` asks the server to go, as an operator does; ``kill`` takes the whole process group at once. A node that an
engine started is not in that group, and outlives both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.node.serving import eventually

__all__ = ["Answer", "Engine", "engine"]

START_SECONDS = 300
"""An engine starts in about half a minute on an idle core, for each of its ranks."""


class Answer(NamedTuple):
    """What an engine generated."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Tokens of the prompt that were not computed for it."""
    reason: str
    """Why it ended: "length", "stop", "error"."""
    body: dict[str, Any]


class Engine:
    """An engine that answers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False)

    def complete(self, prompt: Sequence[int], max_tokens: int = 8, **extra: Any) -> Answer:
        """Continue a prompt of token ids, greedily. ``extra`` are fields of the request."""
        asked = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
        asked |= {"return_token_ids": True, "ignore_eos": True, **extra}
        found = self._post("/v1/completions", json=asked).json()
        choice, usage = found["choices"][0], found["usage"]
        return Answer(
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            choice["finish_reason"],
            found,
        )

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own cache, and not the connector's. The engine refuses while a request or the connector
        has pages, and keeps all it has: a hit could then be of its own cache. It is asked until it has done it."""
        eventually(lambda: self._post("/reset_prefix_cache").json()["success"])

    def metrics(self) -> dict[str, float]:
        """The engine's figures by name, those with labels summed up."""
        response = self._client.get("/metrics")
        response.raise_for_status()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> None:
        """Until it answers. Raises RuntimeError with its log if it does not."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health", timeout=5).is_success:
                    return
            try:
                code = self.process.wait(0.25)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                code = None
            said = "ended with " + str(code) if code is not None else f"did not answer in {seconds} s"
            raise RuntimeError(f"the engine {said}; its log ends:\n{self.logged()[-6000:]}")

    def terminate(self) -> None:
        """Ask it to stop, and wait until it has."""
        self.process.terminate()
        self.process.wait(60)

    def kill(self) -> None:
        """End all its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def close(self) -> None:
        self.kill()
        self._client.close()

    def _post(self, path: str, **how: Any) -> httpx.Response:
        response = self._client.post(path, **how)
        if not response.is_success:
            raise RuntimeError(f"{path} answered {response.status_code}: {response.text[:2000]}")
        return response


@contextlib.contextmanager
def engine(
    model: Path,
    log: Path,
    connector: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float32",
    max_model_len: int = 4096,
    cache_gib: float = 1,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """Start an engine and wait until it answers; it is killed at the end. ``connector`` is vLLM's kv-transfer-config.

    ``float32`` runs everywhere, and cold answers are as warm ones; ``bfloat16`` needs a processor that has it.
    If the body fails, the end of the engine's log is added to what is raised.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len", str(max_model_len)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", *options]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    ranks = int(options[options.index("--tensor-parallel-size") + 1]) if "--tensor-parallel-size" in options else 1
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(i % (os.cpu_count() or 1)) for i in range(ranks)),
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | settings | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, to kill as one
        )
    running = Engine(process, port, log)
    try:
        running.wait(START_SECONDS * ranks)
        yield running
    except BaseException as error:
        error.add_note(f"the engine's log ends:\n{running.logged()[-6000:]}")
        raise
    finally:
        running.close()
