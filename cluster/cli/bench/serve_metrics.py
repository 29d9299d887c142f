"""The arithmetic of `paceline bench serve`: what `vllm bench serve` computes, under the same names. No network in here.

TTFT: from sending a request to the first chunk with text. TPOT: (last chunk - first) / (tokens - 1), for answers of two
tokens or more. ITL: the time between one chunk with text and the next; a chunk holds all tokens of a round, so with
speculation ITL is the time of a round and not of a token. E2EL: from sending to the last chunk. Requests that failed
count in `failed` only. With a limit on concurrency, waiting for a free place comes before sending and is not counted;
waiting after a 429 is, for times count from the first sending.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cluster.cli.bench.stream_client import RequestRecord

Summary = dict[str, Any]

_METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_WIDTH = 50
# Lines of the block that `vllm bench serve` prints, before the latencies.
_LINES = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Retries after 429:": "retries",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Request goodput (req/s):": "request_goodput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}
_SPECULATION_LINES = {
    "Tokens per round:": "spec_decode_tokens_per_round",
    "Draft tokens:": "spec_decode_draft_tokens",
    "Accepted tokens:": "spec_decode_accepted_tokens",
}


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
        "retries": sum(record.retries for record in records),
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


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests under way at one moment; one that ends as another starts is not beside it."""
    changes = [(record.started, 1) for record in records]
    changes += [(record.started + record.latency, -1) for record in records]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def format_summary(summary: Summary, title: str, max_concurrency: int | None, request_rate: float) -> str:
    """The block that `vllm bench serve` prints."""
    settings = {"max_concurrency": max_concurrency, "request_rate": None if math.isinf(request_rate) else request_rate}
    settings["retries"] = summary["retries"] or None
    lines = [f" {title} ".center(_WIDTH, "="), *_shown(_LINES, summary | settings)]
    for metric, heading in _METRICS.items():
        figures = {
            f"{name.title()} {metric.upper()} (ms):": f"{name}_{metric}_ms" for name in ("mean", "median", "p99")
        }
        lines += [heading.center(_WIDTH, "-"), *_shown(figures, summary)]
    if "spec_decode_rounds" in summary:
        lines += ["Speculative Decoding".center(_WIDTH, "-"), *_shown(_SPECULATION_LINES, summary)]
    lines += ["=" * _WIDTH, *(f"{count} x {error}" for error, count in summary["error_counts"].items())]
    return "\n".join(lines) + "\n"


def _shown(names: Mapping[str, str], values: Mapping[str, Any]) -> list[str]:
    """A line for each value that there is; names: keys of `values` by what is printed."""
    found = {line: values[key] for line, key in names.items() if values[key] is not None}
    return [f"{line:<40} {f'{value:.2f}' if isinstance(value, float) else value}" for line, value in found.items()]


def _holds(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[metric] * 1000.0 <= limit for metric, limit in objectives.items())
