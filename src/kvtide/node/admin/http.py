"""The node's HTTP server, in the node's own loop: for health probes, Prometheus, and administrators of other hosts.

=====================  =========  ==========================================================================
``GET /healthz``       everyone   whether the node serves; with details, for callers who may read
``GET /metrics``       read       for Prometheus
``GET /status``        read       what ``kvtide status`` shows, as JSON
``POST /forget``       admin      ``?tenant=TAG``: destroy a tenant's keys and blocks; returns how many
=====================  =========  ==========================================================================

``auth.py`` authenticates callers. Where no authentication is configured, requests other than ``/healthz`` are answered
only for known names in ``Host`` (``host_names.py``), and the answers name no tenant, process, model or path.

The server is minimal: one request per connection, of some kilobytes, with a few seconds for the handshake, the request
and its answer. A caller that is slower, or sends something invalid, is disconnected. When too many connections are
open, the next one is closed at once, and at most a hundred begin per second, because a handshake costs CPU time.
Requests do not wait for each other, and pages are computed at most ten times a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvtide import metrics
from kvtide.errors import ConfigError
from kvtide.node.admin.auth import HttpAuth, HttpCaller
from kvtide.node.host_names import HostNames
from kvtide.node.protocol import NO_TENANT
from kvtide.node.roles import Role
from kvtide.node.server.forget import erase
from kvtide.node.server.handler_context import NodeContext
from kvtide.store.forget import Forgotten
from kvtide.store.node_statistics import Status, least

__all__ = ["PAGES", "Http"]

log = logging.getLogger("kvtide.http")

_MOST = 32
"""Maximum number of connections at a time."""
_LARGEST = 8192
"""Maximum bytes of a request."""
_PATIENCE = 5.0
"""Seconds for a handshake, a request and its answer together."""
_PACE = 0.01
"""Minimum seconds between the beginnings of two connections."""
_PAUSE = 0.5
"""Seconds without accepting connections after the node ran out of file descriptors for them."""
_FRESH = 0.1
"""Seconds for which a computed page is reused."""

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found"}
_REASONS |= {
    405: "Method Not Allowed",
    409: "Conflict",
    421: "Misdirected Request",
    422: "Unprocessable Content",
    431: "Request Too Large",
    500: "Internal Server Error",
}
_REASONS |= {503: "Service Unavailable"}

PAGES: dict[str, Role | None] = {
    "/healthz": None,
    "/metrics": Role.READ,
    "/status": Role.READ,
    "/forget": Role.ADMIN,
}
"""The role that each page needs. Those for administrators are actions, requested by POST."""
_ACTS = {"/forget"}


class _Asked(NamedTuple):
    method: str
    path: str
    query: dict[str, list[str]]
    authorization: str
    host: str
    by_page: bool
    """Whether a page in a browser sent the request: the browser would present its user's certificate."""


class _Refused(Exception):  # noqa: N818 - an answer
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Http:
    """Serves a node's pages. Call it in the thread of the node's loop."""

    def __init__(self, host: NodeContext, passes: HttpAuth) -> None:
        self._context = host
        self._auth = passes
        self._answers: dict[tuple[str, bool], tuple[float, bytes]] = {}
        """By page, and whether it has all details: when it was computed, and the response."""
        self._listening: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[None]] = set()
        self.address = ""
        self._hosts = HostNames(passes.hosts)

    async def listen(self, address: str) -> None:
        """Begin to serve at ``address``: a host and a port."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            if not port.isascii() or not port.isdigit() or not (number := int(port)) < 1 << 16:
                raise OverflowError("a port is a number from 0 to 65535")
            kind, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
            found = await loop.getaddrinfo(host.strip("[]") or None, number, type=kind, flags=passive)
            addresses = [str(where[0]) for *_, where in found]
            self._auth.guard(address, addresses)
            self._hosts = HostNames([host, *addresses, *self._auth.hosts])
            listeners = [socket.create_server(where, family=family, backlog=_MOST) for family, *_, where in found]
        except (OSError, OverflowError, ValueError) as e:
            reason = (isinstance(e, OSError) and e.strerror) or e
            raise ConfigError(
                f"cannot serve HTTP at {address!r}: {reason}. Give a free address such as 127.0.0.1:9410"
            ) from e
        host, number = listeners[0].getsockname()[:2]
        self.address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        for listener in listeners:
            listener.setblocking(False)
            self._listening.append(loop.create_task(self._accept(listener)))
        log.info("serving %s://%s/metrics", "http" if self._auth.tls is None else "https", self.address)

    def close(self) -> None:
        for task in [*self._listening, *self._open]:
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as e:
                    log.warning("cannot accept a connection: %s", e.strerror)
                    await asyncio.sleep(_PAUSE)
                    continue
                if len(self._open) >= _MOST:
                    sock.close()
                else:
                    task = loop.create_task(self._serve(sock))
                    self._open.add(task)
                    task.add_done_callback(self._open.discard)
                await asyncio.sleep(_PACE)

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._auth = self._auth.renewed()
        reader = asyncio.StreamReader(limit=_LARGEST)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(_PATIENCE) as patience:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._auth.tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                writer.write(await self._answered(reader, transport.get_extra_info("peercert"), patience))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            log.info("a connection ended early: %s", e or type(e).__name__)
        finally:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
            sock.close()

    async def _answered(
        self, reader: asyncio.StreamReader, certificate: dict[str, object] | None, patience: asyncio.Timeout
    ) -> bytes:
        try:
            asked = _parsed(await reader.readuntil(b"\r\n\r\n"))
            caller = self._admitted(asked, self._auth.of(asked.authorization, certificate))
            if asked.path in _ACTS:
                assert caller is not None
                patience.reschedule(None)  # the caller may wait for as long as it takes
                answer = await self._forget(asked, caller)
                patience.reschedule(asyncio.get_running_loop().time() + _PATIENCE)
            else:
                answer = self._page(asked.path, told=caller is not None and self._asked_by_name(asked))
        except _Refused as e:
            return _response(e.code, str(e))
        except asyncio.LimitOverrunError:
            return _response(431, "the request is too large")
        except (OSError, asyncio.IncompleteReadError):
            raise
        except Exception:  # a bug of the node costs only this answer
            log.exception("an HTTP request could not be answered")
            return _response(500, "see the log")
        return answer if asked.method != "HEAD" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _asked_by_name(self, asked: _Asked) -> bool:
        """Whether the request cannot come from another site's page, in a browser that takes this server for that
        site."""
        return self._auth.needed or self._hosts.knows(asked.host)

    def _admitted(self, asked: _Asked, caller: HttpCaller | None) -> HttpCaller | None:
        """Returns the caller if it may make this request. Raises _Refused."""
        if asked.path not in PAGES:
            raise _Refused(404, f"there are {', '.join(PAGES)}")
        methods = ("POST",) if asked.path in _ACTS else ("GET", "HEAD")
        if asked.method not in methods:
            raise _Refused(405, f"{asked.path} must be requested by {' or '.join(methods)}")
        needed = PAGES[asked.path]
        if needed is not None and not self._asked_by_name(asked):
            raise _Refused(
                421,
                f"the name {asked.host[:100]!r} is not known here, and authentication is not required: ask for "
                "localhost, or set node.hosts or node.tokens",
            )
        if needed is not None and (caller is None or caller.role < needed):
            who, role = caller or ("a stranger", None)
            refusal = self._context.refusals.refuse(f"{who} over HTTP", role, asked.path[1:], needed)
            raise _Refused(401 if caller is None else 403, str(refusal))
        if asked.by_page and asked.path in _ACTS:
            raise _Refused(403, "pages in a browser must not request this; use kvtide forget")
        return caller

    def _page(self, path: str, told: bool) -> bytes:
        now = asyncio.get_running_loop().time()
        made, answer = self._answers.get((path, told), (0.0, b""))
        if not answer or now - made > _FRESH:
            status = self._context.status(None)
            if not self._auth.needed:
                status = least(status)
            if path == "/metrics":
                answer = _response(200, metrics.render(status.store, status.node), metrics.CONTENT_TYPE)
            elif path == "/status":
                answer = _response(200, msgspec.json.encode(status).decode(), "application/json")
            else:
                answer = _health(status, told)
            self._answers[path, told] = now, answer
        return answer

    async def _forget(self, asked: _Asked, caller: HttpCaller) -> bytes:
        try:
            tenant = bytes.fromhex(asked.query["tenant"][0])
        except (KeyError, ValueError):
            tenant = b""
        if len(tenant) != 16:
            raise _Refused(400, "it must be /forget?tenant=TAG, with a tag of 32 hexadecimal digits")
        ended: asyncio.Queue[tuple[Forgotten, str]] = asyncio.Queue()
        erase(
            self._context.store,
            self._context.soon,
            tenant,
            f"{caller.name} over HTTP",
            lambda *how: ended.put_nowait(how),
        )
        forgotten, failure = await ended.get()
        if failure:
            raise _Refused(422 if forgotten.blocks == NO_TENANT else 409, failure)
        return _response(200, msgspec.json.encode(forgotten).decode(), "application/json")


def _parsed(request: bytes) -> _Asked:
    first, *lines = request.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(400, "this is not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() in ("authorization", "host") and name.lower() in headers:
            raise _Refused(400, f"there are two headers {name}")
        headers[name.lower()] = value.strip()
    try:
        target = urlsplit(words[1])
    except ValueError:
        raise _Refused(400, "this is no address") from None
    host = target.netloc or headers.get("host", "")
    query = parse_qs(target.query)
    return _Asked(words[0], target.path, query, headers.get("authorization", ""), host, "origin" in headers)


def _health(status: Status, told: bool) -> bytes:
    failed = [name for name, tier in status.store.tiers.items() if tier.failed]
    state = "stopping" if status.node.stopping else "failed" if failed else "serving"
    about: dict[str, object] = {"status": state}
    if told:
        about |= {"failed_tiers": failed, "uptime_seconds": round(status.node.seconds, 3)}
        about |= {"blocks": status.store.blocks, "clients": len(status.node.clients)}
    return _response(200 if state == "serving" else 503, json.dumps(about), "application/json")


def _response(code: int, body: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    content = body.encode()
    head = f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
    if code == 401:
        head += 'WWW-Authenticate: Bearer realm="kvtide"\r\n'
    return f"{head}Connection: close\r\n\r\n".encode() + content
