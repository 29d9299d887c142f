"""What happens to a cluster on Kubernetes, done to one of `ray_nodes`: an upgrade in place, and the loss of a node.

As a program it says what these cost, with Ray looking after its nodes as often as it does by default:
`PYTHONPATH=tests/support python -m paceline_testing.node_faults OVERLAY FAULT...`, faults being roll, draft, target and
router, or target-silent and router-silent, for a node whose network is gone rather than its processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.deploy.serve_config import serve_config_text
from cluster.deploy.values import DeployValues, ScaledValues
from paceline_testing.ray_nodes import RayNode, RayNodes
from paceline_testing.served_load import Client, Load
from paceline_testing.toy_overlay import questions, toy_models, toy_values

CLIENTS = {"HTTP": 2, "HTTP stream": 2, "gRPC": 1, "gRPC stream": 1}
_PATIENCE_S = 300.0


class Deployed:
    """An overlay with toy models on a head and on the nodes of its groups, as many of each as there are at the least.
    Its client enters by a node without the router, where there is one."""

    def __init__(self, nodes: RayNodes, values: DeployValues) -> None:
        self.nodes = nodes
        self.values = values
        self.of_groups = {
            name: [nodes.add(name, group.ray_cpus) for _ in range(group.min)] for name, group in self._groups().items()
        }
        nodes.deploy(serve_config_text(values))
        wait_for(lambda: bool(nodes.processes_of("Router")), "the router")
        self.of_groups["router"].sort(key=lambda node: not node.runs(nodes.processes_of("Router")))
        entrance = self.of_groups["router"][-1]
        self.client = Client(entrance.url, entrance.grpc_address)
        wait_for(self.is_whole, "the whole cluster")

    def is_whole(self) -> bool:
        return self.client.is_ready() and self.has_drafts()

    def has_drafts(self) -> bool:
        found = self.client.metric("paceline_draft_workers")  # of each router that has or had a target group
        return bool(found) and set(found) == {self.values.draft.min}

    def roll(self) -> None:
        """To another version: Serve replaces all replicas for any change of the application's arguments. Returns when
        it runs the new version alone, but for what finishes its requests."""
        router = self.values.router.model_copy(update={"max_waiting": self.values.router.max_waiting + 1})
        self.values = self.values.model_copy(update={"router": router})
        before = self.nodes.replicas()
        self.nodes.deploy(serve_config_text(self.values))

        def is_new() -> bool:
            running = self.nodes.replicas()
            is_replaced = all(running.get(name) and not running[name] & old for name, old in before.items())
            return is_replaced and self.nodes.application()["status"] == "RUNNING"

        wait_for(is_new, "the new version")

    def add_spare(self, group: str) -> None:
        """A node for the group's work should another be lost."""
        self.of_groups[group].append(self.nodes.add(group, self._groups()[group].ray_cpus))

    def lose(self, group: str, how: Callable[[RayNode], None] = RayNode.kill) -> None:
        """The group's first node. Returns when all is well again, for which there must be a spare one."""
        is_well = self.has_drafts if group == "draft" else self.client.is_ready
        lost = self.of_groups[group].pop(0)
        how(lost)
        wait_for(lambda: not is_well(), f"the loss of the {group} node")
        wait_for(is_well, f"the return of the {group} node's part")
        lost.kill()

    def _groups(self) -> dict[str, ScaledValues]:
        return {"router": self.values.router, "target": self.values.target, "draft": self.values.draft}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {_PATIENCE_S:g} s"
        time.sleep(0.1)


def main(overlay: str, faults: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as directory, RayNodes() as nodes:
        target, draft = toy_models(Path(directory))
        asked = questions(target, 24, 800)
        cluster = Deployed(nodes, toy_values(overlay, target, draft))
        for fault in faults:
            group, _, how = fault.partition("-")
            if group != "roll":
                cluster.add_spare(group)
            with Load(cluster.client, CLIENTS, asked) as load:
                load.wait_for_answers()
                since = time.monotonic()
                if group == "roll":
                    cluster.roll()
                else:
                    cluster.lose(group, RayNode.silence if how == "silent" else RayNode.kill)
                took_s = time.monotonic() - since
                load.wait_for_answers()
            print(f"{overlay}, {fault}: whole again after {took_s:.1f} s", flush=True)
            for kind, summary in load.summaries(since).items():
                print(f"  {kind}: {summary}", *sorted(set(summary.errors))[:3], sep="\n    ", flush=True)
        cluster.client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
