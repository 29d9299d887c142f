"""A gateway on ports of its own, behind all that stands before it in Serve's proxies, and a hostile user of it."""

from __future__ import annotations

import logging
import random
import socket
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import uvicorn
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.http_util import _apply_middlewares

from cluster.gateway.door import front_door
from cluster.gateway.door.front_door import FrontDoor
from cluster.gateway.door.http_limits import LimitedHttpProtocol
from cluster.gateway.door.proxy_errors import middlewares
from cluster.gateway.grpc.registration import add_inference
from cluster.gateway.grpc.servicer import SERVICE_NAME, InferenceServicer
from cluster.gateway.http_app import create_app
from cluster.gateway.paceline.v1 import inference_pb2 as pb
from paceline_testing.damaged_answers import NAMES, damaged, random_text
from paceline_testing.hostile_bodies import HostileBodies
from paceline_testing.hostile_calls import BrokenRule, HostileCalls, asked, check_answer, check_message
from paceline_testing.hostile_messages import METHODS, HostileMessages
from paceline_testing.hostile_services import HostileGateway
from paceline_testing.likely_fields import likely_fields
from paceline_testing.saying_router import SayingRouter
from paceline_testing.toy_gateway import FOX

_GRPC_CODES = (
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED,
)  # fmt: skip
_GRPC_WITHIN_S = 30.0
PLAIN = {"prompt": FOX, "temperature": 0, "max_tokens": 8}
_GRPC_SHARE = 0.25


@dataclass
class Figures:
    """outcomes: calls by what came of them. broken: rules, with the calls that broke them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""

    @property
    def runs(self) -> int:
        return sum(self.outcomes.values())


class HostileUser:
    """Calls one after the other, and checks after each that the server has logged no error and answers as before."""

    def __init__(self, gateway: HostileGateway, document: dict[str, Any], port: int, channel: grpc.aio.Channel) -> None:
        """document: the OpenAPI document. port: of HTTP, on loopback. channel: of gRPC."""
        self.figures = Figures()
        self._router = gateway.service.router
        self._model = gateway.service.model.name
        self._key = gateway.key
        self._document = document
        self._port = port
        self._channel = channel
        self._records = _Records()
        self._plain_answer: Any = None

    async def run(self, seed: int, count: int) -> None:
        """The same calls for the same seed, but for the time they take."""
        rng = random.Random(seed)
        calls = HostileCalls(rng, HostileBodies(rng, self._document, likely_fields(self._model)), self._key)
        messages = HostileMessages(rng, self._model)
        logging.getLogger().addHandler(self._records)
        try:
            headers = dict(self._metadata)
            url = f"http://localhost:{self._port}"
            async with httpx.AsyncClient(base_url=url, timeout=30, headers=headers) as client:
                self._plain_answer = await self._plain(client)
                for index in range(count):
                    text = damaged(rng, rng.choice(NAMES)) if rng.random() < 0.7 else random_text(rng)
                    self._say(text, rng.choice((1, 3, 50)))
                    begun = time.monotonic()
                    told = f"seed {seed}, call {index}: "
                    if rng.random() < _GRPC_SHARE:
                        name, message = messages.next()
                        told += f"{name} {message[:2000]!r}"
                        await self._checked(told, lambda name=name, message=message: self._ask_grpc(name, message))
                    else:
                        call = calls.next()
                        told += f"{b''.join(call.parts)[:2000]!r}"
                        await self._checked(told, lambda call=call: self._ask_http(call))
                    if (took_s := time.monotonic() - begun) > self.figures.slowest_s:
                        self.figures.slowest_s, self.figures.slowest = took_s, told
                    await self._checked(told, lambda: self._check_plain(client))
        finally:
            logging.getLogger().removeHandler(self._records)

    @property
    def _metadata(self) -> list[tuple[str, str]]:
        return [] if self._key is None else [("authorization", f"Bearer {self._key}")]

    async def _checked(self, told: str, ask: Callable[[], Any]) -> None:
        try:
            outcome = await ask()
        except Exception as error:
            outcome = "broken"
            words = str(error) if isinstance(error, BrokenRule) else traceback.format_exc()
            self.figures.broken.append(f"{told}\n  {words}")
        if outcome is not None:
            self.figures.outcomes[outcome] += 1
        if self._records.texts:
            self.figures.broken.append(f"{told}\n  logged: {self._records.texts[0]}")
            self._records.texts.clear()

    async def _ask_http(self, call: Any) -> str:
        answer = await asked("127.0.0.1", self._port, call)
        if answer is None:
            if call.breaks_off:
                return "HTTP broken off"
            raise BrokenRule("the connection ends without an answer")
        check_answer(call, answer)
        kind = " stream" if "event-stream" in answer.headers.get("content-type", "") else ""
        return f"HTTP {answer.status}{kind}"

    async def _ask_grpc(self, name: str, message: bytes) -> str:
        is_stream = name == "GenerateStream"
        make = self._channel.unary_stream if is_stream else self._channel.unary_unary
        call = make(f"/{SERVICE_NAME}/{name}", _as_it_is, _as_it_is)(
            message, timeout=_GRPC_WITHIN_S, metadata=self._metadata
        )
        parts: list[bytes] = []
        try:
            if is_stream:
                parts = [part async for part in call]
            else:
                parts = [await call]
        except grpc.RpcError:
            pass
        code, details = await call.code(), await call.details()
        if code not in _GRPC_CODES:
            raise BrokenRule(f"{code}: {details}")
        if code is grpc.StatusCode.OK:
            _check_messages(name, parts)
        else:
            check_message(details)
        return f"gRPC {code.name}"

    async def _check_plain(self, client: httpx.AsyncClient) -> None:
        if (found := await self._plain(client)) != self._plain_answer:
            raise BrokenRule(f"a plain call is answered {found!r}, before it was {self._plain_answer!r}")

    async def _plain(self, client: httpx.AsyncClient) -> Any:
        self._say("a plain answer", 3)
        answer = await client.post("/v1/completions", json=PLAIN)
        return answer.status_code, answer.json()["choices"]

    def _say(self, text: str, chunk_tokens: int) -> None:
        self._router.chunk_tokens = chunk_tokens
        if isinstance(self._router, SayingRouter):
            self._router.say(text)


def _check_messages(name: str, parts: list[bytes]) -> None:
    """Raises BrokenRule for a stream that has no end."""
    if name == "GenerateStream":
        chunks = [pb.GenerateChunk.FromString(part) for part in parts]
        last = {chunk.index: number for number, chunk in enumerate(chunks)}  # message of each answer
        with_reason = [number for number, chunk in enumerate(chunks) if chunk.finish_reason]
        if not chunks or with_reason != sorted(last.values()):
            raise BrokenRule(f"an answer in a stream of {len(chunks)} messages does not end with a reason")
        if [chunk.HasField("usage") for chunk in chunks] != [False] * (len(chunks) - 1) + [True]:
            raise BrokenRule(f"a stream of {len(chunks)} messages does not end with usage")


def _as_it_is(message: bytes) -> bytes:
    return message


class _Records(logging.Handler):
    """Errors and tracebacks in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.texts.append(logging.Formatter().format(record))


@asynccontextmanager
async def hostile_user(gateway: HostileGateway) -> AsyncIterator[HostileUser]:
    """A user of this gateway, which is served in this process."""
    app = create_app(gateway.service, gateway.config)
    installed, front_door._installed = front_door._installed, FrontDoor.of(gateway.config, gateway.access)
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sends at once where it is named
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            _apply_middlewares(app, middlewares()),
            http=LimitedHttpProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
        )
    )
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    grpc_server = _grpc_server(InferenceServicer(gateway.service, gateway.config))
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            yield HostileUser(gateway, app.openapi(), listener.getsockname()[1], channel)
    finally:
        front_door._installed = installed
        await grpc_server.stop(None)
        await server.shutdown(sockets=[listener])


def _grpc_server(servicer: InferenceServicer) -> gRPCGenericServer:
    """Serve's, with the servicer in place of a replica."""

    def factory(service_method: str, streaming_type: str) -> Callable[..., Any]:
        method = getattr(servicer, service_method.rpartition("/")[2])

        async def unary(request: Any, context: Any) -> bytes:
            answer: bytes = (await method(request, context)).SerializeToString()
            return answer

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            async for chunk in method(request, context):
                yield chunk.SerializeToString()

        return unary if streaming_type == "unary_unary" else stream

    server = gRPCGenericServer(factory)
    add_inference(servicer, server)
    assert set(METHODS) <= {name for name in dir(servicer) if not name.startswith("_")}
    return server
