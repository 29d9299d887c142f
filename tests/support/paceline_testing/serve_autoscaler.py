"""Serve's autoscaler by hand: what it calls a policy with, and what it decides by what replicas report."""

import time
from collections.abc import Callable
from types import SimpleNamespace

from ray.serve import Application
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.deployment_info import DeploymentInfo

from actors.workers.autoscaling import MOST_REPLICAS


def policy_context(
    current: int,
    target: int,
    *,
    state: dict[str, object] | None = None,
    share: float = 1.0,
    **recorded: dict[str, float],
) -> SimpleNamespace:
    """What a policy is called with. state: what its last call returned; share: of the capacity, in an incremental
    upgrade; recorded: values by replica, for each signal."""
    raw = {
        signal: {replica: [TimeStampedValue(float(age), value)] for age, (replica, value) in enumerate(values.items())}
        for signal, values in recorded.items()
    }
    return SimpleNamespace(
        current_num_replicas=current,
        target_num_replicas=target,
        aggregated_metrics=recorded or None,
        raw_metrics=raw or None,
        policy_state=state or {},
        capacity_adjusted_max_replicas=round(MOST_REPLICAS * share),
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
