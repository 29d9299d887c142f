"""Gateways that fuzzing calls: small limits over an echo, a model that thinks and calls, and one with tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.grammar.grammars import Grammars
from actors.messages import GenerationRequest, TokenChunk
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from paceline_testing.echo_router import EchoRouter
from paceline_testing.saying_router import EOS, THINKING, SayingRouter, saying_service
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer
from paceline_testing.toy_gateway import CONFIG, MODEL, TOKENIZER


class CompilingRouter(SayingRouter):
    """Compiles the grammars of requests as a router does, and then says what it is told to say."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._grammars = Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [EOS], "tiny")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.grammar:
            await asyncio.to_thread(self._grammars.matcher, request.grammar, request.grammar_field)
        async for chunk in super().generate(request):
            yield chunk


@dataclass(frozen=True)
class HostileGateway:
    """access, key: None: no keys are asked for."""

    service: GenerationService
    config: GatewayConfig
    access: TenantAccess | None = None
    key: str | None = None


def toy(_: Path) -> HostileGateway:
    return HostileGateway(GenerationService(EchoRouter(), TOKENIZER, MODEL, CONFIG), CONFIG)


def thinking(_: Path) -> HostileGateway:
    return _thinking()


def tenants(directory: Path) -> HostileGateway:
    """directory: that the registry is written to."""
    key = TenantAdministration(directory / "tenants.json").add("first", {}).key
    access = TenantAccess(directory / "tenants.json", may_be_open=False)
    metrics = GatewayMetrics()
    gatekeeper = Gatekeeper(access, 1, metrics.tenant_refusals, metrics.tenant_registry_failures)
    return _thinking(access, key, metrics=metrics, gatekeeper=gatekeeper)


def _thinking(access: TenantAccess | None = None, key: str | None = None, **options: Any) -> HostileGateway:
    config = GatewayConfig(max_body_bytes=200_000, default_max_tokens=100, request_timeout_s=10, stream_interval_ms=1)
    service, _ = saying_service("", template=THINKING, config=config, **options)
    service.router = CompilingRouter("")
    return HostileGateway(service, config, access, key)


GATEWAYS: dict[str, Callable[[Path], HostileGateway]] = {"toy": toy, "thinking": thinking, "tenants": tenants}
