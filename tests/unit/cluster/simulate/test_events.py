"""The order in which simulated events happen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulate.events import Events

TIMES = st.floats(0.0, 5.0) | st.sampled_from([0.0, 1.0, 2.0, 4.0])


@given(planned=st.lists(st.tuples(TIMES, st.lists(TIMES, max_size=3)), max_size=12), stops=st.lists(TIMES, max_size=3))
def test_events_happen_by_time_and_those_of_one_moment_as_they_were_planned(planned, stops):
    """Each event plans others when it happens; the run stops in between."""
    events = Events()
    order: list[tuple[float, int]] = []  # when each was to happen
    happened: list[tuple[float, int]] = []

    def plan(time: float, then: list[float]) -> None:
        order.append((max(time, events.now), len(order)))
        events.at(time, happen, order[-1], then)

    def happen(planned: tuple[float, int], then: list[float]) -> None:
        assert events.now == planned[0]
        happened.append(planned)
        for time in then:
            plan(time, [])

    for time, then in planned:
        plan(time, then)
    for until in sorted(stops):
        events.run(until)
        assert events.now == until
        assert happened == sorted(one for one in order if one[0] <= until)
    events.run(5.0)
    assert happened == sorted(order)
    assert events.num_done == len(order)
