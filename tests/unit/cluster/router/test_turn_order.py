"""The order in which sequences of a class take places: `cluster.router.turn_order`."""

import random
from types import SimpleNamespace

import pytest

from cluster.router.fair_turns import FairTurns
from cluster.router.turn_order import TurnOrder


@pytest.mark.parametrize("seed", range(20))
def test_the_first_is_the_least_of_those_who_are_left_whatever_tenants_are_charged(seed):
    rng = random.Random(seed)
    left = [
        SimpleNamespace(
            seq_id=index, arrival=index, request=SimpleNamespace(tenant=rng.choice("abc")),
            urgency=(rng.random() < 0.5, rng.random() < 0.5),
        )
        for index in range(30)
    ]  # fmt: skip
    turns = FairTurns()
    turns.charge("a", 1.0, 5.0)
    order = TurnOrder(left, lambda one: one.urgency, turns)
    while left:
        least = min(left, key=lambda one: (*one.urgency, turns.spent(one.request.tenant), one.arrival))
        assert order.first() is order.first() is least
        entered = rng.choice([least, least, rng.choice(left)])  # now and then another has the place
        left.remove(entered)
        order.leave(entered)
        turns.charge(entered.request.tenant, 1.0, rng.randrange(9))
    assert order.first() is None
