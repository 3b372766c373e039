"""Runs Dynamo's selection service in a network of its own, and asks it. It listens on all interfaces, so it must not
run in the host's network.

Argument: as JSON, ``command`` of the service, ``forwarders`` (address, port and path of a socket of each), ``workers``
to register, ``requests``, and ``service``, where it answers. Prints the answers, when all of each prompt was found.
Needs the standard library alone: Dynamo's Python runs it.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any


def copy(source: socket.socket, target: socket.socket) -> None:
    while some := source.recv(65536):
        target.sendall(some)
    target.shutdown(socket.SHUT_WR)


def forward(address: str, port: int, path: str) -> None:
    """As socat does it."""
    with socket.create_server((address, port)) as listener:
        while True:
            one, other = listener.accept()[0], socket.socket(socket.AF_UNIX)
            other.connect(path)
            for pair in ((one, other), (other, one)):
                threading.Thread(target=copy, args=pair, daemon=True).start()


def eventually(what: Callable[[], Any]) -> Any:
    for _ in range(1200):
        try:
            if found := what():
                return found
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not come to pass")


def main() -> None:
    given = json.loads(sys.argv[1])
    with socket.socket() as sock:  # the loopback of this network is down at first
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 0x41))
    for forwarder in given["forwarders"]:
        threading.Thread(target=forward, args=forwarder, daemon=True).start()

    def ask(path: str, body: Any = None) -> bytes:
        made = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(given["service"] + path, made, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
            return found

    def chosen() -> list[Any]:
        answers = [json.loads(ask("/select", one)) for one in given["requests"]]
        pairs = zip(answers, given["requests"], strict=True)
        found = all(answer["overlap"]["longest_matched"] == len(one["token_ids"]) for answer, one in pairs)
        return answers if found else []

    with subprocess.Popen([sys.executable, *given["command"]], stdout=sys.stderr) as service:
        try:
            eventually(lambda: (ask("/health"), True))
            for worker in given["workers"]:
                ask("/workers", worker)
            print(json.dumps(eventually(chosen)))
        finally:
            service.kill()


if __name__ == "__main__":
    main()
