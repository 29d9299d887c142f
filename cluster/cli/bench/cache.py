"""`paceline bench cache`: what the shared cache is worth on this machine.

Every cache is on a server of its own, as `paceline serve` starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import load_tokenizer, read_model_info
from cluster.cli.bench.cache_plan import CachePlan, make_scenarios
from cluster.cli.bench.cache_value import ScenarioResult, measure_value
from cluster.cli.bench.local import check_room, encode_prompt
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.config import paceline_home


@dataclass(frozen=True, slots=True)
class CacheReport:
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    config: dict[str, Any]
    scenarios: list[ScenarioResult]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_cache(
    plan: CachePlan, progress: Progress = silent, on_result: Callable[[ScenarioResult], None] = lambda _: None
) -> CacheReport:
    """Measure all of it; on_result hears of each kind of requests as soon as it has been measured.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used,
    ServerError where no server can be run.
    """
    source = resolve_model(plan.model, paceline_home(), progress)
    info, tokenizer = read_model_info(source), load_tokenizer(source)
    scenarios = make_scenarios(plan)
    rows = [row for scenario in scenarios for row in (*scenario.before, *scenario.asked)]
    token_ids = {row.name: encode_prompt(row, tokenizer) for row in rows}
    check_room(token_ids, info, plan.max_new_tokens)
    machine = describe_machine()
    row_seconds, results = measure_value(plan, info, scenarios, token_ids, on_result, progress)
    config = {key: value for key, value in asdict(plan).items() if key != "prompts"}
    config |= {"weights": info.weights_fingerprint, "row_seconds": row_seconds}
    return CacheReport(machine, describe_versions(), config, results)
