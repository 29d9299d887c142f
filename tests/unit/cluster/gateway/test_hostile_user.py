"""Random calls by a hostile user to each kind of gateway; `tests/fuzz/fuzz_endpoints.py` makes more of them."""

import pytest

from paceline_testing.echo_router import EchoRouter
from paceline_testing.hostile_door import PLAIN, hostile_user
from paceline_testing.hostile_services import GATEWAYS

CALLS = 120


@pytest.mark.parametrize("kind", GATEWAYS)
async def test_hostile_calls_break_no_rule(kind, tmp_path):
    async with hostile_user(GATEWAYS[kind](tmp_path)) as user:
        await user.run(seed=0, count=CALLS)
    assert user.figures.broken == []
    seen = user.figures.outcomes
    assert seen.total() == CALLS
    for outcome in ("HTTP 200", "HTTP 200 stream", "HTTP 400", "gRPC OK", "gRPC INVALID_ARGUMENT"):
        assert seen[outcome] >= 2, seen


class FaultyRouter(EchoRouter):
    """Answers nothing but plain calls."""

    async def generate(self, request):
        if request.max_new_tokens != PLAIN["max_tokens"]:
            raise RuntimeError("planted")
        async for chunk in super().generate(request):
            yield chunk


async def test_faults_of_a_gateway_are_found(tmp_path):
    gateway = GATEWAYS["toy"](tmp_path)
    gateway.service.router = FaultyRouter()
    async with hostile_user(gateway) as user:
        await user.run(seed=0, count=CALLS)
    for part in ("status 500", "StatusCode.INTERNAL", "planted"):
        assert any(part in broken for broken in user.figures.broken), part
