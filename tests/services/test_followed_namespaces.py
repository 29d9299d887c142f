"""The simulation's rule for what a router follows, against the index of production on a real server."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.warm_index import WarmIndex
from cluster.simulate.followed import Followed

MOST = 3
NAMES = [f"owner{number}" for number in range(6)]


@given(st.lists(st.sampled_from(NAMES), max_size=25))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_namespaces_are_followed(namespace, used):
    index = WarmIndex(namespace.open, WarmIndexSettings(directory=None, max_namespaces=MOST, stay_s=0.0))
    followed = Followed(MOST, lambda name: None, lambda name: None)
    try:
        for number, name in enumerate(used):
            index.follow(name)
            followed.use(name, 10.0 * number)
        assert [name in followed for name in NAMES] == [index.automata(name) is not None for name in NAMES]
    finally:
        assert index.close(20)
