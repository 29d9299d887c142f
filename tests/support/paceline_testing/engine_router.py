"""A router for a gateway that is a local engine: real answers of a real model, without Ray."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from actors.messages import GenerationRequest, TokenChunk
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.offline.engine import LocalEngine
from cluster.routing.router_status import RouterStatus


class EngineRouter:
    """A `RouterClient`. Requests run one after the other in a thread of the engine's own."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.requests: list[GenerationRequest] = []
        self._thread = ThreadPoolExecutor(1)
        self._turns: defaultdict[asyncio.AbstractEventLoop, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each test

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        loop = asyncio.get_running_loop()
        self.requests.append(request)
        async with self._turns[loop]:
            await loop.run_in_executor(self._thread, self._check_grammar, request)
            chunks = self.engine._chunks([request], {}, None)
            try:
                while (chunk := await loop.run_in_executor(self._thread, _next, chunks)) is not None:
                    yield chunk
            finally:
                await loop.run_in_executor(self._thread, chunks.close)

    def _check_grammar(self, request: GenerationRequest) -> None:
        if request.grammar:
            self.engine._grammars.matcher(request.grammar, request.grammar_field)

    async def status(self) -> RouterStatus:
        return RouterStatus(ready=True, live=True, detail="engine", max_model_len=None)

    async def metrics_text(self) -> str:
        return ""


def _next(chunks: Iterator[TokenChunk]) -> TokenChunk | None:
    return next(chunks, None)


def engine_service(directory: Path, config: GatewayConfig | None = None, **options: Any) -> GenerationService:
    """A gateway's service over a local engine on a model. options: of the engine."""
    engine = LocalEngine(str(directory), device="cpu", **options)
    info = engine.info
    model = ServedModel(
        name=info.name,
        max_model_len=engine.core.max_model_len,
        vocab_size=engine.target.vocab_size,
        eos_token_ids=info.eos_token_ids,
        drafters=engine.core.source_names,
    )
    return GenerationService(EngineRouter(engine), engine.tokenizer, model, config or GatewayConfig())
