"""The audit log: who did what, when, and with which result; a chain of hashes over its lines.

A line is JSON and ends in a hash: BLAKE3 of the hash of the line before and of every byte of this one up to there. So
no line can be changed, removed or inserted without making every later hash wrong. A chain cannot show that its *end*
was cut off: keep the last hash elsewhere now and then (``kvtide audit verify`` prints it).

Lines are appended and synced before an operation is acknowledged. A crash may leave half a line; the next writer
removes it, and records that in a line. When a file is full it is renamed to ``audit.jsonl.000001`` and so on, and the
chain continues in a new one.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from blake3 import blake3

from kvtide.clock import Clock, SystemClock
from kvtide.config import Security
from kvtide.errors import AuditError
from kvtide.forks import LockFile

__all__ = ["Audit", "Verdict", "audit_of", "verify"]

_START = "0" * 64
_LARGEST = 16 << 20
"""Approximate maximum bytes of a file."""
_TAIL = len(',"hash":""}') + 64

Fact = str | int | float | None


def _hash(before: str, body: bytes) -> str:
    return blake3(before.encode() + body, derive_key_context="kvtide 1 audit").hexdigest()


def _sealed(before: str, facts: dict[str, Fact]) -> tuple[bytes, str]:
    body = json.dumps(facts, separators=(",", ":")).encode()[:-1]
    found = _hash(before, body)
    return body + f',"hash":"{found}"}}\n'.encode(), found


def _opened(line: bytes, before: str) -> str:
    """The hash of a line, if it is valid and follows ``before``; else ""."""
    body, tail = line[:-_TAIL], line[-_TAIL:]
    found = _hash(before, body)
    return found if tail == f',"hash":"{found}"}}'.encode() else ""


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user id without a name, as in containers
        name = "a user without a name"
    return f"{name} ({os.getuid()}) on {socket.gethostname()}"


class Audit:
    """The log at ``path``. Safe from any thread and process."""

    def __init__(self, path: Path, *, clock: Clock | None = None, largest: int = _LARGEST) -> None:
        self.path = path
        self._clock = clock or SystemClock()
        self._largest = largest

    def record(self, what: str, result: str, who: str = "", **about: Fact) -> None:
        """Append an entry durably. Raises AuditError."""
        when = datetime.fromtimestamp(self._clock.time(), UTC).isoformat(timespec="milliseconds")
        facts: dict[str, Fact] = {"when": when, "who": who or _who(), "what": what, **about, "result": result}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with LockFile(self.path.with_name(self.path.name + ".lock")) as lock:
                lock.take(wait=True)
                self._append(facts)
        except OSError as e:
            raise AuditError(
                f"cannot write the audit log {self.path}: {e.strerror}. Nothing is done without a record"
            ) from e

    def _append(self, facts: dict[str, Fact]) -> None:
        old = self._rotated()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            data = os.pread(fd, 2 * self._largest, 0)
            whole = data.rfind(b"\n") + 1
            before = _last_hash(data[:whole] if whole else old[-1].read_bytes()) if whole or old else _START
            lines = b""
            if torn := len(data) - whole:
                mended = {"when": facts["when"], "who": "kvtide", "what": "audit", "torn": torn, "result": "taken away"}
                lines, before = _sealed(before, mended)
            os.ftruncate(fd, whole)
            lines += _sealed(before, facts)[0]
            if os.pwrite(fd, lines, whole) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _rotated(self) -> list[Path]:
        """Begin a new file if this one is full; returns the files before it."""
        old = _files(self.path)[:-1]
        if self.path.exists() and self.path.stat().st_size >= self._largest:
            number = int(old[-1].suffix[1:]) + 1 if old else 1  # the oldest may have been moved away
            old.append(self.path.with_name(f"{self.path.name}.{number:06}"))
            self.path.rename(old[-1])
        return old


def _last_hash(data: bytes) -> str:
    line = data.rstrip(b"\n").rsplit(b"\n", 1)[-1]
    return line[-66:-2].decode("ascii", "replace")


def _files(path: Path) -> list[Path]:
    """The files of a log, in order; the last is the current one."""
    old = sorted(p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdecimal())
    return [*old, path]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a log's chain."""

    lines: int
    """Lines that are whole and in their place, from the first on."""
    last: str
    """The hash of the last of them."""
    problem: str = ""
    """What is wrong, and where; empty: nothing."""


def verify(path: Path) -> Verdict:
    """Check every line of a log. Raises AuditError if there is none."""
    count, last = 0, _START
    files = [file for file in _files(path) if file.exists()]
    if not files:
        raise AuditError(f"there is no audit log at {path}")
    for file in files:
        *lines, rest = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            found = _opened(line, last)
            if not found:
                return Verdict(count, last, f"{file.name}, line {number}: it was changed, or lines before it are gone")
            count, last = count + 1, found
        if rest:
            return Verdict(count, last, f"{file.name}: its last line is torn, by a crash or a cut")
    return Verdict(count, last)


def audit_of(settings: Security, clock: Clock | None = None) -> Audit | None:
    """The log of a configuration; None if it names neither a log nor a key file."""
    if settings.audit:
        return Audit(Path(settings.audit).expanduser(), clock=clock)
    if settings.key_file:
        return Audit(Path(settings.key_file).expanduser().with_name("audit.jsonl"), clock=clock)
    return None
