"""What a gateway knows of routers without asking them."""

from hypothesis import given
from hypothesis import strategies as st

from actors.links.keys import LinkAddress, LinkKeys
from cluster.routing.heard_statuses import _STALE_S, HeardStatuses
from cluster.routing.router_status import RouterStatus

ADDRESSES = {name: LinkAddress(f"tcp://{name}:1", LinkKeys.generate().public) for name in "abc"}
READY, WAITING = RouterStatus(ready=True, live=True), RouterStatus(ready=False, live=True)


def test_statuses_are_known_as_long_as_all_listed_routers_are_heard():
    statuses = HeardStatuses()
    assert statuses.current(0.0) is None  # Serve lists nobody
    statuses.follow({name: ADDRESSES[name] for name in "ab"}, 2)
    statuses.hear("a", READY, 0.0)
    assert statuses.current(0.0) is None
    statuses.hear("b", WAITING, 1.0)
    assert statuses.current(1.0) == [READY, WAITING]
    statuses.hear("a", WAITING, 2.0)
    assert statuses.current(2.0) == [WAITING, WAITING]
    assert statuses.current(1.0 + _STALE_S + 0.1) is None  # b is silent
    statuses.follow({"a": ADDRESSES["a"]}, 1)
    assert statuses.current(1.0 + _STALE_S + 0.1) == [WAITING]
    statuses.follow({"a": ADDRESSES["a"]}, 2)  # the other one has not said where it is heard
    assert statuses.current(2.0) is None


def test_a_router_that_is_not_listed_is_not_counted():
    statuses = HeardStatuses()
    statuses.follow({"a": ADDRESSES["a"]}, 1)
    statuses.hear("b", READY, 0.0)
    statuses.hear("a", WAITING, 0.0)
    assert statuses.current(0.0) == [WAITING]
    statuses.follow({}, 0)
    assert statuses.current(0.0) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["heard", "listed", "gone"]), st.floats(0, 2))))
def test_what_is_known_is_the_last_word_of_each_listed_router_and_is_recent(steps):
    statuses, listed, words, now = HeardStatuses(), set(), {}, 0.0
    for number, (name, step, passed) in enumerate(steps):
        now += passed
        if step == "heard":
            status = RouterStatus(ready=True, live=True, detail=str(number))
            statuses.hear(name, status, now)
            if name in listed:
                words[name] = status, now
        else:
            listed = listed | {name} if step == "listed" else listed - {name}
            words = {one: word for one, word in words.items() if one in listed}
            statuses.follow({one: ADDRESSES[one] for one in listed}, len(listed))
        expected = None
        if listed and words.keys() == listed and all(now - at <= _STALE_S for _, at in words.values()):
            expected = {status.detail for status, _ in words.values()}
        known = statuses.current(now)
        assert (known if known is None else {status.detail for status in known}) == expected
