"""The arithmetic of `paceline bench serve`: what `vllm bench serve` computes, under the same names. No network in here.

TTFT: from sending a request to the first chunk with text. TPOT: (last chunk - first) / (tokens - 1), for answers of two
tokens or more. ITL: the time between one chunk with text and the next; a chunk holds all tokens of a round, so with
speculation ITL is the time of a round and not of a token. E2EL: from sending to the last chunk. Requests that failed
count in `failed` only. With a limit on concurrency, waiting for a free place comes before sending and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
Summary = dict[str, Any]

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
    rounds: int = 0  # 0: unknown
    draft_tokens: int = 0
    accepted_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def summarise(
    records: Sequence[RequestRecord], duration: float, objectives: Mapping[str, float] | None = None
) -> Summary:
    """All requests of one kind, with the keys of `vllm bench serve`, and rounds and errors beside them.

    `duration`: seconds during which these requests were served. `objectives`: milliseconds by ttft, tpot, e2el; an
    answer of one token holds any tpot. Zeros stand where there was nothing to measure; without objectives
    `request_goodput` is None.
    """
    good = [record for record in records if not record.error]
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    held = sum(_holds(record, objectives or {}) for record in good)

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    summary: Summary = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": rate(len(good)),
        "request_goodput": rate(held) if objectives else None,
        "output_throughput": rate(output_tokens),
        "total_token_throughput": rate(prompt_tokens + output_tokens),
        "max_concurrent_requests": peak_concurrency(good),
    }
    seconds = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [gap for record in good for gap in record.itls],
        "e2el": [record.latency for record in good],
    }
    for metric, measured in seconds.items():
        values = np.asarray(measured or [0.0], dtype=np.float64) * 1000.0
        figures = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
        figures["p99"] = np.percentile(values, 99)
        summary |= {f"{name}_{metric}_ms": float(figure) for name, figure in figures.items()}
    if rounds := sum(record.rounds for record in good):
        summary["spec_decode_rounds"] = rounds
        summary["spec_decode_draft_tokens"] = sum(record.draft_tokens for record in good)
        summary["spec_decode_accepted_tokens"] = sum(record.accepted_tokens for record in good)
        summary["spec_decode_tokens_per_round"] = output_tokens / rounds
    summary["error_counts"] = dict(Counter(record.error for record in records if record.error))
    return summary


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


def format_summary(summary: Summary, title: str, max_concurrency: int | None, request_rate: float) -> str:
    """The block that `vllm bench serve` prints."""
    values = {
        "Successful requests:": summary["completed"],
        "Failed requests:": summary["failed"],
        "Maximum request concurrency:": max_concurrency,
        "Request rate configured (RPS):": None if request_rate == float("inf") else request_rate,
        "Benchmark duration (s):": summary["duration"],
        "Total input tokens:": summary["total_input_tokens"],
        "Total generated tokens:": summary["total_output_tokens"],
        "Request throughput (req/s):": summary["request_throughput"],
        "Request goodput (req/s):": summary["request_goodput"],
        "Output token throughput (tok/s):": summary["output_throughput"],
        "Peak concurrent requests:": summary["max_concurrent_requests"],
        "Total token throughput (tok/s):": summary["total_token_throughput"],
    }
    lines = [f" {title} ".center(_WIDTH, "="), *(_line(name, one) for name, one in values.items() if one is not None)]
    for metric, heading in METRICS.items():
        lines.append(heading.center(_WIDTH, "-"))
        for figure in ("mean", "median", "p99"):
            name = f"{figure.title()} {metric.upper()} (ms):"
            lines.append(_line(name, summary[f"{figure}_{metric}_ms"]))
    if "spec_decode_rounds" in summary:
        lines.append("Speculative Decoding".center(_WIDTH, "-"))
        lines.append(_line("Tokens per round:", summary["spec_decode_tokens_per_round"]))
        lines.append(_line("Draft tokens:", summary["spec_decode_draft_tokens"]))
        lines.append(_line("Accepted tokens:", summary["spec_decode_accepted_tokens"]))
    lines += ["=" * _WIDTH, *(f"{count} x {error}" for error, count in summary["error_counts"].items())]
    return "\n".join(lines) + "\n"


def _line(name: str, value: int | float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown}"


def _holds(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[metric] * 1000.0 <= limit for metric, limit in objectives.items())
