"""Requests whose router is lost or refuses them: when they are tried again, and where."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from actors.errors import ObjectiveUnreachable, Overloaded, RouterLost
from actors.messages import GenerationRequest, Refusal, TokenChunk
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


class Refusing:
    """Routers that refuse one request after the other with these errors, and then answer."""

    def __init__(self, *errors: Overloaded) -> None:
        self.asked: list[Refusal | None] = []
        self._errors = list(errors)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        self.asked.append(request.refusal)
        if self._errors:
            raise self._errors.pop(0)
        yield TokenChunk(request_id=request.request_id, index=0, token_ids=(7, 7, 7), finish_reason="length")


def unreachable(router_id: str, retry_after_s: float) -> Overloaded:
    return refused(router_id, retry_after_s, ObjectiveUnreachable)


def refused(router_id: str, retry_after_s: float, kind: type[Overloaded] = Overloaded) -> Overloaded:
    error = kind("late", retry_after_s)
    error.router_id = router_id
    return error


async def answer_of(routers: Refusing) -> list[int]:
    router: RouterClient = routers  # type: ignore[assignment]
    return [token async for chunk in generate_unbroken(router, REQUEST, lambda: None) for token in chunk.token_ids]


@pytest.mark.parametrize("kind", [ObjectiveUnreachable, Overloaded])
async def test_where_one_router_refuses_one_other_is_asked_and_told_of_it(kind: type[Overloaded]) -> None:
    routers = Refusing(refused("a", 2.0, kind))
    assert await answer_of(routers) == [7, 7, 7]
    assert routers.asked == [None, Refusal("a", 2.0)]

    routers = Refusing(refused("a", 2.0, kind), second := refused("", 1.5, kind))
    with pytest.raises(kind) as raised:
        await answer_of(routers)
    assert raised.value is second
    assert len(routers.asked) == 2


@pytest.mark.parametrize("error", [unreachable("", 2.0), Overloaded("full", 2.0)])
async def test_no_other_router_is_asked_where_there_is_none(error: Overloaded) -> None:
    routers = Refusing(error)
    with pytest.raises(Overloaded) as raised:
        await answer_of(routers)
    assert raised.value is error
    assert len(routers.asked) == 1


class Scripted:
    """Routers that deliver one token each time, and then end with these errors, one after the other: none, at last."""

    def __init__(self, clock: Waits, *errors: RouterLost | Overloaded) -> None:
        self.asked: list[tuple[float, Refusal | None]] = []
        self._clock = clock
        self._errors = list(errors)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        self.asked.append((self._clock.now, request.refusal))
        error = self._errors.pop(0) if self._errors else None
        if isinstance(error, Overloaded):
            raise error
        reason = None if error else "length"
        yield TokenChunk(request_id=request.request_id, index=0, token_ids=(7,), finish_reason=reason)
        if error:
            raise error


async def asked_of(
    monkeypatch: pytest.MonkeyPatch, *errors: RouterLost | Overloaded
) -> list[tuple[float, Refusal | None]]:
    clock = Waits()
    monkeypatch.setattr(resume, "asyncio", clock)
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: clock.now))
    routers = Scripted(clock, *errors)
    router: RouterClient = routers  # type: ignore[assignment]
    async for _ in generate_unbroken(router, REQUEST, lambda: None):
        pass
    return routers.asked


async def test_a_stream_that_one_router_would_delay_goes_on_at_another_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = RouterLost("gone"), unreachable("a", 9.0), unreachable("", 4.0)
    (_, lost, one, other) = await asked_of(monkeypatch, *errors)
    assert lost == (0.05, None)
    assert one == (0.05, Refusal("a", 9.0))
    assert other == (4.05, None)  # after the pause any router may have room


async def test_a_refusal_of_before_the_first_token_is_not_held_against_the_router_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = await asked_of(monkeypatch, unreachable("a", 2.0), RouterLost("gone"))
    assert [refusal for _, refusal in asked] == [None, Refusal("a", 2.0), None]
