"""What clients send that want to keep others out, or to make the server work."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx

from tests.serve.serving import Served

KEY = "sesame"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Raw:
    """A connection that sends what it likes."""

    def __init__(self, served: Served, sent: str | bytes = "", source: str = "127.0.0.1") -> None:
        address = served.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((address[0], int(address[1])), 60, source_address=(source, 0))
        self.send(sent)

    def send(self, sent: str | bytes) -> None:
        self.socket.sendall(sent.encode() if isinstance(sent, str) else sent)

    def answer(self) -> tuple[int, Any]:
        """The status and the content of the next answer."""
        said = b""
        while not (found := re.search(rb"^HTTP/1.1 (\d+) .*?content-length: (\d+)\r\n.*?\r\n\r\n", said, re.S | re.I)):
            part = self.socket.recv(1 << 16)
            assert part, said
            said += part
        while len(said) < found.end() + int(found[2]):
            said += self.socket.recv(1 << 16)
        return int(found[1]), json.loads(said[found.end() :])

    def rest(self) -> bytes:
        """What comes until the server closes the connection."""
        said = b""
        try:
            while part := self.socket.recv(1 << 16):
                said += part
        except ConnectionError:
            pass
        return said

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def works(served: Served) -> None:
    """A usual request on a connection of its own is answered."""
    usual = {"prompt": [5, 6], "max_tokens": 1}
    answer = httpx.post(f"{served.url}/v1/completions", json=usual, headers=AUTHORIZED, timeout=300)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1), answer.text


def post(served: Served, body: bytes, path: str = "completions") -> httpx.Response:
    headers = {"Content-Type": "application/json"} | AUTHORIZED
    return httpx.post(f"{served.url}/v1/{path}", content=body, headers=headers, timeout=300)


def refused(answer: httpx.Response, status: int, says: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert says in error["message"]
