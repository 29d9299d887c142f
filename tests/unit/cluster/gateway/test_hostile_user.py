"""Random calls by a hostile user to each kind of gateway; `tests/fuzz/fuzz_endpoints.py` makes more of them."""

import pytest

from paceline_testing.echo_router import EchoRouter
from paceline_testing.hostile_door import PLAIN, hostile_user
from paceline_testing.hostile_services import GATEWAYS

CALLS = 120
MOST_RUNS = 10
OUTCOMES = {"HTTP 200", "HTTP 200 stream", "HTTP 400", "gRPC OK", "gRPC INVALID_ARGUMENT"}


@pytest.mark.parametrize("kind", GATEWAYS)
async def test_hostile_calls_break_no_rule(kind, tmp_path):
    async with hostile_user(GATEWAYS[kind](tmp_path)) as user:
        # Which calls a seed makes depends on the schemas, so a run may have none of a kind.
        for seed in range(MOST_RUNS):
            await user.run(seed, CALLS)
            if user.figures.outcomes.keys() >= OUTCOMES:
                break
    assert user.figures.broken == []
    assert user.figures.outcomes.keys() >= OUTCOMES


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
    missing = {"status 500", "StatusCode.INTERNAL", "planted"}
    async with hostile_user(gateway) as user:
        for seed in range(MOST_RUNS):
            await user.run(seed, CALLS)
            missing = {part for part in missing if not any(part in broken for broken in user.figures.broken)}
            if not missing:
                break
    assert not missing
