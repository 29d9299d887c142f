"""Ranks of a group on a node with several GPUs: each sees all and takes its own. Ray believes that there are four."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.util import placement_group, remove_placement_group

from actors.options import TargetGroupOptions
from actors.workers.gpu_shares import GpuDemand, share_gpus
from actors.workers.gpus import rank_device, use_device
from actors.workers.rank_options import rank_options
from cluster.cli.ray_connection import gpus_of_nodes

PATIENCE_S = 120.0


class Rank:
    """What `TargetRank` finds before it loads anything."""

    def place(self) -> dict[str, str | None]:
        assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        device = rank_device("cuda")
        if torch.cuda.device_count() >= 4:
            use_device(device)
        return {
            "assigned": ",".join(assigned),
            "device": device,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "local rank": os.environ.get("LOCAL_RANK"),
        }


class DraftWorker:
    def gpus(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


@contextmanager
def ranks_of(options: TargetGroupOptions) -> Iterator[list[ActorHandle]]:
    bundles = [{"CPU": 0.1}, *([{"GPU": options.gpus or 1.0, "CPU": 1.0}] * options.tensor_parallel)]
    group = placement_group(bundles, strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=60)
    ranks = range(options.tensor_parallel)
    actors = [ray.remote(Rank).options(**rank_options(options, group, rank + 1)).remote() for rank in ranks]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def check_places(places: list[dict[str, str | None]]) -> None:
    """Each has a GPU of its own, though Ray has hidden none."""
    for place in places:
        assert place["visible"] == os.environ.get("CUDA_VISIBLE_DEVICES")
        assert place["device"] == f"cuda:{place['assigned']}"
        assert place["local rank"] == place["assigned"]
    indices = {place["assigned"] for place in places}
    assert len(indices) == len(places)
    assert indices <= {"0", "1", "2", "3"}


def test_each_rank_sees_all_gpus_and_takes_the_one_that_ray_has_assigned_to_it(ray_here):
    with ranks_of(TargetGroupOptions(device="cuda", tensor_parallel=2)) as actors:
        check_places(ray.get([actor.place.remote() for actor in actors], timeout=PATIENCE_S))


def test_the_gpus_of_each_node_are_counted(ray_here):
    assert gpus_of_nodes() == [4]


@pytest.mark.slow  # eight processes; which shares they have, and which device a rank takes, is tested without them
def test_ranks_and_draft_workers_share_the_gpus_of_a_node_that_has_none_left(ray_here):
    shares = share_gpus([4], GpuDemand(1, 4, 4), GpuDemand(1, 4, 4))
    assert shares is not None
    with ranks_of(TargetGroupOptions(device="cuda", tensor_parallel=4, gpus=shares.rank)) as actors:
        workers = [ray.remote(DraftWorker).options(num_cpus=0, num_gpus=shares.draft).remote() for _ in range(4)]
        check_places(ray.get([actor.place.remote() for actor in actors], timeout=PATIENCE_S))
        of_workers = ray.get([worker.gpus.remote() for worker in workers], timeout=PATIENCE_S)
        for worker in workers:
            ray.kill(worker)
    assert sorted(of_workers) == [["0"], ["1"], ["2"], ["3"]]
