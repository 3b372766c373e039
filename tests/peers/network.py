"""Hosts with addresses of their own, in network namespaces joined by a bridge, and the faults of such a network.

Every namespace is held by a process that waits for the end of its input, which is a pipe of this process. So when this
process ends, for whatever reason, the namespaces go, and the links in them. Nothing has a name outside, so nothing is
left over, and networks do not meet. Sockets of the file system are in no namespace: whoever has the path of a node's
socket reaches it from outside, whatever is wrong with the network.

Somebody who is not root makes the namespaces in a user namespace, where the kernel permits that."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

__all__ = ["Network", "missing"]

_AS_ANYBODY = ("--user", "--map-root-user")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SUBNET = "10.209.0"
_SECONDS = 20.0
"""How long a command of the network may take."""
_DISABLED, _FORWARDING = 0, 3
"""States of a bridge's port."""


def _call(command: Sequence[str]) -> None:
    """Raises OSError with what the command said."""
    try:
        environment = os.environ | {"PATH": _PATH}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired as e:
        raise OSError(f"{' '.join(command)}: it did not end") from e
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class _Namespace:
    """A network namespace, and the process that holds it."""

    def __init__(self, *enter: str) -> None:
        """``enter`` is the beginning of a command line."""
        command = [*enter, "unshare", "--net", "sh", "-c", "echo ready && exec cat"]
        if not enter and not _permitted():
            command[1:1] = _AS_ANYBODY
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():
            said = self._holder.stderr.read()
            self.close()
            raise OSError(f"{' '.join(command)}: {said.strip()}")
        user = () if _permitted() else ("--user", "--preserve-credentials")
        self.enter = ("nsenter", "--target", str(self._holder.pid), *user, "--net", "--")
        """What the command line of a process in it begins with."""
        self.path = f"/proc/{self._holder.pid}/ns/net"

    def call(self, command: str) -> None:
        _call([*self.enter, *command.split()])

    def close(self) -> None:
        self._holder.communicate()  # closes its input; it ends, and so do the links in its namespace


@functools.cache
def _permitted() -> bool:
    """Whether this process itself may make a network namespace."""
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


class Network:
    """Hosts with these names, each with an address. Raises OSError where that is not permitted."""

    def __init__(self, *names: str) -> None:
        self._stack = contextlib.ExitStack()
        self.addresses = {name: f"{_SUBNET}.{number}" for number, name in enumerate(names, 1)}
        self._hosts: dict[str, _Namespace] = {}
        self._unplugged: set[str] = set()
        try:
            self._bridge = self._namespace()
            self._bridge.call("ip link add name bridge type bridge")
            self._bridge.call("ip link set dev bridge up")
            inside = self._bridge.enter if not _permitted() else ()
            for name, address in self.addresses.items():
                host = self._hosts[name] = self._namespace(*inside)
                self._bridge.call(f"ip link add name to-{name} type veth peer name outside netns {host.path}")
                self._bridge.call(f"ip link set dev to-{name} master bridge up")
                host.call("ip link set dev lo up")
                host.call(f"ip address add {address}/24 dev outside")
                host.call("ip link set dev outside up")
        except BaseException:
            self.close()
            raise

    def _namespace(self, *enter: str) -> _Namespace:
        made = _Namespace(*enter)
        self._stack.callback(made.close)
        return made

    def enter(self, name: str) -> tuple[str, ...]:
        """What the command line of a process on that host begins with. The process ends with the thread that starts
        it."""
        return (*self._hosts[name].enter, "setpriv", "--pdeathsig", "KILL", "--")

    def lose(self, name: str) -> None:
        """Drop what that host sends and receives. Nobody is told."""
        if name in self._unplugged:
            return  # the kernel refuses that for a link that is down
        self._set_state(name, _DISABLED)

    def _set_state(self, name: str, state: int) -> None:
        """Of the host's port. The kernel refuses it until it has noticed that the link is up, after ``mend``."""
        end = time.monotonic() + _SECONDS
        while True:
            try:
                return self._bridge.call(f"bridge link set dev to-{name} state {state}")
            except OSError as e:
                if "Network is down" not in str(e) or time.monotonic() >= end:
                    raise
                time.sleep(0.01)

    def unplug(self, name: str) -> None:
        """Take that host's cable out: the host sees that it has no link."""
        self._unplugged.add(name)
        self._bridge.call(f"ip link set dev to-{name} down")

    def divide(self, *names: str) -> None:
        """Drop what these hosts send to each other. All others reach them, and are reached."""
        for name in names:
            self._bridge.call(f"bridge link set dev to-{name} isolated on")

    def slow(self, name: str, rate: str) -> None:
        """Let that host send and receive at most so much, such as 10mbit; what does not fit into a short queue is
        lost."""
        shape = f"root tbf rate {rate} burst 16kb latency 200ms"
        self._bridge.call(f"tc qdisc replace dev to-{name} {shape}")
        self._hosts[name].call(f"tc qdisc replace dev outside {shape}")

    def mend(self, name: str) -> None:
        """End all faults of that host's link."""
        self._unplugged.discard(name)
        self._bridge.call(f"ip link set dev to-{name} up")
        self._bridge.call(f"bridge link set dev to-{name} isolated off")
        self._set_state(name, _FORWARDING)
        for namespace, link in ((self._bridge, f"to-{name}"), (self._hosts[name], "outside")):
            with contextlib.suppress(OSError):  # it was not slow
                namespace.call(f"tc qdisc delete dev {link} root")

    def close(self) -> None:
        """Processes on the hosts must have ended."""
        self._stack.close()


@functools.cache
def missing() -> str:
    """Why there can be no network here; empty if there can be one."""
    for tool in ("unshare", "nsenter", "setpriv", "ip", "bridge", "tc"):
        if shutil.which(tool, path=_PATH) is None:
            return f"{tool} is not installed"
    try:
        with contextlib.closing(Network("one")) as network:
            network.slow("one", "10mbit")
            network.lose("one")
            network.mend("one")
    except OSError as e:
        return str(e)
    return ""
