"""One span tree a call, made at its end out of times that the gateway and the router have taken on the way.

    chat MODEL                  server span of the call, by the semantic conventions for generative AI
    ├── queue                   of each answer: waiting to be admitted by the router
    ├── prefill                 from its first round to its first token
    └── rounds                  the rest; its first rounds have spans of their own
        └── round
            ├── drafting
            └── verification

Spans hold numbers and names, never text of prompts or answers. Routers know nothing of spans: they send times, in
seconds since they took the request, with the last chunk, and the clocks of two machines never meet.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.logs import ObservabilityConfig
from actors.messages import RequestTimes, SpeculationStats
from cluster.gateway.requests.call import CallOrigin, GenerationCall

SYSTEM = "paceline"

_TRACES_PATH = "/v1/traces"
_CLOSE_S = 5.0  # for sending what is left
# W3C Trace Context. OpenTelemetry writes what does not follow it into the log, and clients could write there.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")
_STATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_MAX_STATE = 512  # characters
_OTHER_MODEL = "unknown"  # a name that is not served may be any text


class Tracing:
    """Makes spans of calls and hands them to a processor. One per gateway process; nothing global is set."""

    def __init__(self, processor: SpanProcessor, sample_ratio: float, round_spans: int, version: str) -> None:
        """sample_ratio: of calls whose callers have not decided it in `traceparent`. round_spans: of an answer."""
        self.round_spans = round_spans
        resource = Resource.create({SERVICE_NAME: SYSTEM, SERVICE_VERSION: version})
        self._provider = TracerProvider(ParentBasedTraceIdRatio(sample_ratio), resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SYSTEM, version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, call: GenerationCall, call_id: str, origin: CallOrigin, model: str, arrived: float
    ) -> CallTrace | None:
        """The trace of a call that arrived at time.monotonic() == arrived; None: it is not sampled. call_id: as its
        answer names it."""
        parent = self._propagator.extract(_carrier(origin), Context())
        operation = "chat" if any(_is_conversation(prompt) for prompt in call.prompts) else "text_completion"
        wall_ns = time.time_ns() - round(1e9 * (time.monotonic() - arrived))
        span = self._tracer.start_span(
            f"{operation} {model}",
            parent,
            SpanKind.SERVER,
            _attributes_of(call, call_id, origin, operation=operation, model=model),
            start_time=wall_ns,
        )
        if not span.is_recording():
            return None
        return CallTrace(self._tracer, span, self.round_spans, wall_ns=wall_ns, arrived=arrived)

    def close(self) -> None:
        """Send the remaining spans, for at most _CLOSE_S seconds, so that an unreachable collector does not delay the
        end."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


class CallTrace:
    """Spans of one sampled call. Times are those of time.monotonic()."""

    def __init__(self, tracer: trace.Tracer, span: Span, round_spans: int, wall_ns: int, arrived: float) -> None:
        self.round_spans = round_spans
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())
        self._wall_ns = wall_ns
        self._arrived = arrived
        self._finish_reasons: dict[int, str] = {}
        self._num_tokens = 0

    def resumed(self) -> None:
        """Its router was lost, and another one goes on."""
        self._span.add_event("router lost", timestamp=self._ns(time.monotonic()))

    def answered(
        self,
        choice: int,
        outcome: str,
        num_tokens: int,
        stats: SpeculationStats | None,
        times: RequestTimes | None,
        last_chunk_at: float,
    ) -> None:
        """An answer has ended. times: as the router told at `last_chunk_at`; None: it has not come to that."""
        self._finish_reasons[choice] = outcome
        self._num_tokens += num_tokens
        if times is None:
            return
        # What the last chunk took to come here is taken for nothing, so that all lies within the call.
        start = max(self._arrived, last_chunk_at - times.ended_s)
        mark = {"paceline.choice": choice}
        started, first_token = start + times.started_s, start + times.first_token_s
        self._child(self._context, "queue", start, started, attributes=mark)
        self._child(self._context, "prefill", started, first_token, attributes=mark)
        if times.ended_s <= times.first_token_s:
            return
        context = self._child(
            self._context,
            "rounds",
            first_token,
            start + times.ended_s,
            attributes=mark
            | {
                "gen_ai.usage.output_tokens": num_tokens,
                "paceline.drafting_seconds": times.draft_s,
                "paceline.verification_seconds": times.verify_s,
            }
            | _speculation(stats),
        )
        for one in times.rounds:
            planned, drafted, verified = (start + at for at in (one.planned_s, one.drafted_s, one.verified_s))
            counts = {"paceline.tokens": one.num_tokens, "paceline.draft_tokens": one.num_drafted}
            inner = self._child(context, "round", planned, verified, attributes=counts)
            self._child(inner, "drafting", planned, drafted)
            self._child(inner, "verification", drafted, verified)

    def end(self, error_code: str | None, num_prompt: int = 0) -> None:
        """error_code: as in the error that the client got; "cancelled": the client went away. num_prompt: tokens of all
        prompts, each counted once."""
        span = self._span
        span.set_attribute("gen_ai.usage.input_tokens", num_prompt)
        span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        if self._finish_reasons:
            reasons = [self._finish_reasons[choice] for choice in sorted(self._finish_reasons)]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if error_code is not None:
            span.set_attribute("error.type", error_code)
            if error_code != "cancelled":
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(time.monotonic()))

    def _child(
        self, context: Context, name: str, start: float, end: float, attributes: Mapping[str, Any] | None = None
    ) -> Context:
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._ns(start))
        span.end(self._ns(max(start, end)))
        return trace.set_span_in_context(span, Context())

    def _ns(self, at: float) -> int:
        return self._wall_ns + round(1e9 * (at - self._arrived))


def open_tracing(config: ObservabilityConfig, version: str) -> Tracing | None:
    """Tracing to the configured collector; None: it is off. A collector that is away costs its spans and nothing else:
    they are sent by a thread, and what its queue cannot hold is dropped."""
    if config.otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = config.otlp_endpoint.rstrip("/")
    if url.count("/") == 2:  # those of the scheme
        url += _TRACES_PATH
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(url)), config.sample_ratio, config.round_spans, version)


def _carrier(origin: CallOrigin) -> dict[str, str]:
    """The well-formed trace headers of a caller."""
    parent, state = (origin.traceparent or "").strip(), origin.tracestate or ""
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    members = [member for part in state.split(",") if (member := part.strip(" \t"))]
    if len(state) > _MAX_STATE or not all(map(_STATE_MEMBER.fullmatch, members)):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": ",".join(members)}


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, tuple) and bool(prompt) and not isinstance(prompt[0], int)


def _attributes_of(
    call: GenerationCall, call_id: str, origin: CallOrigin, *, operation: str, model: str
) -> dict[str, Any]:
    """Attributes by the semantic conventions, without opt-in ones (messages, instructions) and stop strings, which
    contain the client's text."""
    options = call.options
    sampling = options.sampling(seed=0)
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SYSTEM,
        "gen_ai.request.model": model if call.model in (None, model) else _OTHER_MODEL,
        "gen_ai.response.model": model,
        "gen_ai.response.id": call_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "paceline.request_id": origin.request_id,
    }
    numbers = {
        "gen_ai.request.max_tokens": options.max_new_tokens,
        "gen_ai.request.seed": options.seed,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.choice.count": call.n if call.n != 1 else None,
    }
    # One number beyond the format's 64 bits would cost all spans that are sent with it.
    return found | {key: one for key, one in numbers.items() if one is not None and -(2**63) <= one < 2**63}


def _speculation(stats: SpeculationStats | None) -> dict[str, Any]:
    if stats is None:
        return {}
    found = {f"paceline.{name}": getattr(stats, name) for name in ("rounds", "target_rows", "draft_tokens")}
    return found | {f"paceline.accepted_tokens.{source}": count for source, count in stats.accepted_tokens.items()}
