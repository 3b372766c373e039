"""The audit log: nothing in it can be changed unseen, and a crash in the middle of a line costs that line alone."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from kvtide.errors import AuditError
from kvtide.security.audit import Audit, verify
from kvtide.testing.clock import FakeClock


def written(path: Path, lines: int = 4, largest: int = 1 << 20) -> Audit:
    log = Audit(path, clock=FakeClock(), largest=largest)
    for i in range(lines):
        log.record("forget", f"done: {i} blocks", "somebody", tenant="ab" * 16)
    return log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_a_user_without_a_name_is_written_down_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed() -> str:
        raise KeyError("getpwuid(): uid not found: 1000700000")

    monkeypatch.setattr("getpass.getuser", unnamed)
    Audit(path, clock=FakeClock()).record("hold", "held", tenant="cd" * 16)
    assert f"({os.getuid()}) on " in json.loads(path.read_text())["who"]


def test_it_says_who_did_what_when_and_what_came_of_it(path: Path) -> None:
    Audit(path, clock=FakeClock()).record("hold", "held", tenant="cd" * 16, why="case 17")
    found = json.loads(path.read_text())
    assert found["when"] == "2023-11-14T22:13:20.000+00:00"
    assert {k: found[k] for k in ("what", "result", "tenant", "why")} == {
        "what": "hold",
        "result": "held",
        "tenant": "cd" * 16,
        "why": "case 17",
    }
    assert found["who"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert (verify(path).lines, verify(path).last) == (1, found["hash"])


def test_every_change_of_a_byte_is_found(path: Path) -> None:
    written(path, lines=3)
    good = path.read_bytes()
    assert verify(path).problem == ""
    for i in range(len(good)):
        for change in (1, 2, 0x20, 0x80):
            path.write_bytes(good[:i] + bytes([good[i] ^ change]) + good[i + 1 :])
            assert verify(path).problem, f"byte {i} of {good!r}"


def test_lines_cannot_be_left_out_put_in_doubled_or_moved(path: Path) -> None:
    written(path)
    a, b, c, d = path.read_bytes().splitlines(keepends=True)
    for forged in ([b, c, d], [a, c, d], [a, b, b, c, d], [a, c, b, d], [a, b, b"{}\n", c, d], [a, b, b"\n", c, d]):
        path.write_bytes(b"".join(forged))
        assert "line" in verify(path).problem
    path.write_bytes(a + b)  # a chain cannot show that its end is gone: the last hash does
    assert verify(path).problem == ""
    assert verify(path).last in b.decode()


def test_a_torn_last_line_is_taken_away_and_that_is_said(path: Path) -> None:
    log = written(path)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert "torn" in verify(path).problem
        log.record("hold", "held")
        assert verify(path).problem == ""
        *_, mended, new = map(json.loads, path.read_text().splitlines())
        assert (mended["what"], mended["torn"], new["what"]) == ("audit", cut - last, "hold")
        assert verify(path).lines == 5


def test_a_full_file_is_put_aside_and_the_chain_goes_on(path: Path) -> None:
    log = written(path, lines=20, largest=600)
    old = sorted(path.parent.glob("audit.jsonl.0*"))
    assert len(old) > 3
    assert verify(path).lines == 20
    assert verify(path).problem == ""
    log.record("hold", "held")
    assert verify(path).lines == 21
    old[1].unlink()
    assert verify(path).problem


def test_nothing_is_written_over_when_the_oldest_were_taken_elsewhere(path: Path) -> None:
    log = written(path, lines=20, largest=600)
    old = sorted(path.parent.glob("audit.jsonl.0*"))
    old[0].unlink()
    kept = {file: file.read_bytes() for file in old[1:]}
    for _ in range(20):
        log.record("hold", "held")
    assert len(list(path.parent.glob("audit.jsonl.0*"))) > len(kept) + 3
    assert all(file.read_bytes() == data for file, data in kept.items())


def test_many_may_write_at_once(path: Path) -> None:
    logs = [Audit(path, largest=2000) for _ in range(4)]
    threads = [threading.Thread(target=lambda log=log: [log.record("hold", "held") for _ in range(10)]) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (verify(path).lines, verify(path).problem) == (40, "")


def test_what_cannot_be_written_down_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditError, match="cannot write the audit log"):
        Audit(tmp_path / "file" / "audit.jsonl").record("hold", "held")
    with pytest.raises(AuditError, match="no audit log"):
        verify(tmp_path / "none.jsonl")
