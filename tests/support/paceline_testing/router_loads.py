"""What a router says that has nothing to do."""

from cluster.routing.router_load import RouterLoad

IDLE = RouterLoad(
    num_running=0,
    num_waiting=0,
    num_places=4,
    backlog_tokens=0,
    token_s=0.001,
    round_s=0.01,
    sequence_s=0.001,
    answer_rounds=50.0,
)
