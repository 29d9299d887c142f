"""Options of `paceline bench`: records whose fields are the options of a command."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from actors.drafters.registry import RETRIEVAL, expand_drafters
from actors.errors import InvalidRequest
from cluster.cli.api_key import ApiKeyOption
from cluster.cli.engine import MAX_GAMMA, ModelOptions, split_names

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL: prompt, messages, turns or prompt_token_ids, and maybe a task and a prediction."),
    ] = None
    spec_bench: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with the question.jsonl of Spec-Bench.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(ModelOptions):
    """Options of a benchmark of engines in its process."""

    drafters: Annotated[
        list[str],
        typer.Option(
            "--drafters",
            "--drafter",
            help="Names, comma-separated, as in `paceline generate`; may be repeated: an engine for each set.",
        ),
    ] = field(default_factory=lambda: ["auto"])
    max_draft_tokens: Annotated[int, typer.Option(min=0, max=256)] = 16

    def drafter_sets(self) -> tuple[tuple[str, ...], ...]:
        """Distinct sets of names, in order. Raises InvalidRequest, for corpora that no set uses, too."""
        sets = tuple(dict.fromkeys(map(split_names, self.drafters)))
        if () in sets:
            text = next(text for text in self.drafters if not split_names(text))
            raise InvalidRequest("--drafters", text, "it must hold at least one name")
        expanded = [expand_drafters(names, field="--drafters") for names in sets]
        for directory in self.corpus:
            if not directory.is_dir():
                raise InvalidRequest("--corpus", str(directory), "there is no such directory")
            if not any(RETRIEVAL in names for names in expanded):
                raise InvalidRequest("--corpus", str(directory), f"--drafters must include {RETRIEVAL} to use it")
        return sets


@dataclass(frozen=True, kw_only=True)
class LocalOptions(DraftingOptions):
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            "--no-baselines",
            help="Measure against decoding without drafts instead of `transformers`, and show acceptance by position.",
        ),
    ] = False
    task: Annotated[
        Literal["tools"] | None,
        typer.Option(help="tools: calls of six tools, constrained and not, in place of prompts; with --compare."),
    ] = None
    rows_per_task: Annotated[
        int | None, typer.Option(min=1, help="Rows of each task, evenly spaced; by default all.")
    ] = None
    learn_rows: Annotated[
        int, typer.Option(min=0, help="Other rows of each task that engines with drafters answer first: a warm start.")
    ] = 0
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128
    batch_size: Annotated[int, typer.Option(min=1, max=1024)] = 1
    gamma: Annotated[str, typer.Option(help="Tokens ahead that the draft model drafts; 2,4,8: an engine for each.")] = (
        "4"
    )
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="With --compare; 0: the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Prompt i is sampled with seed + i.")] = 0

    def gammas(self) -> tuple[int, ...]:
        """Distinct values, in order. Raises InvalidRequest."""
        parts = split_names(self.gamma)
        # int() refuses thousands of digits.
        if not parts or not all(part.isdecimal() and len(part) < 9 and 1 <= int(part) <= MAX_GAMMA for part in parts):
            raise InvalidRequest("--gamma", self.gamma, f"it must hold integers from 1 to {MAX_GAMMA}, comma-separated")
        return tuple(dict.fromkeys(map(int, parts)))


@dataclass(frozen=True, kw_only=True)
class CacheOptions(DraftingOptions):
    draft_model: Annotated[str, typer.Option(help="The same, or auto (the drafter built for the model), or none.")] = (
        "none"
    )
    kinds: Annotated[str, typer.Option(help="Kinds of requests to measure, comma-separated; by default all.")] = ""
    rows: Annotated[int, typer.Option(min=1, help="Requests of each kind that needs no prompts file.")] = 4
    rows_per_task: Annotated[int, typer.Option(min=1, help="Rows of each task of the prompts file that are asked.")] = 2
    rows_before: Annotated[int, typer.Option(min=1, help="Other rows of each task that have been answered before.")] = 4
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96
    replica: Annotated[
        bool, typer.Option("--replica", help="Also ask an engine that has answered before itself: a warm replica.")
    ] = False
    row_times: Annotated[
        str,
        typer.Option(
            metavar="ROWS:MS,...", help="Forward times, such as 1:36,8:42,16:61; by default as measured here."
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000"
    api_key: ApiKeyOption = field(default=None, repr=False)
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests; with --speculation both, of either kind.")] = 100
    request_rate: Annotated[float, typer.Option(help="Requests a second, Poisson; inf sends all at once.")] = math.inf
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests under way at a time; by default as many as the server says it takes."),
    ] = None
    max_retries: Annotated[
        int, typer.Option(min=0, help="How often a request refused with 429 is sent again, after its Retry-After.")
    ] = 5
    max_tokens: Annotated[int, typer.Option(min=1)] = 128
    speculation: Annotated[
        Literal["on", "off", "both"], typer.Option(help="both: blocks with and without take turns.")
    ] = "on"
    block_size: Annotated[int, typer.Option(min=1, help="Requests in such a block.")] = 16
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0
    seed: Annotated[int, typer.Option(help="Of arrivals; request i is sampled with seed + i.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens tokens.")] = False
    goodput: Annotated[list[str], typer.Option(help="Objective as ttft|tpot|e2el:milliseconds; may be repeated.")] = (
        field(default_factory=list)
    )
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests of either kind beforehand.")] = 1
    model: Annotated[str | None, typer.Option(help="By default the first that the server lists.")] = None
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a byte after which a request has failed.")
    ] = 600.0

    def objectives(self) -> dict[str, float]:
        """Milliseconds by metric. Raises InvalidRequest."""
        found = {}
        for text in self.goodput:
            metric, _, limit = text.partition(":")
            try:
                found[metric] = float(limit)
            except ValueError:
                found[metric] = -1.0
            if metric not in GOODPUT_METRICS or not found[metric] >= 0:
                known = ", ".join(GOODPUT_METRICS)
                raise InvalidRequest("--goodput", text, f"write metric:milliseconds, metric one of {known}")
        return found
