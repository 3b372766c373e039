"""``kvtide stop``: stops a node, and waits until it has ended."""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli._options import socket_of
from kvtide.errors import AccessError, TierError

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_PATIENCE = 10.0
"""Seconds that a node may take to answer."""
_POLL = 0.2
"""Seconds between two looks at a file's lock, of whose end nobody tells."""
_FIRST, _NEXT = 1.0, 5.0
"""Seconds until the first line about a node that is still ending, and between the next ones."""


@app.command()
def stop(
    address: Annotated[
        str, typer.Argument(metavar="SOCKET", help="The node's socket, with or without unix:.")
    ] = "kvtide.sock",
) -> None:
    """Stop the node at a socket, and wait until it has ended.

    It is sent SIGTERM. It then writes the blocks that are worth keeping to its colder tiers, for as long as its
    --stop-seconds allow. Only the user who runs it, and root, may stop it.

        [bold]kvtide stop /run/kvtide.sock[/bold]

    A node that systemd or Kubernetes runs is started again by them: stop it there.
    """
    path = socket_of(address, "a node on another host is stopped there: kvtide stop SOCKET")
    if not path.exists() and _wait_for_the_end(path):
        typer.echo(f"the node at {path} has ended")
        return
    pid, pidfd = _node(path)
    with open(pidfd, "rb", buffering=0):
        _wait(path, pid, pidfd)
    typer.echo(f"the node at {path}, process {pid}, has ended")


def _wait_for_the_end(path: Path) -> bool:
    """Wait for a node that has removed its socket and still writes; False if there is none. A node locks the file
    ``alive`` until its process ends."""
    from kvtide.node.server.mapped_memory import beside

    try:
        file = os.open(beside(path, "alive"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return False
    with open(file, "rb", buffering=0):
        began, told = time.monotonic(), 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return told > 0
            except OSError:
                if time.monotonic() >= told:
                    typer.echo(f"a node at {path} is ending ({time.monotonic() - began:.0f} s)", err=True)
                    told = time.monotonic() + _NEXT
                time.sleep(_POLL)


def _node(path: Path) -> tuple[int, int]:
    """The process of the node at ``path``, and a pidfd of it, after it was sent SIGTERM."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.connect(str(path))
        except FileNotFoundError:
            raise TierError(f"there is no socket {path}, so no node serves there: nothing was stopped") from None
        except ConnectionRefusedError:
            raise TierError(f"no process listens at {path}: nothing was stopped") from None
        except OSError as e:
            raise TierError(f"{path} cannot be reached ({e.strerror or e}): nothing was stopped") from e
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", peer)
        if pid <= 0:
            raise TierError(f"the process at {path} is hidden from here, as in a container: stop it there")
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError as e:
            raise TierError(f"process {pid}, which listened at {path}, has ended or is ending") from e
        except OSError as e:
            raise TierError(f"process {pid} at {path} cannot be signalled from here ({e.strerror}): kill {pid}") from e
        try:
            # It answers on this connection after its pidfd was opened: so the pidfd is that of the process that listens
            # there, and that process is a node, and not another program whose socket was named by mistake.
            if not _greets(sock):
                raise TierError(
                    f"process {pid}, which listens at {path}, has not answered as a node of kvtide: nothing was "
                    f"stopped. If it is a node that hangs: kill -9 {pid}"
                )
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        except PermissionError:
            os.close(pidfd)
            raise AccessError(
                f"the node at {path}, process {pid}, is run by user {uid}: only that user and root may stop it"
            ) from None
        except ProcessLookupError:
            pass  # it has ended by itself
        except BaseException:
            os.close(pidfd)
            raise
        return pid, pidfd


def _greets(sock: socket.socket) -> bool:
    """Whether a node of kvtide is at the other end: whatever it answers, if it refuses us too."""
    import msgspec

    from kvtide.node import protocol as p
    from kvtide.version import __version__

    hello = p.Hello(p.PROTOCOL, p.PROTOCOL, __version__, minor=p.MINOR, minors=p.MINORS)
    own = os.pidfd_open(os.getpid())
    received = b""
    try:
        socket.send_fds(sock, [p.frame(hello)], [own])
        while not p.whole(received):
            data = sock.recv(4096)
            if not data or len(received) > p.LARGEST:
                return False
            received += data
        msgspec.msgpack.decode(received[p.LENGTH.size : p.whole(received)], type=p.Welcome | p.Failure)
    except (OSError, msgspec.DecodeError):
        return False
    finally:
        os.close(own)
    return True


def _wait(path: Path, pid: int, pidfd: int) -> None:
    began = time.monotonic()
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    for pause in itertools.chain([_FIRST], itertools.repeat(_NEXT)):
        if poll.poll(pause * 1000):
            return
        typer.echo(f"the node at {path}, process {pid}, is ending ({time.monotonic() - began:.0f} s)", err=True)
