"""Serves HTTP: who may ask, how much, and the answer to a mistake.

Starlette gives routing and streaming, and uvicorn the server. They are small, well kept, and enough, because what a
client sends is checked here by hand. Nothing that arrives is unpickled or run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hmac
import json
import logging
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mrl.config.serve import is_loopback
from mrl.errors import UserError, one_line
from mrl.serve.request_queue import (
    JSON,
    MODEL_SEPARATOR,
    Future,
    FutureExpired,
    QueueFull,
    RequestQueue,
    Result,
    error_result,
)
from mrl.serve.requests import RequestError, parse_body

HOLD_S = 25.0
"""Seconds that a client waits for a result before it is told to ask again; its own limit is 45."""

BUSY_S = 1
"""Seconds after which a client comes again if there was no room."""

MAX_FILES = 65536

ENDING_S = 5.0
"""How long the end of the server waits for answers that are on their way."""

ENDS = "the server ends before this is done: send it again"

Handler = Callable[["ClientRequest"], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class ClientRequest:
    """An authorized request: its key was right and its body is not too long."""

    request: Request
    body: bytes
    json: Mapping[str, Any]  # the body, where it is JSON

    @property
    def path(self) -> Mapping[str, str]:
        return self.request.path_params


@dataclasses.dataclass(frozen=True)
class Auth:
    """Checks who may ask, and how much.

    key: None if nobody needs one; then a client must name this machine by a loopback address.
    """

    key: str | None
    max_bytes: int
    is_public: bool = False  # the path is signed
    is_json: bool = True  # the body

    async def authorize(self, request: Request) -> ClientRequest:
        """Returns a request with its body. Raises RequestError."""
        if self.is_public:
            return ClientRequest(request, b"", {})
        if self.key is None:
            # a web page of any site can reach a server on loopback, also by a name that it has made lead here
            if "origin" in request.headers or not is_loopback(request.url.hostname or ""):
                raise RequestError(403, "a browser may not ask: set MRL_SERVE_KEY and send it")
        elif not hmac.compare_digest(_key_of(request).encode(), self.key.encode()):
            raise RequestError(
                401, "the key is not this server's: send its MRL_SERVE_KEY, as TINKER_API_KEY of a tinker client"
            )
        body = await self._body(request)
        # on this thread: json.loads holds the interpreter's lock, so others wait for a long body in any case
        return ClientRequest(request, body, parse_body(body) if self.is_json else {})

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_bytes:
                raise RequestError(413, f"the body has more than {self.max_bytes} bytes")
        return bytes(body)


def _key_of(request: Request) -> str:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")


def route(method: str, path: str, handler: Handler, auth: Auth) -> Route:
    """Returns a route. Its handler sees the requests that Auth lets in, and its mistakes are answered in one line."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(await auth.authorize(request))
        except RequestError as refused:
            return refusal(refused.status, refused.line)
        except UserError as error:
            return refusal(400, str(error))
        except QueueFull:
            return refusal(429, "there is no room on the queue: come again", {"retry-after": str(BUSY_S)})
        except ClientDisconnect:
            return refusal(400, "the body broke off")
        except asyncio.CancelledError:  # by `HTTPServer.stop`
            return refusal(503, ENDS)
        except Exception:
            logging.getLogger("mrl.serve").exception("%s %s", method, path)
            return refusal(500, "a fault of the server, which its log has")

    return Route(path, answer, methods=[method])


def refusal(status: int, line: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    message = one_line(line, 400)
    error = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error"}  # like OpenAI's
    return JSONResponse({"detail": message, "error": error}, status, headers)


def future_response(future: Future, **more: Any) -> JSONResponse:
    """Returns the answer to a call whose result is fetched later."""
    about = {"request_id": future.id} | ({"model_id": future.model} if future.model is not None else {})
    return JSONResponse(about | more)


def json_result(value: Any) -> Result:
    """Returns a result of JSON."""
    return Result(json.dumps(value).encode())


def make_retrieve_handler(request_queue: RequestQueue, model_status: Callable[[str], UserError]) -> Handler:
    """Returns the handler of /retrieve_future: it holds the request until the future is done, for HOLD_S at most.

    model_status: says why a future of a model is not known, and what to do.
    """

    async def retrieve(request: ClientRequest) -> Response:
        id = request.json.get("request_id")
        if not isinstance(id, str):
            raise RequestError(400, "request_id is no text")
        try:
            future = request_queue.find(id)
        except FutureExpired:
            model = id.partition(MODEL_SEPARATOR)[2]
            if model:
                return Response(error_result("server", one_line(str(model_status(model)), 400)).body, media_type=JSON)
            raise RequestError(410, f"there is no promise {id[:40]} here (any more)") from None
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def when_done() -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(done.set)

        request_queue.add_callback(future, when_done)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), HOLD_S)
        if future.result is None:  # it takes longer, or the server ends
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"})
        future.fetched_at = request_queue.clock()
        return Response(future.result.body, media_type=future.result.media_type)

    return retrieve


def open_socket(host: str, port: int) -> socket.socket:
    """Returns the socket of an address. Nobody else can listen there from now on.

    Requests wait on it until a server answers. Raises UserError.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=2048)
        # asyncio sets it only for sockets that name TCP; without it, each answer waits 40 ms for the client's ACK
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        why, fix = str(error.strerror).partition(" (while")[0], "give another --port, or end what listens there"
        raise UserError("--port", port, f"cannot be listened on at {host} ({why})", fix) from None
    return made


def raise_file_limit() -> None:
    """Lets this process open MAX_FILES files, if the system allows it.

    A client has a connection for each of up to 2,000 samples, and many systems begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_fault(record: logging.LogRecord) -> bool:
    """Returns whether a line of uvicorn's is worth logging: at the end, unread streams are broken off."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class HTTPServer:
    """The server on a thread of its own."""

    def __init__(self, routes: list[Route], listens: socket.socket) -> None:
        self.socket, self.port = listens, int(listens.getsockname()[1])
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self.socket])

    def start(self) -> None:
        """Begins to answer."""
        raise_file_limit()
        gc.freeze()  # a full collection of all loaded objects takes a second, and every client would wait
        self.thread.start()

    def stop(self) -> None:
        """Ends after the answers that are on their way. A longer request, such as an upload, is told to come again."""
        self.server.should_exit = True
        self.thread.join(ENDING_S)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._cancel)
        self.thread.join(ENDING_S)
        self.socket.close()

    def _cancel(self) -> None:
        for task in self.server.server_state.tasks:
            task.cancel()
