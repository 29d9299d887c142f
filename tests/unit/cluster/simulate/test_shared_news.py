"""News that all simulated gateways share: the same answers as `HeardRouters`, with fewer looks."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.heard_routers import HeardRouter, HeardRouters
from cluster.routing.warm_blocks import WarmBlocks
from cluster.simulate.router_choice import SharedNews

BLOCKS = st.integers(0, 30)
ROUTERS = st.sampled_from(["a", "b", "c"])
STEPS = st.one_of(
    st.tuples(st.just("use"), ROUTERS, st.lists(BLOCKS, max_size=6)),
    st.tuples(st.just("clear"), ROUTERS, st.none()),
    st.tuples(st.just("ask"), st.none(), BLOCKS),
)


@given(steps=st.lists(STEPS, max_size=60))
def test_the_same_routers_have_a_block_as_by_looking_at_all(steps):
    plain, shared = HeardRouters(), SharedNews(least_had=3)
    for heard in (plain, shared):
        heard.by_id.update({router: HeardRouter(warm=WarmBlocks(8)) for router in "abc"})
    for kind, router, told in steps:
        if kind == "use":
            plain.use(router, told)
            shared.use(router, told)
        elif kind == "clear":
            plain.clear(router)
            shared.clear(router)
        else:
            assert plain.holders(told).keys() == shared.holders(told).keys()
