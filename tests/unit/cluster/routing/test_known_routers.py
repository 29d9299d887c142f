"""Whom a gateway sends a request to, by what routers have said."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import KeysView
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import Refusal
from cluster.routing.heard_routers import HeardRouters
from cluster.routing.known_routers import KnownRouters, RoutedPrompt, repeated_blocks, routed_prompt
from cluster.routing.prefix_blocks import BLOCK_TOKENS
from cluster.routing.replica_choice import soonest_first
from cluster.routing.router_load import RouterLoad, ahead_of, expected_s
from cluster.routing.router_news import RouterNews, packed
from paceline_testing.rounds import toy_request
from paceline_testing.router_loads import IDLE

NAMESPACE = 7


def news(router_id: str, blocks: tuple[int, ...] = (), **fields: Any) -> RouterNews:
    load = {key: fields.pop(key) for key in [*fields] if key in RouterLoad.__struct_fields__}
    given: dict[str, Any] = {
        "load": msgspec.structs.replace(IDLE, **load),
        "num_gateways": 1,
        "num_blocks": 100,
        "is_whole": False,
    }
    return RouterNews(router_id=router_id, blocks=packed([*blocks, NAMESPACE]), **{**given, **fields})


def known(*heard: RouterNews) -> KnownRouters:
    routers = KnownRouters(random.Random(1))
    for one in heard:
        routers.hear(one, 0.0)
    return routers


def prompt(*blocks: int) -> RoutedPrompt:
    return RoutedPrompt(BLOCK_TOKENS * len(blocks) + 5, blocks, NAMESPACE)


def keys(*names: str) -> KeysView[str]:
    return dict.fromkeys(names).keys()


def first(routers: KnownRouters, one: RoutedPrompt, now: float = 0.0) -> list[str]:
    return routers.ranks(keys("a", "b", "c"), one, now)[0]


def test_a_prompt_goes_where_most_of_it_is_known():
    routers = known(news("a", (2, 1)), news("b", (3, 2, 1)), news("c", (3, 2)))  # c lacks the beginning
    assert routers.ranks(keys("a", "b", "c"), prompt(1, 2, 3), 0.0) == [["b"], ["a"], ["c"]]


def test_a_router_that_is_busy_for_longer_than_the_prompt_takes_is_left_alone():
    warm_and_busy = news("a", (2, 1), backlog_tokens=1000)
    assert first(known(warm_and_busy, news("b"), news("c", backlog_tokens=9)), prompt(1, 2)) == ["b"]
    warm_and_full = news("a", (2, 1), num_running=4, num_waiting=1)
    assert first(known(warm_and_full, news("b"), news("c", num_running=1)), prompt(1, 2)) == ["b"]
    warm_with_company = news("a", (2, 1), num_running=2)
    assert first(known(warm_with_company, news("b"), news("c")), prompt(1, 2)) == ["a"]


def test_what_is_sent_counts_until_the_router_has_said_more():
    routers = known(news("a"), news("b", num_running=2), news("c", num_running=2))
    routers.sent("a", prompt(1))
    assert first(routers, prompt(9)) != ["a"]
    assert first(routers, prompt(1, 2)) == ["a"]  # it will have the beginning
    routers.hear(news("a"), 0.0)
    assert first(routers, prompt(9)) == ["a"]
    assert first(routers, prompt(1, 2)) == ["a"]


def test_each_of_several_gateways_takes_it_that_the_others_send_as_much():
    alone, beside_others = (known(news("a", num_gateways=count), news("b", num_running=3)) for count in (1, 8))
    for routers in (alone, beside_others):
        routers.sent("a", prompt())
    assert [routers.ranks(keys("a", "b"), prompt(), 0.0)[0] for routers in (alone, beside_others)] == [["a"], ["b"]]


def test_a_router_whose_few_answers_were_long_gets_requests_all_the_same():
    routers = known(news("a", answer_rounds=130.0), news("b", answer_rounds=60.0, num_running=2))
    assert routers.ranks(keys("a", "b"), prompt(), 0.0)[0] == ["a"]


def test_gateways_that_hear_together_send_each_for_itself():
    heard = HeardRouters()
    one, other = (KnownRouters(random.Random(1), heard) for _ in range(2))
    one.hear(news("a"), 0.0)
    one.hear(news("b", num_running=2), 0.0)
    for _ in range(3):
        one.sent("a", prompt(1))
    assert one.ranks(keys("a", "b"), prompt(9), 0.0)[0] == ["b"]
    assert other.ranks(keys("a", "b"), prompt(9), 0.0)[0] == ["a"]


def test_equal_routers_take_turns_by_chance():
    routers = known(news("a"), news("b"), news("c"))
    chosen = Counter(first(routers, prompt(1))[0] for _ in range(300))
    assert set(chosen) == {"a", "b", "c"}


def test_a_router_that_is_not_heard_gets_its_share_and_one_that_is_closed_comes_last():
    routers = known(news("a"), news("b", load=None))
    ranks = [routers.ranks(keys("a", "b", "c"), prompt(1), 1.0) for _ in range(400)]
    assert {*map(str, ranks)} == {"[['a'], ['c'], ['b']]", "[['a', 'c'], ['b']]"}
    assert 100 < sum("c" in rank[0] for rank in ranks) < 300  # half of what the two get, unless its queue is longer
    late = [routers.ranks(keys("a", "c"), prompt(1), 9.0) for _ in range(5)]  # nobody is heard any more
    assert all(sorted(rank) == ["a", "c"] for ranks in late for rank in ranks)


def test_whole_news_replace_what_was_known_and_gone_routers_are_forgotten():
    routers = known(news("a", (1,)), news("b"), news("a", (), is_whole=True, num_running=1), news("c", num_running=2))
    assert first(routers, prompt(1)) == ["b"]
    routers.forget_all_but({"a", "c"})
    assert [rank for rank in routers.ranks(keys("a", "b", "c"), prompt(1), 0.0) if rank != ["b"]] == [["a"], ["c"]]


def test_no_more_is_remembered_than_the_router_has_room_for():
    routers = known(news("a", (3, 2, 1), num_blocks=3), news("b", num_running=1), news("c", num_running=1))
    assert first(routers, prompt(1, 2, 3)) == ["a"]
    assert len(routers._heard.by_id["a"].warm) == 3
    without_cache = known(news("a", (3, 2, 1), num_blocks=0, num_running=1), news("b"), news("c"))
    assert first(without_cache, prompt(1, 2, 3)) != ["a"]


def test_news_that_is_damaged_is_refused():
    with pytest.raises(ValueError, match="multiple of element size"):
        known(msgspec.structs.replace(news("a"), blocks=b"123"))


def test_a_new_namespace_costs_the_rounds_that_the_shared_cache_saves():
    load = msgspec.structs.replace(IDLE, cache_gain=0.5)
    warm, cold = (expected_s(ahead_of(load), 10, answer_rounds=50, knows_namespace=knows) for knows in (True, False))
    assert cold - warm == pytest.approx(50 * 0.01 * 0.5)


def test_the_queue_is_waited_for():
    """All four places are taken and two wait: three answers end before it gets a place, four at a time."""
    load = msgspec.structs.replace(IDLE, num_running=4, num_waiting=2)
    answer_s = 50 * (0.01 + 3 * 0.001)
    assert expected_s(ahead_of(load), 10, answer_rounds=load.answer_rounds, knows_namespace=True) == pytest.approx(
        answer_s * (1 + 3 / 4) + 0.01
    )


@pytest.mark.parametrize(("holders", "chosen"), [("a", ["a"]), ("abc", ["d"])])
def test_a_beginning_that_one_router_alone_has_is_left_less_readily(holders, chosen):
    """Three others make an answer 150 ms longer, and 64 tokens take 64 ms: two thirds more where three routers have
    them, three times as long where one does."""
    routers = known(news("d"), *(news(name, (1,) * (name in holders), num_running=3) for name in "abc"))
    assert routers.ranks(keys(*"abcd"), prompt(1), 0.0)[0] == chosen


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(0, 9)))
def test_blocks_that_are_computed_again_count_by_how_many_have_them(num_leading):
    repeated, by_others = repeated_blocks(num_leading)
    assert repeated.keys() == num_leading.keys()
    for router_id, found in {**repeated, "another": by_others}.items():
        begin = num_leading.get(router_id, 0)
        holders = [sum(other > block for other in num_leading.values()) for block in range(begin, 9)]
        assert found == pytest.approx(sum(1 / count for count in holders if count))


def test_of_many_routers_those_that_know_most_of_a_prompt_are_compared_with_some_others():
    """All know the beginning, some more, one the most; which of the others are compared is left to chance."""
    names = [f"r{number}" for number in range(400)]
    routers = known(*(news(name, (12, 11)) for name in names), news("r7", (16, 15, 14, 13)), news("r8", (14, 13)))
    for end in range(17, 25):
        assert routers.ranks(keys(*names), prompt(*range(11, end)), 0.0)[0] == ["r7"]
    seen = Counter[str]()
    for _ in range(300):
        compared = [name for rank in routers.ranks(keys(*names), prompt(*range(11, 17)), 0.0) for name in rank]
        assert len(compared) in (16, 17)
        assert len(set(compared)) == len(compared)
        seen.update(compared)
    assert seen["r7"] == 300
    assert max(count for name, count in seen.items() if name != "r7") < 40
    for nobody_knows in ((9, 8), ()):
        assert sum(map(len, routers.ranks(keys(*names), prompt(*nobody_knows), 0.0))) == 16


def test_a_router_that_has_refused_a_request_gets_it_only_where_no_other_is_ready():
    routers = known(news("a"), news("b", num_running=4, num_waiting=9))
    request = toy_request()
    refused = msgspec.structs.replace(request, refusal=Refusal("a", 1.0))
    assert [*soonest_first(routers, {"a": 1, "b": 2}, request, routed_prompt(request), 0.0)] == [[1], [2]]
    assert [*soonest_first(routers, {"a": 1, "b": 2}, refused, routed_prompt(refused), 0.0)] == [[2], [1]]
    assert [*soonest_first(routers, {"a": 1}, refused, routed_prompt(refused), 0.0)] == [[1]]
    assert [*soonest_first(routers, {"b": 2}, refused, routed_prompt(refused), 0.0)] == [[2]]


@pytest.mark.parametrize("meanwhile", [(), (news("a"), news("b", num_running=1))], ids=["at once", "after news"])
def test_a_router_that_has_refused_a_request_is_not_taken_to_have_its_prompt(meanwhile):
    tokens = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    request = msgspec.structs.replace(toy_request(), prompt_token_ids=tokens)
    whole = routed_prompt(request)
    routers = known(news("a", (whole.blocks[0],)), news("b", num_running=1), news("c", num_running=2))
    ready = {name: name for name in "abc"}
    assert next(soonest_first(routers, ready, request, routed_prompt(request), 0.0)) == ["a"]
    for one in meanwhile:
        routers.hear(one, 0.0)
    refused = msgspec.structs.replace(request, refusal=Refusal("a", 1.0))
    assert next(soonest_first(routers, ready, refused, routed_prompt(refused), 0.0)) == ["b"]
    assert first(routers, whole) == ["b"]
    assert routers.ranks(keys("a", "c"), prompt(whole.blocks[0]), 0.0)[0] == ["a"]  # it still has what it said it has


def test_what_a_router_computes_of_a_refused_prompt_for_others_is_kept():
    request = msgspec.structs.replace(toy_request(), prompt_token_ids=np.arange(2 * BLOCK_TOKENS, dtype=np.int32))
    blocks = tuple(routed_prompt(request).blocks)
    routers = known(news("a"), news("b"))
    routers.sent("a", routed_prompt(request))
    routers.hear(news("a", blocks[:1]), 0.0)
    routers.refused("a", routed_prompt(request))
    assert [block in routers._heard.by_id["a"].warm for block in blocks] == [True, False]
