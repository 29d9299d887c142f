"""The arithmetic of `paceline bench serve`: what `vllm bench serve` computes, under the same names. No network in here.

TTFT: from sending a request to the first chunk with text. TPOT: (last chunk - first) / (tokens - 1), for answers of two
tokens or more. ITL: the time between one chunk with text and the next; a chunk holds all tokens of a round, so with
speculation ITL is the time of a round and not of a token. E2EL: from sending to the last chunk. Requests that failed
count in `failed` only. With a limit on concurrency, waiting for a free place comes before sending and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

_WIDTH = 50


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times in seconds; `error` empty: it succeeded."""

    name: str
    started: float = 0.0  # on the clock of its run
    ttft: float = 0.0
    latency: float = 0.0  # to the last chunk
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0  # 0: the server did not say
    draft_tokens: int = 0
    accepted_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds; zeros where there was nothing to measure. Percentiles are interpolated linearly."""

    mean: float
    median: float
    std: float
    p99: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """All requests of one kind."""

    duration: float  # seconds
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_goodput: float | None  # requests a second that held every objective; None: none was set
    peak_concurrent_requests: int
    latencies: dict[str, LatencySummary]  # by metric
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    errors: dict[str, int]  # how often each

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration if self.duration > 0 else 0.0

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration if self.duration > 0 else 0.0

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration if self.duration > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """With the keys of `vllm bench serve`, and `rounds`, `errors` and the like beside them."""
        data: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.peak_concurrent_requests,
        }
        for metric, summary in self.latencies.items():
            data[f"mean_{metric}_ms"] = summary.mean
            data[f"median_{metric}_ms"] = summary.median
            data[f"std_{metric}_ms"] = summary.std
            data[f"p99_{metric}_ms"] = summary.p99
        if self.rounds:
            data["spec_decode_rounds"] = self.rounds
            data["spec_decode_draft_tokens"] = self.draft_tokens
            data["spec_decode_accepted_tokens"] = self.accepted_tokens
            data["spec_decode_tokens_per_round"] = self.total_output_tokens / self.rounds
        data["error_counts"] = self.errors
        return data


def summarise(
    records: Sequence[RequestRecord], duration: float, objectives: Mapping[str, float] | None = None
) -> LoadSummary:
    """`duration`: seconds during which these requests were served. `objectives`: milliseconds by ttft, tpot, e2el;
    an answer of one token holds any tpot."""
    good = [record for record in records if not record.error]
    latencies = {
        "ttft": _in_ms([record.ttft for record in good]),
        "tpot": _in_ms([record.tpot for record in good if record.tpot is not None]),
        "itl": _in_ms([gap for record in good for gap in record.itls]),
        "e2el": _in_ms([record.latency for record in good]),
    }
    goodput = None
    if objectives:
        held = sum(_holds(record, objectives) for record in good)
        goodput = held / duration if duration > 0 else 0.0
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    return LoadSummary(
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        total_input_tokens=sum(record.prompt_tokens for record in good),
        total_output_tokens=sum(record.output_tokens for record in good),
        request_goodput=goodput,
        peak_concurrent_requests=peak_concurrency(good),
        latencies=latencies,
        rounds=sum(record.rounds for record in good),
        draft_tokens=sum(record.draft_tokens for record in good),
        accepted_tokens=sum(record.accepted_tokens for record in good),
        errors=errors,
    )


def detailed_json(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Request by request, in seconds, with the keys of `vllm bench serve`."""
    return {
        "prompts": [record.name for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.started for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "e2els": [record.latency for record in records],
        "errors": [record.error for record in records],
    }


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests under way at one moment; one that ends as another starts is not beside it."""
    changes = [(record.started, 1) for record in records]
    changes += [(record.started + record.latency, -1) for record in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def format_report(
    summaries: Mapping[Any, LoadSummary],
    ratios: Mapping[str, float | None],
    max_concurrency: int | None,
    request_rate: float,
) -> str:
    """A block for each mode of speculation, then the ratios between them."""
    text = ""
    for mode, summary in summaries.items():
        title = "Serving Benchmark Result" + (f", speculation {mode}" if len(summaries) > 1 else "")
        text += format_summary(summary, title, max_concurrency, request_rate)
    lines = [f"{name:<50} {'-' if ratio is None else format(ratio, '.2f')}\n" for name, ratio in ratios.items()]
    return text + "".join(lines)


def format_summary(summary: LoadSummary, title: str, max_concurrency: int | None, request_rate: float) -> str:
    """The block that `vllm bench serve` prints."""
    values: dict[str, int | float | None] = {
        "Successful requests:": summary.completed,
        "Failed requests:": summary.failed,
        "Maximum request concurrency:": max_concurrency,
        "Request rate configured (RPS):": None if request_rate == float("inf") else request_rate,
        "Benchmark duration (s):": summary.duration,
        "Total input tokens:": summary.total_input_tokens,
        "Total generated tokens:": summary.total_output_tokens,
        "Request throughput (req/s):": summary.request_throughput,
        "Request goodput (req/s):": summary.request_goodput,
        "Output token throughput (tok/s):": summary.output_throughput,
        "Peak concurrent requests:": summary.peak_concurrent_requests,
        "Total token throughput (tok/s):": summary.total_token_throughput,
    }
    lines = [f" {title} ".center(_WIDTH, "="), *(_line(name, one) for name, one in values.items() if one is not None)]
    for metric, (name, heading) in METRICS.items():
        latency = summary.latencies[metric]
        lines.append(heading.center(_WIDTH, "-"))
        lines.append(_line(f"Mean {name} (ms):", latency.mean))
        lines.append(_line(f"Median {name} (ms):", latency.median))
        lines.append(_line(f"P99 {name} (ms):", latency.p99))
    if summary.rounds:
        lines.append("Speculative Decoding".center(_WIDTH, "-"))
        lines.append(_line("Tokens per round:", summary.total_output_tokens / summary.rounds))
        lines.append(_line("Draft tokens:", summary.draft_tokens))
        lines.append(_line("Accepted tokens:", summary.accepted_tokens))
    lines += ["=" * _WIDTH, *(f"{count} x {error}" for error, count in summary.errors.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, value: int | float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown}"


def _in_ms(seconds: Sequence[float]) -> LatencySummary:
    values = np.asarray(seconds or [0.0], dtype=np.float64) * 1000.0
    return LatencySummary(
        float(values.mean()), float(np.median(values)), float(values.std()), float(np.percentile(values, 99))
    )


def _holds(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[metric] * 1000.0 <= limit for metric, limit in objectives.items())
