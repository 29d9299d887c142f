"""An echoing router whose chunks go beside Serve, as those of real routers do."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable

import msgspec

from actors.links.keys import LinkKeys
from actors.messages import GenerationRequest, TokenChunk
from actors.workers.directory_actor import read_client_keys
from cluster.routing.chunk_streams import ChunkSender
from cluster.routing.publisher import Publisher
from cluster.routing.router_status import RouterStatus
from paceline_testing.echo_router import EchoRouter


class LinkedRouter(EchoRouter):
    """`open` it before use. loses: whether the n-th chunk that is sent is lost on the way."""

    def __init__(
        self,
        chunk_tokens: int = 3,
        delay_s: float = 0.0,
        max_running: int = 1000,
        directory_name: str = "",
        loses: Callable[[int], bool] = lambda number: False,
    ) -> None:
        super().__init__(chunk_tokens, delay_s, max_running)
        self._directory_name = directory_name
        self._loses = loses
        self._numbers = itertools.count()
        self.num_sent = 0
        self.publisher: Publisher | None = None

    def open(self, keys: LinkKeys) -> None:
        self.publisher = Publisher([keys.public], "127.0.0.1")
        self.sender = ChunkSender(self.publisher)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        assert self.publisher is not None
        self.publisher.meet()
        async for chunk in super().generate(request):
            if chunk.finish_reason is None and self.sender.reaches(request.gateway):
                if not self._loses(next(self._numbers)):
                    self.sender.send(request.gateway, chunk)
                    self.num_sent += 1
            else:
                yield chunk

    async def status(self) -> RouterStatus:
        if self.publisher is None:
            self.open(await read_client_keys(self._directory_name))
        assert self.publisher is not None
        return msgspec.structs.replace(await super().status(), told_by=("linked", self.publisher.address))
