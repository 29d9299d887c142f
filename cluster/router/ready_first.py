"""Which router a request goes to: of those that are ready, the one with the fewest requests."""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

READY = "ready"  # what routers record of themselves: see `record_routing_stats` of Serve's deployments


class ReadyFirst(FIFOMixin, RequestRouter):
    """Ray Serve makes one for each handle. What replicas record is seconds old at worst, so a request may still come to
    one that is not ready and is then refused: see `cluster.gateway.resume`. So it does where none is, and whoever gets
    it may say why."""

    def initialize_state(self) -> None:
        """Serve calls it with the arguments of the policy, of which there are none."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; Serve takes of the first rank that has room the one with the shortest queue."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all are full, or this would spin
        # Of several with equally few requests Serve takes the first.
        mixed = random.sample(candidate_replicas, len(candidate_replicas))
        ready = [replica for replica in mixed if replica.routing_stats.get(READY)]
        return [ready, [replica for replica in mixed if not replica.routing_stats.get(READY)]]
