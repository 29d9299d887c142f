"""Requests whose router is lost: when they are tried again."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from actors.errors import RouterLost
from actors.messages import GenerationRequest, TokenChunk
from actors.workers.directory import TTL_S
from cluster.gateway import resume
from cluster.gateway.resume import generate_unbroken
from cluster.gateway.router_client import RouterClient
from paceline_testing.rounds import toy_request

REQUEST = toy_request(max_new_tokens=3)


class Waits:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Routers:
    """One is lost after its first token; until `there_at` all others stand by."""

    def __init__(self, clock: Waits, there_at: float) -> None:
        self._clock = clock
        self._there_at = there_at
        self._is_first = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        begun = request.num_output_in_prompt
        if self._is_first:
            self._is_first = False
            yield TokenChunk(request_id=request.request_id, index=0, token_ids=(7,))
            raise RouterLost("the router is gone")
        if self._clock.now < self._there_at:
            raise RouterLost("this router has no target group; others have")
        yield TokenChunk(request_id=request.request_id, index=0, token_ids=(7, 7, 7)[begun:], finish_reason="length")


@pytest.mark.parametrize("begins_by", [TTL_S, TTL_S + 0.5, TTL_S + 3.0])
async def test_a_stream_goes_on_soon_after_a_router_that_stood_by_has_the_group_of_the_lost_one(
    monkeypatch: pytest.MonkeyPatch, begins_by: float
) -> None:
    clock = Waits()
    monkeypatch.setattr(resume, "asyncio", clock)
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: clock.now))
    router: RouterClient = Routers(clock, begins_by)  # type: ignore[assignment]
    tokens: list[int] = []
    async for chunk in generate_unbroken(router, REQUEST, lambda: None):
        tokens += chunk.token_ids
    assert tokens == [7, 7, 7]
    assert clock.now - begins_by < 2.0
