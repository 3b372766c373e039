"""Ends that must be reached though the caller is interrupted on the way: by Ctrl-C, or a signal handler that raises."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["to_the_end"]


def to_the_end(call: Callable[[], object]) -> None:
    """Make a call that may be repeated. If it is interrupted it is made once more, and then the interruption raised."""
    try:
        call()
    except BaseException:
        call()
        raise
