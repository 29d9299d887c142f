"""Small simulated clusters for tests."""

from cluster.config import ClusterConfig
from cluster.simulate.options import SimulationOptions
from cluster.simulate.simulation import Simulation

QUIET = {"conversations_per_s": 0.5, "answer_tokens": 20, "prompt_tokens": 20, "system_tokens": 32, "think_s": 1.0}


def simulated(config=None, seconds=10.0, traffic=None, faults=(), on_end=lambda call: None, **options):
    """Without draft workers, unless `config` has some."""
    cluster = ClusterConfig.model_validate({"draft": {"model": "none"}, **(config or {})})
    told = SimulationOptions.model_validate({"seconds": seconds, "traffic": {**QUIET, **(traffic or {})}, **options})
    return Simulation(cluster, told, faults=faults, on_end=on_end)
