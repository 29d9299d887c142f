"""Values that expire."""

from hypothesis import given
from hypothesis import strategies as st

from actors.workers.leases import Leases
from paceline_testing.clock import Clock

NAMES = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("renew"), NAMES, st.sampled_from([1.0, 2.0, 16.0])),
        st.tuples(st.just("pop"), NAMES, st.just(0.0)),
        st.tuples(st.just("pass"), st.just(""), st.sampled_from([0.5, 1.0, 1.5, 10.0])),
    ),
    max_size=30,
)


@given(STEPS)
def test_each_lasts_its_own_time_whatever_the_others_last(steps):
    clock = Clock()
    leases: Leases[int] = Leases(clock)
    held: dict[str, tuple[int, float]] = {}  # values, and when they end
    for number, (kind, name, seconds) in enumerate(steps):
        if kind == "renew":
            leases.renew(name, number, seconds)
            held[name] = number, clock.now + seconds
        elif kind == "pop":
            assert leases.pop(name) == held.pop(name, (None, 0.0))[0]
        else:
            clock.now += seconds
        ended = {name: held.pop(name)[0] for name, (_, ends_at) in list(held.items()) if ends_at < clock.now}
        assert dict(leases.expire()) == ended
        assert sorted(leases.values()) == sorted(value for value, _ in held.values())
        assert len(leases) == len(held)
        assert all((name in leases) == (name in held) for name in "abcd")
        assert all(leases.get(name) == held.get(name, (None, 0.0))[0] for name in "abcd")
