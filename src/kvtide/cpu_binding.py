"""The CPUs and memory nodes on which a process or thread runs.

A process inherits three things from its parent, and a thread from the thread that starts it: the set of CPUs
(``sched_setaffinity``), the NUMA memory policy (``set_mempolicy``) and the scheduling class. Engines bind themselves to
single cores. A thread or process that works beside an engine must not inherit that: it would wait for the core that the
engine keeps busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.units import parse_cpus

__all__ = ["bind", "unbind_thread"]

_EVERY = range(8192)
"""CPU numbers: Linux supports no more. The kernel ignores those that the control group does not allow."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call, by machine."""
_MPOL_DEFAULT = 0


def unbind_thread() -> None:
    """Let this thread use all CPUs that its control group allows."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, _EVERY)


def bind(cpus: str, unbind: bool) -> None:
    """Bind this process with all its threads as ``node.cpus`` says; call it before memory is allocated.

    ``unbind``: it was started by a process whose binding is not meant for it, and uses all CPUs that its control group
    allows, the default memory policy and the default scheduling class. ``cpus`` "inherit" keeps what was inherited, and
    a list is used instead of all CPUs. Raises ConfigError if the list has CPUs that cannot be used.
    """
    if cpus == "inherit":
        return
    wanted = parse_cpus(cpus)
    for thread in _threads():
        with contextlib.suppress(OSError):  # a sandbox may forbid it, and a thread may have ended
            if unbind:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        with contextlib.suppress(OSError):
            if unbind or wanted:
                os.sched_setaffinity(thread, wanted or _EVERY)
    if unbind:
        _default_memory()
    missing = wanted - os.sched_getaffinity(0)
    if missing:
        numbers = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
        raise ConfigError(
            f"node.cpus is {cpus!r}, but this process cannot use CPU {numbers}: there is no such CPU, or the control "
            "group or sandbox does not allow it; /proc/self/status (Cpus_allowed_list) shows which it can use"
        )


def _threads() -> Iterator[int]:
    try:
        yield from (int(task.name) for task in Path("/proc/self/task").iterdir())
    except OSError:
        yield 0


def _default_memory() -> None:
    """Set the kernel's default memory policy: allocate near the requesting CPU. For this thread, and threads that it
    starts from now on; the other threads of this process allocate no memory for blocks."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _MPOL_DEFAULT, None, ctypes.c_ulong(0))  # a failure changes nothing
