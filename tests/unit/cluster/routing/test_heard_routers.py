"""Who has the first block of a prompt, against a look at all routers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.heard_routers import HeardRouter, HeardRouters
from cluster.routing.prefix_blocks import first_blocks
from cluster.routing.warm_blocks import WarmBlocks

ROUTERS, BLOCKS = st.sampled_from("abcd"), st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), ROUTERS, st.lists(BLOCKS, max_size=5), st.booleans()),
        st.tuples(st.just("drop"), ROUTERS, st.lists(BLOCKS, max_size=3)),
        st.tuples(st.just("forget"), ROUTERS),
        st.tuples(st.just("clear"), ROUTERS),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_the_index_has_all_first_blocks_and_no_others(steps):
    routers = HeardRouters()
    for step in steps:
        match step:
            case "use", router_id, blocks, is_assumed:
                known = routers.by_id.setdefault(router_id, HeardRouter())
                known.warm.capacity = 4
                routers.use(router_id, blocks, is_assumed=is_assumed)
            case "forget", router_id if router_id in routers.by_id:
                routers.forget(router_id)
            case "clear", router_id if router_id in routers.by_id:
                routers.clear(router_id)
            case "drop", router_id, blocks if router_id in routers.by_id:
                routers.drop_assumed(router_id, blocks)
        index: dict[int, dict[str, WarmBlocks]] = {}
        for router_id, known in routers.by_id.items():
            for block in first_blocks(known.warm):
                index.setdefault(block, {})[router_id] = known.warm
        assert routers._holders == index
