"""Completes operations although the caller is interrupted: by Ctrl-C, or a signal handler that raises."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["again_if_interrupted"]


def again_if_interrupted(call: Callable[[], object]) -> None:
    """Make a call that may be repeated. If it is interrupted, it is made once more, and then the interruption is
    raised."""
    try:
        call()
    except BaseException:
        call()
        raise
