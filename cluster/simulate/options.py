"""Options of a simulation, in addition to the cluster's configuration."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cache_service.options import Options
from cluster.config import Objective, ObjectivesConfig
from cluster.tenants.registry import Policy, TenantLimits

_Seconds = Annotated[float, Field(ge=0, le=86_400)]
_Tokens = Annotated[int, Field(ge=1, le=2**20)]
_BytesPerS = Annotated[float, Field(ge=1, le=1e15)]
_Share = Annotated[float, Field(ge=0, le=1)]


class CostOptions(Options):
    """Constants of machines and networks. The defaults are those of docs/scale.md."""

    gateway_request_s: _Seconds = 0.004
    """Processor time of a gateway for a request, before its router is asked."""
    gateway_chunk_s: _Seconds = 0.0004
    """Processor time of a gateway for a chunk."""
    hop_s: _Seconds = 0.0015
    """From a gateway to a router or back, and from a client to a gateway or back."""
    router_request_s: _Seconds = 0.001
    """Processor time of a router for a request, between two rounds."""
    router_round_s: _Seconds = 0.0005
    """Processor time of a router for a round, without its sequences."""
    router_sequence_s: _Seconds = 0.0002
    """Processor time of a router for a sequence in a round, its chunk included."""
    link_s: _Seconds = 0.0002
    """A message from a router to a worker and back."""
    store_s: _Seconds = 0.001
    """A message to the store of the shared cache and back."""
    store_bytes_per_s: _BytesPerS | None = None
    """What the store writes and reads in all. null: no limit."""
    store_link_bytes_per_s: _BytesPerS | None = None
    """What one router writes and reads there. null: no limit."""
    link_bytes_per_s: _BytesPerS | None = None
    """What a router sends to its target and draft workers, and as much again that it receives. null: no limit."""
    readiness_s: _Seconds = 0.75
    """Until gateways know that a router has become ready or no longer is."""


class ForwardOptions(Options):
    """Forward times of the target."""

    row_times: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0, le=86_400)]], ...], Field(min_length=1)
    ] = (
        (1, 0.020),
        (8, 0.024),
        (32, 0.032),
        (64, 0.045),
        (256, 0.140),
    )
    """(rows, seconds), rows ascending, without logits."""
    row_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Row counts that forwards are padded to, ascending; beyond the last there is no padding."""
    scored_row_s: _Seconds = 0.0
    """Seconds more for each row with logits: draft nodes, and the last token of a sequence."""
    sequence_s: _Seconds = 0.0
    """Seconds more for each further sequence of a round."""
    context_token_s: _Seconds = 0.0
    """Seconds more for each cached token of all sequences of a round."""

    @model_validator(mode="after")
    def _ascend(self) -> ForwardOptions:
        for name, rows in (("row_times", [rows for rows, _ in self.row_times]), ("row_steps", list(self.row_steps))):
            if any(after <= before for before, after in pairwise(rows)):
                raise ValueError(f"rows of {name} are {rows}; they must ascend")
        return self


class DraftOptions(Options):
    """Draft workers: forward times of the draft model, and how often it is right."""

    forward_s: _Seconds = 0.004
    """A forward of one row."""
    row_s: _Seconds = 0.0001
    """Seconds more for each further row."""
    right: _Share = 0.6
    """Probability that the draft model's next token is the target's."""


class TrafficOptions(Options):
    """Conversations of tenants. Lengths are lognormal with these means, except for recorded texts."""

    clients: Annotated[int, Field(ge=1)] | None = None
    """So many clients, each of which begins a conversation when its last one has ended. null: conversations come as
    `arrivals` says, whatever has been answered."""
    conversations_per_s: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    arrivals: Literal["poisson", "gamma", "mmpp", "diurnal"] = "poisson"
    burstiness: Annotated[float, Field(ge=1, le=100)] = 2.0
    """gamma: coefficient of variation of the gaps. mmpp: rate of busy times by that of quiet ones. diurnal: greatest
    rate by the least one."""
    period_s: Annotated[float, Field(ge=1e-3, le=1e9)] = 60.0
    """mmpp: mean length of a busy or quiet time. diurnal: length of a day."""
    batch_share: _Share = 0.0
    """Share of conversations whose requests are of class batch."""
    tenants: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    tenant_skew: Annotated[float, Field(ge=0, le=4)] = 1.1
    """Exponent of Zipf's law for tenants. 0: all alike."""
    turns: Annotated[float, Field(ge=1, le=100)] = 3.0
    """Mean number of requests of a conversation, geometric."""
    think_s: _Seconds = 10.0
    """Mean pause before a conversation comes back, exponential."""
    tool_share: _Share = 0.2
    """Share of answers that call a tool, after which the conversation comes back soon."""
    tool_s: _Seconds = 1.0
    """Mean time of a tool."""
    system_prompts: Annotated[int, Field(ge=0)] = 4
    """Different system prompts of a tenant. 0: there are none."""
    system_tokens: _Tokens = 300
    prompt_tokens: _Tokens = 120
    """Mean of the tokens that a turn adds."""
    answer_tokens: _Tokens = 160
    spread: Annotated[float, Field(ge=0, le=2)] = 0.7
    """Sigma of the lognormal lengths. 0: all as long as the mean."""
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a client sends a refused request again, after its Retry-After."""
    cancelled_share: _Share = 0.0
    """Share of requests whose client goes away before the end."""


class SimulationOptions(Options):
    """One simulation."""

    seed: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(gt=0, le=10 * 86_400)] = 120.0
    warm_up_s: _Seconds = 0.0
    """Requests that arrive before that are not counted, nor what draft workers and the shared cache do until then."""
    level: Literal["exact", "aggregate"] = "exact"
    """exact: each round of each group by the real router core. aggregate: rounds by their measured rates."""
    news: Literal["each", "shared", "none"] = "each"
    """What gateways hear of routers. each: each gateway hears for itself. shared: all gateways know that a prompt has
    been sent, which takes far less time and memory with many of them. none: nothing; requests go to whoever has
    fewest."""
    zones: Annotated[int, Field(ge=1)] = 3
    """Groups are dealt out to so many zones."""
    start_s: _Seconds = 30.0
    """Until a group or a router that was lost, or is new, is there."""
    costs: CostOptions = CostOptions()
    forward: ForwardOptions = ForwardOptions()
    draft: DraftOptions = DraftOptions()
    traffic: TrafficOptions = TrafficOptions()
    policy: Policy = "isolated"
    """How tenants share caches. group: by a salt of requests, which simulated ones have none of."""
    tenant_limits: TenantLimits = TenantLimits()
    """Limits of each tenant."""
    objectives: ObjectivesConfig = ObjectivesConfig(
        interactive=Objective(ttft_s=1.0, tpot_s=0.1), batch=Objective(ttft_s=60.0)
    )
    """A request within those of its class is goodput. Routers go by `router.objectives` of the cluster alone, at level
    exact."""

    @model_validator(mode="after")
    def _counts_something(self) -> SimulationOptions:
        if self.warm_up_s >= self.seconds:
            raise ValueError(f"warm_up_s is {self.warm_up_s:g}; it must be below seconds, which is {self.seconds:g}")
        return self
