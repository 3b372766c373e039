"""What operators read of shared storage names it, and the reason, without the internals of Python."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.tiers.counters import TierCounters
from kvtide.tiers.format.encryption import OPEN
from kvtide.tiers.shared.blobs import reason_of
from kvtide.tiers.shared.budget import BudgetCoordinator, CoordinationBlobs
from kvtide.tiers.shared.credits import BudgetThread
from kvtide.tiers.shared.drop_log import DropLog, DropLogReader
from kvtide.tiers.shared.files import Files
from kvtide.tiers.shared.mooncake_client import parse_address


class BrokenFiles(Files):
    """A folder that may not be read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked = threading.Event()

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        self.asked.set()
        raise PermissionError(errno.EACCES, "Permission denied", str(self))


def drop_log(blobs: Files) -> DropLogReader:
    return DropLogReader(DropLog(blobs, 1.0, OPEN), 60.0)


def budget(blobs: Files) -> BudgetThread:
    coordination = CoordinationBlobs(blobs, 60.0)
    return BudgetThread(coordination, BudgetCoordinator(coordination, 1 << 30))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (drop_log, "the files in {}: cannot read what others have dropped: Permission denied. After"),
        (budget, "the byte budget of the files in {} cannot be kept: Permission denied; nothing is stored there"),
    ],
)
def test_a_thread_that_cannot_use_the_storage_says_which_and_why(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Files], DropLogReader | BudgetThread],
    text: str,
) -> None:
    blobs = BrokenFiles(tmp_path)
    with caplog.at_level("WARNING", "kvtide"):
        thread = make(blobs)
        thread.start()
        assert blobs.asked.wait(60)
        thread.close(60) if isinstance(thread, DropLogReader) else thread.close()
    (message,) = caplog.messages
    assert message.startswith(text.format(tmp_path))
    assert "Check that this node may" in message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/shared/x"), "No space left on device"),
        (TimeoutError("timed out"), "timed out"),
        (ValueError("that is no page"), "that is no page"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_reason_has_neither_number_nor_class(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_an_error_without_a_number_is_counted_with_its_text() -> None:
    counters = TierCounters()
    counters.failed("read", TimeoutError("timed out"))
    assert dict(counters.reasons) == {"read: timed out": 1}


@pytest.mark.parametrize("url", ["mooncake://host:port", "mooncake://host:99999", "mooncake://host?admin=x"])
def test_an_address_of_mooncake_that_is_none_is_refused_with_what_it_must_be(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(url)
    assert str(raised.value).startswith(f"mooncake.url is {url!r}; it must be mooncake://HOST:PORT")
    assert "int" not in str(raised.value)
