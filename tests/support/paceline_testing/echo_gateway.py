"""A gateway over an echoing router, without Serve: in this process, or on ports of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import uvicorn
from grpc_reflection.v1alpha import reflection

from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.http_app import create_app
from cluster.gateway.paceline.v1.inference_pb2 import DESCRIPTOR
from cluster.gateway.paceline.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_tokenizer import toy_tokenizer


def gateway_client(service: GenerationService, config: GatewayConfig, **options: Any) -> httpx.AsyncClient:
    """A client of the HTTP face in this process. options: of `create_app`."""
    transport = httpx.ASGITransport(create_app(service, config, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def until(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be")


@contextmanager
def echo_gateway(
    name: str,
    eos_token_ids: tuple[int, ...] = (),
    router: EchoRouter | None = None,
    chat_template: str | None = None,
    max_requests: int | None = None,
    **options: Any,
) -> Iterator[tuple[str, str, EchoRouter]]:
    """Serves a model of this name from another thread: "host:port" of HTTP and of gRPC, and the router. options: of
    `GenerationService`. chat_template: None: the toy tokenizer's own. max_requests: what clients are told."""
    router, config, tokenizer = router or EchoRouter(), GatewayConfig(), toy_tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    model = ServedModel(
        name, max_model_len=512, vocab_size=len(tokenizer), eos_token_ids=eos_token_ids, max_requests=max_requests
    )
    service = GenerationService(router, tokenizer, model, config, **options)
    with served(service, config) as addresses:
        yield *addresses, router


@contextmanager
def served(service: GenerationService, config: GatewayConfig) -> Iterator[tuple[str, str]]:
    """Serves from another thread: "host:port" of HTTP and of gRPC."""
    addresses: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = uvicorn.Server(uvicorn.Config(create_app(service, config), port=0, log_level="error", lifespan="off"))
        running = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        addresses.append(f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        grpc_server = grpc.aio.server()
        add_InferenceServicer_to_server(InferenceServicer(service, config), grpc_server)
        names = [service.full_name for service in DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], grpc_server)
        addresses.append(f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}")
        await grpc_server.start()
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()
        await grpc_server.stop(None)
        server.should_exit = True
        await running

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield addresses[0], addresses[1]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)
