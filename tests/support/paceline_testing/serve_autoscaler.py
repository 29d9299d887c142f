"""Serve's autoscaler by hand: what it calls a policy with, and what it decides by what replicas report."""

import time
from collections.abc import Callable
from types import SimpleNamespace

from ray.serve import Application
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.deployment_info import DeploymentInfo


def policy_context(current: int, target: int, **recorded: dict[str, float]) -> SimpleNamespace:
    """The context of a deployment of 1 to 4 replicas. recorded: values by replica, for each signal."""
    return SimpleNamespace(
        current_num_replicas=current,
        target_num_replicas=target,
        aggregated_metrics=recorded or None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )


def autoscaler_of(application: Application) -> Callable[..., int]:
    """Serve's decision for a deployment that begins with one replica: a function of the present number of replicas and
    of the signals that each has just recorded."""
    deployment = application._bound_deployment
    name = DeploymentID(deployment.name, "paceline")
    state = DeploymentAutoscalingState(name)
    assert state.register(DeploymentInfo(deployment._deployment_config, None, 0, "job"), 1) == 1

    def decided(replicas: int, **reported: float) -> int:
        running = [ReplicaID(f"{number}", name) for number in range(replicas)]
        state.update_running_replica_ids(running)
        now = time.time()
        for replica in running:
            series = {signal: [TimeStampedValue(now, value)] for signal, value in reported.items()}
            state.record_request_metrics_for_replica(ReplicaMetricReport(replica, series, now))
        return int(state.get_decision_num_replicas(replicas))

    return decided
