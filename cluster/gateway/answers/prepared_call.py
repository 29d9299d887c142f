"""A call that was checked, tokenised and made into requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.messages import GenerationRequest
from cluster.gateway.answers.streams import StreamShape
from cluster.gateway.requests.call import CallOrigin, GenerationCall
from cluster.tenants.gatekeeper import Tenant
from cluster.tenants.scope import Scope

if TYPE_CHECKING:
    from cluster.gateway.observability.tracing import CallTrace  # which brings OpenTelemetry


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a call came, from whom, and where it is noted."""

    call_id: str
    origin: CallOrigin
    at: float  # time.monotonic()
    tenant: Tenant | None = None  # None without tenants
    trace: CallTrace | None = None  # None: not traced


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that can be served: one request per answer, in order of choice."""

    arrival: Arrival
    call: GenerationCall
    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # sum over all prompts
    num_prediction_tokens: int  # 0 also if their statistics are withheld
    starts_inside_thought: bool  # the chat template has begun a thought for the model
    deadline: float  # time.monotonic()
    scope: Scope
    stream_shape: StreamShape
