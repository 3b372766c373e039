"""Runs a peer's driver in the peer's own environment and asks it for measurements."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import environments

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 5.0
STDERR_TAIL_BYTES = 4000
# No telemetry, no log lines in the timed parts, the same hashes in every run, and no torch threads
# that spin after a copy and so charge their CPU time to what comes next.
VARIABLES = {
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
    "OMP_WAIT_POLICY": "passive",
}


class PeerError(RuntimeError):
    """The peer answered a request with an error; it can be asked again."""


class PeerGoneError(RuntimeError):
    """The peer ended or did not answer in time, and has been killed."""


class Peer:
    """A running driver of the peer ``name`` (a key of ``environments.ENVIRONMENTS``)."""

    def __init__(self, name: str, variables: Mapping[str, str] | None = None, *, driver: str = "") -> None:
        """``variables`` go into the driver's environment, over the ones in ``VARIABLES``; ``driver`` is another one
        than ``name``'s first."""
        self.name = name
        python = environments.build(name)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name(f"{driver or name}_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **VARIABLES, **(variables or {})},
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.version = str(self._next(START_TIMEOUT_S)["version"])

    def ask(self, *, timeout: float = 600.0, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises ``PeerError`` if the peer reports a failure and ``PeerGoneError`` if it is not there.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._gone("has ended") from error
        answer = self._next(timeout)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the driver: ask it to leave by closing its stdin, and kill it if it stays."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._gone(f"did not answer within {timeout:g} s") from None
        if line is None:
            raise self._gone("ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self, how: str) -> PeerGoneError:
        self._process.kill()
        self._process.wait()
        if self._stderr.closed:
            return PeerGoneError(f"{self.name} {how}")
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL_BYTES))
        said = self._stderr.read().decode(errors="replace")
        return PeerGoneError(f"{self.name} {how}; the end of its stderr:\n{said}")
