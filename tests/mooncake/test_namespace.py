"""Runs the tests in ``inside``: Mooncake listens on all interfaces, so it gets a network of its own without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mooncake.servers import libraries, missing

_ROOT = Path(__file__).parents[2]
_UP = 'ip link set lo up && exec "$@"'


def _run(*more: str) -> None:
    inside = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*inside, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode:
        pytest.skip("there can be no network namespaces here: unshare --net --map-root-user is refused")
    if reason := missing():
        pytest.skip(reason)
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/mooncake/inside", *more]
    environment = os.environ | libraries() | {"MC_RPC_TIMEOUT_MS": "1000", "MC_RPC_CONNECT_TIMEOUT_MS": "500"}
    command = [*inside, "setpriv", "--pdeathsig", "KILL", "sh", "-c", _UP, "sh", *tests]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"see what is printed: {done.stdout[-2000:]}"


def test_with_a_real_master() -> None:
    _run("-m", "not long")


@pytest.mark.long
def test_with_a_real_master_for_long() -> None:
    _run("-m", "long")
