"""Metrics of a gateway replica. Names follow Prometheus' rules (base units, `_total` for counters) and mirror vLLM's
behind `paceline_`. No label names a request or a tenant. /metrics joins this text with the routers', so no name may be
here and in `cluster.router.metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """What a gateway replica sees of its requests. A request is one answer: a call with n = 3 counts three times."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests_running = gauge("paceline_num_requests_running", "Requests that have their first token")
        self.requests_waiting = gauge("paceline_num_requests_waiting", "Requests that wait for their first token")
        text = "Requests that finished, by finish reason"
        self.request_success = counter("paceline_request_success", text, ["finished_reason"])
        text = "Requests that ended without an answer, by error code; cancelled: the client went away"
        self.request_failure = counter("paceline_request_failure", text, ["reason"])
        text = (
            "Calls refused for their key or their tenant's limits, by reason: missing_key, unknown_key, disabled, or "
            "the limit's name"
        )
        self.tenant_refusals = counter("paceline_tenant_refusals", text, ["reason"])
        text = "States of the registry of tenants that could not be used; the one before stayed in force"
        self.tenant_registry_failures = counter("paceline_tenant_registry_failures", text)
        text = "Streams carried on by another router after theirs was lost"
        self.request_resumed = counter("paceline_request_resumed", text)
        text = "From the request's arrival to its first token"
        self.time_to_first_token = histogram("paceline_time_to_first_token_seconds", text, buckets=_FIRST_TOKEN_BUCKETS)
        text = "Between tokens after the first; a round's time is shared by its tokens"
        self.inter_token_latency = histogram("paceline_inter_token_latency_seconds", text, buckets=_TOKEN_BUCKETS)
        text = "From the request's arrival to its last token"
        self.request_latency = histogram("paceline_e2e_request_latency_seconds", text, buckets=_REQUEST_BUCKETS)
        # A counter that begins with its first event hides it from rates, and what is divided by it.
        for finished_reason in ("stop", "length"):
            self.request_success.labels(finished_reason)
        for reason in ("cancelled", "deadline_exceeded", "internal_error", "overloaded", "unavailable"):
            self.request_failure.labels(reason)
        self.prompt_tokens = counter("paceline_prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = counter("paceline_generation_tokens", "Tokens generated")

    def text(self) -> str:
        """Prometheus text format."""
        return generate_latest(self.registry).decode()


def merged(label: str, texts: Mapping[str, str]) -> str:
    """One text in Prometheus' format out of one a process, by its id, as `prometheus_client` writes them: each sample
    gets the label with that id, and each family appears once.

    Only the label is added to lines: parsing and writing them would take time of the gateway's event loop, which
    streams need.
    """
    comments: dict[str, dict[str, str]] = {}  # HELP and TYPE by family
    samples: dict[str, list[str]] = {}
    for process, text in sorted(texts.items()):
        for line in text.split("\n"):
            if line.startswith("# "):
                _, kind, family, _ = line.split(" ", 3)
                comments.setdefault(family, {}).setdefault(kind, line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, f'{label}="{process}"'))
    lines = [line for family, own in comments.items() for line in (*own.values(), *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)


def missing_text(kind: str, count: int) -> str:
    """How many processes a page does not show, gateways or routers."""
    family = f"paceline_metrics_missing_{kind}"
    told = f"{kind.capitalize()} that are not on this page: they did not answer, or there are too many"
    return f"# HELP {family} {told}\n# TYPE {family} gauge\n{family} {count}\n"


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
