"""Two processes that share a storage: each stores, and when both have, each looks for what the other stored."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_both"]


def run_both(program: str, *workers: tuple[Sequence[str], Path]) -> None:
    """Run a program with these arguments, each in a folder. It says "stored", reads a line, and says "done"."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ},
            cwd=folder,
        )
        for arguments, folder in workers
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "stored\n"
        for process in processes:
            out, _ = process.communicate("\n", timeout=60)
            assert (out, process.returncode) == ("done\n", 0)
    finally:
        for process in processes:
            process.kill()
