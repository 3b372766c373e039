"""Shows what ``kvtide demo`` does: live in a terminal; elsewhere a line for each step, and one every few seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

__all__ = ["DemoProgress"]

_EVERY = 4.0
"""Seconds after which a line is printed although nothing has changed, where there is no terminal."""


class DemoProgress:
    """The step that is under way, and the time since the start. Use it in a ``with``.

    A thread of its own does the printing that is due by the clock, so a step may block for as long as it likes.
    """

    def __init__(self, console: Console, every: float = _EVERY) -> None:
        self.started = time.monotonic()
        self._console = console
        self._every = every
        self._step = ""
        self._since = self.started
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._tick, name="kvtide-demo-progress", daemon=True)
        self._status = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if self._status is not None and kind is None:
                self._finish_step()
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if self._status is not None:
            self._status.stop()

    def step(self, text: str) -> None:
        """Another step begins."""
        with self._changed:
            if self._status is not None:
                self._finish_step()
            self._step, self._since = text, time.monotonic()
            self._show()
            self._changed.notify()

    def note(self, text: str) -> None:
        """Print a line about the step that is under way."""
        with self._changed:
            self._print(text)

    def _tick(self) -> None:
        with self._changed, contextlib.suppress(OSError):  # the reader of our output has gone
            while not self._ended:
                if not self._changed.wait(self._every if self._status is None else 0.5) and self._step:
                    self._show()

    def _show(self) -> None:
        took = time.monotonic() - self._since
        text = f"{self._step} ({took:.0f} s)" if took >= 1 else self._step
        if self._status is None:
            self._print(text)
        else:
            self._status.update(f"[dim]{self._clock()}[/dim] {escape(text)}")

    def _finish_step(self) -> None:
        """Leave a line about the step that ends, above the one that is live."""
        if self._step:
            self._print(f"{self._step} ({time.monotonic() - self._since:.1f} s)")

    def _print(self, text: str) -> None:
        self._console.print(f"{self._clock()} {text}", markup=False, soft_wrap=True)
        self._console.file.flush()

    def _clock(self) -> str:
        return f"[{time.monotonic() - self.started:4.0f} s]"
