"""The HTTP application: OpenAI's endpoints for chat and completions, and those for operators.

Nothing here waits for the model in the event loop: a thread decodes requests and tokenises prompts, and the model
generates when it is the request's turn.

A client can make the server spend resources only step by step. Without the API key no body is read. A body is read up
to a size limit and within a time limit, and all large ones share a memory budget. Then the request needs a place in the
queue, and only with that place is it decoded, checked and tokenised.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtide import Client, Store, metrics
from kvtide.node.host_names import HostNames
from kvtide.serve.generation import Answered, Ask, GenerationEngine
from kvtide.serve.generation_queue import GenerationQueue, Turn
from kvtide.serve.openai_api import ApiError, ChatRequest, CompletionRequest, parse
from kvtide.serve.prompts import RequestReader
from kvtide.serve.responses import Answers, ChatAnswers, TextAnswers, event
from kvtide.store.node_statistics import least

__all__ = ["Service"]

_LARGEST = 8 << 20
"""Maximum bytes of a request: a million tokens, as numbers."""
_SMALL = 64 << 10
"""Requests up to this many bytes do not count against ``_LARGE``: they always fit into memory."""
_LARGE = 64 << 20
"""Maximum bytes in memory of all larger requests together."""
_RETRY = 2
"""Seconds after which a rejected client may try again."""


class Service:
    """A model and its store as a web application: ``app``."""

    def __init__(
        self,
        engine: GenerationEngine,
        store: Store | Client,
        *,
        waiting: int = 16,
        limit: int | None = None,
        api_key: str | None = None,
        hosts: Iterable[str] = (),
        body_seconds: float = 60,
    ) -> None:
        """At most ``waiting`` requests wait for their turn, an output has at most ``limit`` tokens, and the body of a
        request must arrive within ``body_seconds``. Without an ``api_key`` the request's Host header must be a name of
        this host or one of ``hosts``; and metrics name neither tenants nor clients."""
        self._keyed = bool(api_key)
        self._loaded = engine.loaded
        self._store = store
        self._asker = RequestReader(engine.loaded, limit)
        self._turns = GenerationQueue(engine, waiting)
        self._bodies = _Bodies(body_seconds)
        self._created = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            middleware=[Middleware(_Key, key=api_key) if api_key else Middleware(_Named, hosts=HostNames(hosts))],
            exception_handlers={ApiError: _refuse, HTTPException: _refuse, Exception: _refuse},
        )

    def close(self) -> None:
        """Wait for the requests in the queue, and accept no more."""
        self._turns.close()

    # -- generation ---------------------------------------------------------------------------------------

    async def _chat(self, http: Request) -> Response:
        return await self._answer(http, ChatRequest, ChatAnswers)

    async def _complete(self, http: Request) -> Response:
        return await self._answer(http, CompletionRequest, TextAnswers)

    async def _answer(
        self, http: Request, kind: type[ChatRequest] | type[CompletionRequest], shape: type[Answers]
    ) -> Response:
        try:
            async with self._bodies.read(http) as body:
                turn = self._turns.take()
                if turn is None:
                    raise ApiError(503, "too many requests wait for the model; ask again later", code="overloaded")
                work = _Work(self._asker, body, kind, shape.request_name())
                await turn.prepare(work.asks)
                request = work.request
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected
        answers = shape(self._loaded.name, request.stream_options.include_usage, work.name)
        if request.stream:
            return _Stream(turn, answers)
        return await _whole(http, turn, answers)

    # -- for operators ------------------------------------------------------------------------------------

    def _about(self) -> dict[str, object]:
        about = {"id": self._loaded.name, "object": "model", "created": self._created, "owned_by": "kvtide"}
        return about | {"max_model_len": self._loaded.context}

    async def _models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, http: Request) -> Response:
        if (name := http.path_params["name"]) != self._loaded.name:
            raise ApiError(404, f"there is no model {name[:100]!r} here; there is {self._loaded.name!r}", "model")
        return JSONResponse(self._about())

    async def _health(self, http: Request) -> Response:
        return JSONResponse({"status": "serving", "model": self._loaded.name})

    async def _metrics(self, http: Request) -> Response:
        text = await asyncio.to_thread(self._measured)
        return Response(text, 200 if text else 503, media_type=metrics.CONTENT_TYPE)

    def _measured(self) -> str:
        """Empty while the node does not answer: zeros would look like a restarted node."""
        if isinstance(self._store, Client):
            status = self._store.status()
            if not status.node.pid:
                return ""
            status = status if self._keyed else least(status)
            return metrics.render(status.store, status.node)
        found = self._store.statistics()
        return metrics.render(found if self._keyed else replace(found, tenants={}))


async def _whole(http: Request, turn: Turn, answers: Answers) -> Response:
    watching = asyncio.create_task(_watch(http, turn))
    texts: defaultdict[int, str] = defaultdict(str)
    ends: list[Answered] = []
    try:
        async for number, said in turn:
            if isinstance(said, Answered):
                ends.append(said)
            else:
                texts[number] += said
        if turn.left:
            return Response(status_code=499)  # the client has disconnected
        whole = answers.whole([texts[number] for number in range(len(ends))], ends)
        return Response(whole, media_type="application/json")
    finally:
        watching.cancel()
        turn.leave()


async def _watch(http: Request, turn: Turn) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    turn.leave()


class _Stream(StreamingResponse):
    """A streamed response. If the client disconnects, starlette cancels it at any point."""

    def __init__(self, turn: Turn, answers: Answers) -> None:
        super().__init__(_events(turn, answers), media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.leave()


async def _events(turn: Turn, answers: Answers) -> AsyncIterator[bytes]:
    ends: list[Answered] = []
    begun = 0
    try:
        async for number, said in turn:
            opening = answers.opening(number) if number == begun else b""
            begun = number + 1
            if isinstance(said, Answered):
                ends.append(said)
                yield opening + answers.end(number, said)
            else:
                yield opening + answers.piece(number, said)
        yield answers.closing(ends)
    except ApiError as error:  # too late for an HTTP status
        yield event(error.body)


class _Work:
    """The work for a request that a thread does before the model can start."""

    request: ChatRequest | CompletionRequest

    def __init__(
        self, asker: RequestReader, body: bytes, kind: type[ChatRequest] | type[CompletionRequest], name: str
    ) -> None:
        self._asker, self._body, self._kind, self.name = asker, body, kind, name

    def asks(self) -> list[Ask]:
        self.request = parse(self._body, self._kind)
        return self._asker.asks(self.request, self.name)


class _Bodies:
    """Request bodies, in memory from their first byte until their prompts are tokenised."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._large = 0

    @asynccontextmanager
    async def read(self, http: Request) -> AsyncIterator[bytes]:
        """A complete body. Raises ApiError, or ClientDisconnect."""
        kind = http.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            # A web page in a browser may send other content types to any server without a preflight request.
            raise ApiError(415, f"the content type is {kind[:100]!r}; it must be application/json")
        if int(http.headers.get("content-length", "0")) > _LARGEST:  # h11 has checked that it is a number
            raise _too_large()
        body = bytearray()
        counted = 0
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    async for part in http.stream():
                        body += part
                        if len(body) > _LARGEST:
                            raise _too_large()
                        if len(body) > _SMALL:
                            self._large += len(body) - counted
                            counted = len(body)
                            if self._large > _LARGE:
                                text = "too many large requests are being read; ask again later"
                                raise ApiError(503, text, code="overloaded")
            except TimeoutError as error:
                text = f"the body of the request did not come within {self._seconds:g} seconds"
                raise ApiError(408, text) from error
            yield bytes(body)
        finally:
            self._large -= counted


def _too_large() -> ApiError:
    return ApiError(413, f"the request is larger than {_LARGEST} bytes")


async def _refuse(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{http.method} {http.url.path[:100]}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log says more")  # uvicorn logs the exception
    return JSONResponse(error.body, error.status, {"Retry-After": str(_RETRY)} if error.status == 503 else None)


class _Key:
    """Middleware that requires the API key, except for /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401, "this server requires its API key: Authorization: Bearer ...", None, "invalid_api_key"
                )
                await JSONResponse(error.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Named:
    """Middleware that requires a known Host header where no API key is required, except for /health."""

    def __init__(self, app: ASGIApp, hosts: HostNames) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or not self._hosts.knows(given[0]):
                text = f"the name {', '.join(given)[:100]!r} is not known here, and no API key is asked for: ask for "
                text += "localhost, or start the server with --allow-host or --api-key"
                await JSONResponse(ApiError(421, text, code="unknown_host").body, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)
