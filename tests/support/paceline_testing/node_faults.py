"""Faults of a cluster on Kubernetes, made on a cluster of `ray_nodes`: an upgrade in place, the loss of a node,
and draft workers that come and go with the load.

As a program it says what these cost, with Ray looking after its nodes as often as it does by default:
`PYTHONPATH=tests/support python -m paceline_testing.node_faults OVERLAY FAULT...`, faults being roll, draft, target,
router and head, or target-silent and router-silent, for a node whose network is gone rather than its processes.
`... OVERLAY scale` is the load's work instead.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline_testing.chart import Object, merged, objects, one, serve_config
from paceline_testing.ray_nodes import RayNode, RayNodes
from paceline_testing.right_drafts import EAGER_SCALING, target_and_right_draft
from paceline_testing.served_load import Client, Load, Question, Summary
from paceline_testing.toy_overlay import questions, toy_models, toy_values

CLIENTS = {"HTTP": 2, "HTTP stream": 2, "gRPC": 1, "gRPC stream": 1}
EAGER_DRAFTS: dict[str, dict[str, Any]] = {
    "autoscaling": EAGER_SCALING,
    "speculation": {"drafters": ["draft_model"]},
    "draft": {"branch": 1, "deadline_ms": 10_000},
}
MOST_DRAFT_NODES = 3
_DEPLOYMENTS = {"router": "Router", "target": "TargetGroup", "draft": "DraftPool"}  # by group
HEAD_AWAY_S = 20.0  # until it has been put on another machine
_PATIENCE_S = 300.0


class Deployed:
    """An overlay with toy models on a head and on the nodes of its groups, as many of each as there are at the least.
    Its client enters by a node without the router, where there is one."""

    def __init__(self, nodes: RayNodes, values: Object, arguments: Mapping[str, dict[str, Any]] | None = None) -> None:
        """values: of the chart; arguments: of the application, beside the profile's own, by section."""
        self.nodes = nodes
        self.values = merged(values, {"config": dict(arguments or {})})
        cluster = one(objects(self.values), "RayService")["spec"]["rayClusterConfig"]
        self._groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
        self.of_groups = {
            name: [self._add(name) for _ in range(group["minReplicas"])] for name, group in self._groups.items()
        }
        nodes.deploy(self._serve_config())
        wait_for(lambda: bool(nodes.processes_of("Router")), "the router")
        self.of_groups["router"].sort(key=lambda node: not node.runs(nodes.processes_of("Router")))
        entrance = self.of_groups["router"][-1]
        self.client = Client(entrance.url, entrance.grpc_address)
        wait_for(self.is_whole, "the whole cluster")

    def is_whole(self) -> bool:
        return self.client.is_ready() and self.has_drafts()

    def has_drafts(self, workers: int | None = None) -> bool:
        """workers: None: as many as there are at the least."""
        found = self.client.metric("paceline_draft_workers")  # one value for each router that has or had a target group
        return bool(found) and set(found) == {self._groups["draft"]["minReplicas"] if workers is None else workers}

    def roll(self) -> None:
        """To another version: Serve replaces all replicas for any change of the application's arguments. Returns when
        it runs the new version alone, but for what finishes its requests. With `upgrade.secondTarget` there must be a
        spare target node, which on Kubernetes the autoscaler adds."""
        waiting = self.values["config"].get("router", {}).get("max_waiting", 64)
        self.values = merged(self.values, {"config": {"router": {"max_waiting": waiting + 1}}})
        before = self.nodes.replicas()
        self.nodes.deploy(self._serve_config())

        def is_new() -> bool:
            running = self.nodes.replicas()
            is_replaced = all(running.get(name) and not running[name] & old for name, old in before.items())
            return is_replaced and self.nodes.application()["status"] == "RUNNING"

        wait_for(is_new, "the new version")

    def add_spare(self, group: str) -> None:
        """A node for the group's work should another be lost."""
        self.of_groups[group].append(self._add(group))

    def lose(self, group: str, how: Callable[[RayNode], None] = RayNode.kill) -> None:
        """The node that does the group's work. Returns when all is well again, for which there must be a spare one."""
        is_well = self.has_drafts if group == "draft" else self.client.is_ready
        working = self.nodes.processes_of(_DEPLOYMENTS[group])
        lost = next(node for node in self.of_groups[group] if node.runs(working))
        self.of_groups[group].remove(lost)
        how(lost)
        wait_for(lambda: not is_well(), f"the loss of the {group} node")
        wait_for(is_well, f"the return of the {group} node's part")
        lost.kill()

    def lose_head(self) -> None:
        """With all of Ray's and Serve's control plane. Returns when another, which comes later, knows everything."""
        before = self.nodes.replicas()
        self.nodes.head.kill()
        time.sleep(HEAD_AWAY_S)
        self.nodes.start_head()
        wait_for(lambda: self.nodes.replicas() == before, "the head's knowledge of the replicas")
        wait_for(self.is_whole, "the whole cluster")

    def _add(self, group: str) -> RayNode:
        return self.nodes.add(group, int(self._groups[group]["resources"]["CPU"]))

    def _serve_config(self) -> str:
        return yaml.safe_dump(serve_config(objects(self.values)), sort_keys=False)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {_PATIENCE_S:g} s"
        time.sleep(0.1)


def scale_drafts(cluster: Deployed, asked: Mapping[str, Sequence[Question]]) -> tuple[float, float, dict[str, Summary]]:
    """From one draft worker to `MOST_DRAFT_NODES` under load, and back while others ask for no drafts: seconds that
    both took, and what became of all requests. The nodes are there."""
    quiet_client = Client(cluster.client.url, cluster.client.grpc_address, speculates=False)
    began = time.monotonic()
    with Load(quiet_client, {"HTTP": 1, "gRPC stream": 1}, asked) as quiet:
        with Load(cluster.client, CLIENTS, asked) as busy:
            wait_for(lambda: cluster.has_drafts(MOST_DRAFT_NODES), f"draft worker {MOST_DRAFT_NODES}")
            up_s = time.monotonic() - began
            busy.wait_for_answers()  # all of them have drafted
        since = time.monotonic()
        wait_for(lambda: cluster.has_drafts(1), "the end of the other draft workers")
        down_s = time.monotonic() - since
        quiet.wait_for_answers()
    quiet_client.close()
    of_quiet = {f"{kind}, no drafts": summary for kind, summary in quiet.summaries(began).items()}
    return up_s, down_s, busy.summaries(began) | of_quiet


def main(overlay: str, faults: Sequence[str]) -> None:
    if list(faults) == ["scale"]:
        _show_scaling(overlay)
        return
    with tempfile.TemporaryDirectory() as directory, RayNodes() as nodes:
        target, draft = toy_models(Path(directory))
        asked = questions(target, 24, 800)
        cluster = Deployed(nodes, toy_values(overlay, target, draft))
        for fault in faults:
            group, _, how = fault.partition("-")
            if group != "head":
                cluster.add_spare("target" if group == "roll" else group)
            with Load(cluster.client, CLIENTS, asked) as load:
                load.wait_for_answers()
                since = time.monotonic()
                if group == "roll":
                    cluster.roll()
                elif group == "head":
                    cluster.lose_head()
                else:
                    cluster.lose(group, RayNode.silence if how == "silent" else RayNode.kill)
                took_s = time.monotonic() - since
                load.wait_for_answers()
            print(f"{overlay}, {fault}: whole again after {took_s:.1f} s", flush=True)
            for kind, summary in load.summaries(since).items():
                print(f"  {kind}: {summary}", *sorted(set(summary.errors))[:3], sep="\n    ", flush=True)
        cluster.client.close()


def _show_scaling(overlay: str) -> None:
    with tempfile.TemporaryDirectory() as directory, RayNodes() as nodes:
        target, draft = target_and_right_draft(Path(directory))
        values = toy_values(overlay, target, draft, most_draft_pods=MOST_DRAFT_NODES)
        cluster = Deployed(nodes, values, EAGER_DRAFTS)
        for _ in range(MOST_DRAFT_NODES - len(cluster.of_groups["draft"])):
            cluster.add_spare("draft")
        up_s, down_s, summaries = scale_drafts(cluster, questions(target, 24, 400))
        print(f"{overlay}: {MOST_DRAFT_NODES} draft workers after {up_s:.1f} s, 1 after {down_s:.1f} s more")
        print(*(f"  {kind}: {summary}" for kind, summary in summaries.items()), sep="\n")
        cluster.client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
