"""What Ray Serve is told of a deployment that scales by a policy of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingPolicy

from actors.workers.autoscaling_options import AutoscalingConfig

_SIGNALS_IN_SIGHT = 5  # that a replica records in the time that a decision looks back


def serve_autoscaling(
    replicas: tuple[int, int], scaling: AutoscalingConfig, policy: Callable[..., Any], limits: dict[str, float]
) -> ServeAutoscaling:
    """replicas: fewest and most. Serve constructs the policy with `limits` as its keyword arguments."""
    fewest, most = replicas
    return ServeAutoscaling(
        min_replicas=fewest,
        initial_replicas=fewest,
        max_replicas=most,
        look_back_period_s=scaling.look_back_s,
        metrics_interval_s=scaling.look_back_s / _SIGNALS_IN_SIGHT,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=limits),
    )
