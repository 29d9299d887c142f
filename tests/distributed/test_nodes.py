"""An overlay's own `serveConfigV2` on a Ray cluster of several nodes, deployed as KubeRay does it: an upgrade and the
loss of nodes, under load. With `-s` it says what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from paceline_testing.node_faults import CLIENTS, EAGER_DRAFTS, MOST_DRAFT_NODES, Deployed, scale_drafts
from paceline_testing.ray_nodes import RayNodes
from paceline_testing.right_drafts import target_and_right_draft
from paceline_testing.served_load import Load, Question
from paceline_testing.toy_overlay import questions, toy_models, toy_values

# Four nodes at first, on a machine that may have much else to do.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

Asked = dict[str, Sequence[Question]]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> tuple[Path, Path]:
    return toy_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(model_dirs) -> Asked:
    return questions(model_dirs[0], 24, 400)


@pytest.fixture(scope="module")
def cluster(model_dirs) -> Iterator[Deployed]:
    """prod-70b on a head and on a node each for routers and drafts, and two for targets: the other is for a new version
    and for what a loss leaves without a place."""
    with RayNodes(health_check_s=0.5) as nodes:
        deployed = Deployed(nodes, toy_values("prod-70b", *model_dirs, router_pods=1))
        deployed.add_spare("target")
        yield deployed
        deployed.client.close()


def under_load(cluster: Deployed, asked: Asked, what: str, happens: Callable[[], None]) -> None:
    """Whatever was asked before, while and after it happened is answered, and rightly."""
    with Load(cluster.client, CLIENTS, asked) as load:
        load.wait_for_answers()
        since = time.monotonic()
        happens()
        took_s = time.monotonic() - since
        load.wait_for_answers()
    summaries = load.summaries(since)
    print(f"\n{what}, {took_s:.1f} s", *(f"{kind}: {summary}" for kind, summary in summaries.items()), sep="\n  ")
    assert {kind: summary.errors for kind, summary in summaries.items()} == dict.fromkeys(CLIENTS, ())
    assert all(summaries[kind].sent >= clients for kind, clients in CLIENTS.items())


def test_each_part_is_on_the_node_of_its_group_and_every_way_of_asking_is_answered(cluster, asked):
    deployments = cluster.nodes.application()["deployments"]
    nodes_of = {name: {replica["node_id"] for replica in one["replicas"]} for name, one in deployments.items()}
    assert nodes_of["Gateway"] == nodes_of["Router"]
    assert len(nodes_of["Router"] | nodes_of["TargetGroup"] | nodes_of["DraftPool"]) == 3
    for kind in CLIENTS:
        assert cluster.client.ask(kind, asked[kind][0]).error is None


def test_a_new_version_in_place_costs_no_request_and_no_stream(cluster, asked):
    under_load(cluster, asked, "new version", cluster.roll)


def test_the_loss_of_a_draft_node_costs_no_request_and_no_stream(cluster, asked):
    cluster.add_spare("draft")
    under_load(cluster, asked, "draft node lost", lambda: cluster.lose("draft"))


def test_the_loss_of_the_target_node_costs_no_request_and_no_stream(cluster, asked):
    under_load(cluster, asked, "target node lost", lambda: cluster.lose("target"))
    cluster.add_spare("target")


def test_the_loss_of_the_head_costs_no_request_and_no_stream_and_the_next_head_can_upgrade(cluster, asked):
    under_load(cluster, asked, "head lost", cluster.lose_head)
    under_load(cluster, asked, "new version after that", cluster.roll)


def test_draft_workers_come_on_other_nodes_under_load_and_go_after_it(tmp_path):
    models = target_and_right_draft(tmp_path)
    with RayNodes(health_check_s=0.5) as nodes:
        values = toy_values("prod-70b", *models, router_pods=1, most_draft_pods=MOST_DRAFT_NODES)
        deployed = Deployed(nodes, values, EAGER_DRAFTS)
        for _ in range(MOST_DRAFT_NODES - 1):
            deployed.add_spare("draft")
        others = {name: ids for name, ids in nodes.replicas().items() if name != "DraftPool"}
        up_s, down_s, summaries = scale_drafts(deployed, questions(models[0], 24, 400))
        print(f"\nup {up_s:.1f} s, down {down_s:.1f} s", *summaries.items(), sep="\n  ")
        assert {kind: summary.errors for kind, summary in summaries.items()} == dict.fromkeys(summaries, ())
        assert {name: ids for name, ids in nodes.replicas().items() if name != "DraftPool"} == others
        deployed.client.close()
