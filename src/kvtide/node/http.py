"""``/healthz`` and ``/metrics`` over HTTP, in the node's own loop.

A tiny server for GET and nothing else: one request a connection, of some kilobytes, and a few seconds to send it
and to take the answer. Whoever is slower, or says what this does not understand, loses his connection; when there are
too many connections the next is closed at once. Nothing here waits for anybody else, and what is answered is worked
out at most ten times a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from kvtide import metrics
from kvtide.errors import ConfigError
from kvtide.node.statistics import Status

__all__ = ["Http"]

log = logging.getLogger("kvtide.http")

_MOST = 32
"""Connections at a time."""
_LARGEST = 8192
"""Bytes of a request."""
_PATIENCE = 5.0
"""Seconds for a request, and for its answer."""
_FRESH = 0.1
"""Seconds for which an answer is good."""

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Too Large"}
_REASONS |= {500: "Internal Server Error", 503: "Service Unavailable"}


class Http:
    """Serves what ``status`` answers. Call it in its loop's thread."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._answers: dict[str, tuple[float, bytes]] = {}
        """By path: when it was worked out, and what it is."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def listen(self, address: str) -> None:
        """Begin to serve at ``address``: a host and a port."""
        host, _, port = address.rpartition(":")
        try:
            server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=_LARGEST)
        except (OSError, OverflowError, ValueError) as e:
            raise ConfigError(
                f"cannot serve HTTP at {address!r}: {e}. Give a free address such as 127.0.0.1:9410"
            ) from e
        self._server = server
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        log.info("serving http://%s/metrics", self.address)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MOST:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            async with asyncio.timeout(_PATIENCE):
                writer.write(await self._answered(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(writer)

    async def _answered(self, reader: asyncio.StreamReader) -> bytes:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(431, "the request is too large")
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, "this is not HTTP/1.1")
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _response(405, "only GET and HEAD are served here")
        try:
            answer = self._answer(target.partition("?")[0])
        except Exception:  # a fault of ours costs this answer, and nobody else anything
            log.exception("could not answer %r", target)
            answer = _response(500, "see the log")
        return answer if method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _answer(self, path: str) -> bytes:
        if path not in ("/healthz", "/metrics"):
            return _response(404, "there are /healthz and /metrics")
        now = asyncio.get_running_loop().time()
        made, answer = self._answers.get(path, (0.0, b""))
        if not answer or now - made > _FRESH:
            answer = _metrics(self._status()) if path == "/metrics" else _health(self._status())
            self._answers[path] = now, answer
        return answer


def _metrics(status: Status) -> bytes:
    return _response(200, metrics.render(status.store, status.node), metrics.CONTENT_TYPE)


def _health(status: Status) -> bytes:
    failed = [name for name, tier in status.store.tiers.items() if tier.failed]
    state = "stopping" if status.node.stopping else "failed" if failed else "serving"
    about = {"status": state, "failed_tiers": failed, "uptime_seconds": round(status.node.seconds, 3)}
    about |= {"blocks": status.store.blocks, "clients": len(status.node.clients)}
    return _response(200 if state == "serving" else 503, json.dumps(about), "application/json")


def _response(code: int, body: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    content = body.encode()
    head = f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content
