"""What aggregated routers write and read, against exact ones that commit the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.simulate.events import Events
from cluster.simulate.fluid_cache import FluidCache
from cluster.simulate.followed import Followed
from cluster.simulate.options import CostOptions
from cluster.simulate.shared_log import RouterCache, SharedLog
from paceline_testing.rounds import toy_request

ROUND_S = 0.03
TOKENS = 3  # of a sequence in a round
MOST = 4  # namespaces of a router


class Both:
    """The same answers of the same routers at both levels. Times are whole rounds."""

    def __init__(self, num_routers: int) -> None:
        self.exact_events, self.fluid_events = Events(), Events()
        self.exact = SharedLog(self.exact_events, CostOptions())
        self.fluid = SharedLog(self.fluid_events, CostOptions())
        self.routers = [RouterCache(self.exact, 100, MOST) for _ in range(num_routers)]
        self.fluid_routers = [FluidCache(self.fluid, MOST) for _ in range(num_routers)]
        self.num_tokens = 0

    def answer(self, router: int, namespace: str, first: int, rounds: int) -> None:
        request = toy_request(namespace, [1, 2], max_new_tokens=1000, namespace=namespace)
        exact, fluid = self.routers[router], self.fluid_routers[router]
        document = f"{namespace} {router} {first}".encode()
        begin, end = (number * ROUND_S for number in (first, first + rounds))
        self.exact_events.at(begin, exact.follow, namespace)
        for number in range(rounds + 1):
            tokens = np.full(TOKENS, 7, np.int32)
            at = (first + number) * ROUND_S
            self.exact_events.at(at, exact.committed, namespace, document, TOKENS * number, tokens)
        self.fluid_events.at(begin, fluid.use, request)
        self.fluid_events.at(begin, fluid.begin, request, begin)
        self.fluid_events.at(end, fluid.end, request, end, ROUND_S, TOKENS * (rounds + 1))
        self.num_tokens += TOKENS * (rounds + 1)

    def run(self, until: float) -> None:
        self.exact_events.run(until)
        self.fluid_events.run(until)


answers = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from("abc"), st.integers(0, 100), st.integers(1, 150)),
    min_size=1,
    max_size=12,
    unique_by=lambda one: one[:3],
)


@given(answers)
@settings(deadline=None, max_examples=60)
def test_the_bytes_and_messages_are_those_of_exact_routers(told):
    both = Both(2)
    for one in told:
        both.answer(*one)
    both.run(19.0)  # one fold is in it
    exact, fluid = both.exact.meter.traffic, both.fluid.meter.traffic
    # Up to an entry more or less for each answer, which both routers may read. An aggregated one writes when an answer
    # ends, and more may follow then than when it began.
    assert fluid.written == pytest.approx(exact.written, rel=0.1, abs=80 * len(told))
    assert fluid.read == pytest.approx(exact.read, rel=0.2, abs=2 * 80 * len(told))
    assert fluid.messages == pytest.approx(exact.messages, rel=0.3, abs=3 * len(told))


def test_each_follower_reads_what_is_written():
    both = Both(3)
    for router in range(3):
        both.answer(router, "a", 0, 1)
    for router in range(3):
        both.answer(router, "a", 100, 200)
    both.run(9.9)
    for traffic in (both.exact.meter.traffic, both.fluid.meter.traffic):
        assert traffic.read == pytest.approx(3 * traffic.written, rel=0.02)
    assert both.fluid.meter.traffic.read == pytest.approx(both.exact.meter.traffic.read, rel=0.05)


def test_nothing_is_written_or_read_while_the_store_is_away_and_all_of_it_later():
    both = Both(1)
    both.answer(0, "a", 10, 50)
    both.answer(0, "b", 20, 60)
    for events, log in ((both.exact_events, both.exact), (both.fluid_events, both.fluid)):
        events.at(0.1, log.lose)
        events.at(12.0, log.bring)
    both.run(11.9)
    for log in (both.exact, both.fluid):
        assert log.meter.traffic.written == log.meter.traffic.read == log.meter.traffic.messages == 0
    both.run(15.0)
    for log in (both.exact, both.fluid):
        assert log.meter.traffic.written == pytest.approx(2.5 * both.num_tokens + 2 * 80)
        assert log.meter.traffic.read == pytest.approx(log.meter.traffic.written)


def test_a_router_that_is_gone_reads_nothing_more():
    both = Both(2)
    both.answer(0, "a", 0, 1)
    both.answer(1, "a", 0, 1)
    both.run(1.0)
    both.routers[0].close()
    both.fluid_routers[0].close()
    before = [(log.meter.traffic.written, log.meter.traffic.read) for log in (both.exact, both.fluid)]
    both.answer(1, "a", 100, 50)
    both.run(9.0)
    for log, (written, read) in zip((both.exact, both.fluid), before, strict=True):
        assert log.meter.traffic.read - read == pytest.approx(log.meter.traffic.written - written)
        assert log.meter.traffic.written > written


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.0, 8.0)), max_size=40))
def test_what_was_used_a_moment_ago_stays(told):
    begun: list[str] = []
    ended: list[str] = []
    followed, now, last_use = Followed(MOST, begun.append, ended.append), 0.0, {}
    for number, pause_s in told:
        now += pause_s
        name = str(number)
        there = {name for name in map(str, range(7)) if name in followed}
        followed.use(name, now)
        gone = {name for name in there if name not in followed}
        assert len(gone) <= 1
        for loser in gone:
            assert now - last_use[loser] >= 5.0
            assert last_use[loser] == min(last_use[name] for name in there)
        if name not in followed:
            assert len(there) == MOST
        else:
            last_use[name] = now
    kept = {name for name in map(str, range(7)) if name in followed}
    assert len(begun) - len(ended) == len(kept) <= MOST
