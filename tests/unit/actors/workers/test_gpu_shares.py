"""Ranks and draft workers on the GPUs that there are."""

import pytest

from actors.workers.gpu_shares import GpuDemand, GpuShares, needed_gpus, share_gpus

ONE_OF_EACH = GpuDemand(1, 1, 1)


@pytest.mark.parametrize(
    ("nodes", "least", "most", "shares"),
    [
        # enough for all
        ([2], ONE_OF_EACH, ONE_OF_EACH, (1, 1)),
        ([8, 1], GpuDemand(1, 8, 1), GpuDemand(1, 8, 1), (1, 1)),
        ([1], GpuDemand(1, 1, 0), GpuDemand(1, 1, 0), (1, 1)),  # no draft worker on a GPU
        ([1], GpuDemand(0, 1, 1), GpuDemand(0, 1, 1), (1, 1)),  # a target on CPUs
        # draft workers among themselves, ranks alone
        ([2], GpuDemand(1, 1, 2), GpuDemand(1, 1, 2), (1, 0.5)),
        ([4], GpuDemand(1, 2, 1), GpuDemand(1, 2, 6), (1, 0.3333)),  # 3 on each of two
        ([1], GpuDemand(0, 1, 4), GpuDemand(0, 1, 4), (1, 0.25)),
        # beside ranks
        ([1], ONE_OF_EACH, ONE_OF_EACH, (0.8, 0.2)),
        ([8], GpuDemand(1, 8, 1), GpuDemand(1, 8, 8), (0.8, 0.2)),
        ([1], GpuDemand(1, 1, 2), GpuDemand(1, 1, 2), (0.8, 0.1)),
        # bounds of autoscaling: all of it if possible, else the least
        ([2], ONE_OF_EACH, GpuDemand(2, 1, 1), (0.8, 0.2)),
        ([1], ONE_OF_EACH, GpuDemand(1, 1, 8), (0.8, 0.2)),
        ([8, 1], GpuDemand(1, 8, 1), GpuDemand(4, 8, 1), (1, 1)),  # nodes may be added
        # ranks of a group on one node
        ([4, 4], GpuDemand(1, 4, 4), GpuDemand(1, 4, 4), (1, 1)),
        ([4, 4], GpuDemand(1, 8, 0), GpuDemand(1, 8, 0), None),
        # draft workers of several ranks, which share no GPU
        ([4], GpuDemand(1, 2, 0, (2,)), GpuDemand(1, 2, 0, (2,)), (1, 1)),
        ([2, 2], GpuDemand(1, 2, 2, (2,)), GpuDemand(1, 2, 2, (2,)), (0.8, 0.2)),
        ([4, 3], GpuDemand(1, 3, 0, (4,)), GpuDemand(1, 3, 0, (4,)), (1, 1)),
        ([3, 1], GpuDemand(1, 2, 0, (2,)), GpuDemand(1, 2, 0, (2,)), None),
        ([4], GpuDemand(1, 2, 1, (2,)), GpuDemand(1, 2, 1, (2, 2)), (0.8, 0.2)),
        # too few
        ([0], ONE_OF_EACH, ONE_OF_EACH, None),
        ([], GpuDemand(0, 1, 1), GpuDemand(0, 1, 1), None),
        ([1], GpuDemand(2, 1, 0), GpuDemand(2, 1, 0), None),
        ([1], GpuDemand(1, 1, 3), GpuDemand(1, 1, 3), None),
    ],
)
def test_the_largest_shares_with_which_all_is_placed(nodes, least, most, shares):
    assert share_gpus(nodes, least, most) == (None if shares is None else GpuShares(*shares))


@pytest.mark.parametrize(
    ("rank", "draft", "shares"),
    [
        (None, 0.25, (0.75, 0.25)),
        (0.7, None, (0.7, 0.25)),
        (0.6, 0.4, (0.6, 0.4)),
        (1.0, None, None),  # nothing is left
        (None, 1.0, None),
        (0.9, 0.2, None),
    ],
)
def test_given_shares_are_kept(rank, draft, shares):
    wanted = None if shares is None else GpuShares(*shares)
    assert share_gpus([1], ONE_OF_EACH, ONE_OF_EACH, rank, draft) == wanted


@pytest.mark.parametrize(
    ("demand", "rank", "draft", "needed"),
    [
        (ONE_OF_EACH, None, None, 1),
        (ONE_OF_EACH, 1.0, 1.0, 2),
        (GpuDemand(1, 8, 17), None, None, 9),
        (GpuDemand(2, 4, 0), None, None, 8),
        (GpuDemand(0, 1, 3), None, 0.5, 2),
    ],
)
def test_the_fewest_gpus(demand, rank, draft, needed):
    assert needed_gpus(demand, rank, draft) == needed
