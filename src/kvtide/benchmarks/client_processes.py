"""Several client processes that do the same task at the same time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

__all__ = ["ClientMain", "ClientProcesses"]

ClientMain = Callable[..., AbstractContextManager[Mapping[str, Callable[[], Any]]]]
"""Called with its number and the group's arguments; its context yields the tasks that it can do, by name."""


class ClientProcesses:
    """``count`` processes, each running ``client`` (a module-level function, so that it can be imported there)."""

    def __init__(self, count: int, client: ClientMain, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, client, number, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def do(self, task: str) -> list[Any]:
        """Run a task in all processes; returns their results."""
        for pipe in self._pipes:
            pipe.send(task)
        return self._answers()

    def _answers(self) -> list[Any]:
        found = [pipe.recv() for pipe in self._pipes]
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _serve(pipe: Connection, client: ClientMain, number: int, *arguments: Any) -> None:
    with client(number, *arguments) as tasks:
        pipe.send("ready")
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(tasks[task]())
            except Exception as e:  # noqa: BLE001 - it becomes the result
                pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
