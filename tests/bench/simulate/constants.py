"""Measures the constants of a real cluster: forward times by rows, and what router, gateway and hops take.

Forwards are measured while serving, since processes that share processors slow each other down: decoding of 1, 2, 4 ...
sequences with and without drafts, prompts alone, and prompts among decoding sequences. A line by rows, a price for each
row with logits, one for each sequence and one for each cached token are fitted to the means of these rounds. A machine
that others use is faster at one time than at another, so samples are to be taken before, between and after what will
be compared, and each session's times are divided by its pace before they are fitted. The processor time of gateways is
the operating system's; the rest comes from what clients see beside that.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from actors.build import build_target_engine
from actors.home import paceline_home
from actors.models.catalog import resolve_model
from cluster.cli.bench.options import ServeOptions
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.serve import run_serve
from cluster.config import ClusterConfig
from cluster.simulate.options import CostOptions, ForwardOptions
from tests.bench.simulate.real_cluster import GATEWAYS, RoundMeter, processor_s

_DECODING = (1, 2, 4, 8, 16)
_PROMPT = 8  # tokens of a prompt while decoding is measured
_FAR, _FAR_PROMPT = 8, 256  # sequences, and tokens of their prompts, for what a cached token costs
PROMPT_ROWS = (8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
_REPEATS = 3  # of each, every time
_DRAFTING_REPEATS = 3  # they alone tell what draft rows of many sequences take, and rounds with drafts differ
_MIXED = ((8, 48), (32, 48), (96, 16))  # tokens of a prompt, and how many of them, among decoding sequences
_MIXED_ANSWER, _MIXED_AT_A_TIME = 16, 16
_SHORT, _LONG = 8, 40  # tokens of the answers while decoding is measured
_ASKED = 16  # requests at once whose gateway's time is measured
_KNOTS = (1, 2, 4, *PROMPT_ROWS)  # of the line by rows
_REWEIGHTINGS, _SMALL_ERROR = 30, 0.01
_FIRST_TOKEN = 1000  # ids of made-up prompts


@dataclass(frozen=True, slots=True)
class Measured:
    costs: CostOptions
    forward: ForwardOptions

    def as_json(self) -> dict[str, Any]:
        return {"costs": self.costs.model_dump(), "forward": self.forward.model_dump()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Measured:
        return Measured(CostOptions.model_validate(data["costs"]), ForwardOptions.model_validate(data["forward"]))


@dataclass(frozen=True, slots=True)
class MeanRound:
    """Means over rounds of one kind of load."""

    kind: str  # rounds that take as long as each other, but for the machine's pace
    session: int  # in which it was measured
    rows: float  # as the target pads them
    scored: float  # of them, with logits
    sequences: float
    context: float  # cached tokens of all sequences
    target_s: float


@dataclass(slots=True)
class Samples:
    """What has been measured so far."""

    rounds: list[MeanRound] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between chunks, without the target's and the router's part
    router: dict[int, list[float]] = field(default_factory=dict)  # s a round, by sequences
    firsts: list[float] = field(default_factory=list)  # s to the only token of an answer, without the target's part
    gateway: list[tuple[float, float]] = field(default_factory=list)  # processor s of a request, and of a chunk
    row_steps: tuple[int, ...] = ()  # that the target pads its forwards to

    def fit(self) -> Measured:
        return Measured(self._costs(), fit_forward(at_one_pace(self.rounds), self.row_steps))

    def _costs(self) -> CostOptions:
        counts = np.array(sorted(self.router), np.float64)
        slope, level = np.polyfit(counts, [statistics.median(self.router[int(count)]) for count in counts], 1)
        link_s = max(0.0, statistics.median(self.gaps))
        request_s, chunk_s = (statistics.median(column) for column in zip(*self.gateway, strict=True))
        router_s = max(0.0, level + slope)
        rest_s = max(0.0, statistics.median(self.firsts) - router_s - link_s - request_s - chunk_s)
        return CostOptions(
            gateway_request_s=request_s,
            gateway_chunk_s=chunk_s,
            hop_s=rest_s / 4,  # to the gateway, to the router, and back
            router_request_s=0.0,  # part of the wait for a first token, which is measured as a whole
            router_round_s=max(0.0, float(level)),
            router_sequence_s=max(0.0, float(slope)),
            link_s=link_s,
        )


class Probe:
    """Sends made-up prompts to a cluster and adds to the samples."""

    def __init__(self, url: str, row_steps: tuple[int, ...], seed: int = 0) -> None:
        """row_steps: see `target_row_steps`."""
        self.samples = Samples(row_steps=row_steps)
        self._url = url
        self._random = np.random.default_rng(seed)
        self._session = 0

    def sample(self) -> None:
        """Everything without drafts, of which a router learns nothing that it would go by afterwards."""
        self._session += 1
        samples = self.samples
        for count in _DECODING:
            self._add_plain_decoding(count)
        read, _ = self._decode(_FAR, _FAR_PROMPT)  # they do not all begin at once
        sequences = read["rows"] / read["rounds"]
        self._add("far", read, None, sequences, sequences, _FAR_PROMPT + (_SHORT + _LONG) / 2)
        for rows in PROMPT_ROWS * _REPEATS:
            # In a round each; another, empty one frees the sequence.
            read, records = self._metered(1, 1, prompt=rows, answer=1)
            alone = MeanRound(
                f"prompt of {rows}", self._session, padded(rows, samples.row_steps), 1.0, 1.0, 0.0, read["target_s"]
            )
            samples.rounds.append(alone)
            samples.firsts.append(records[0].ttft - read["target_s"])
        for prompt, number in _MIXED:
            read, _ = self._metered(number, _MIXED_AT_A_TIME, prompt=prompt, answer=_MIXED_ANSWER)
            scored = read["tokens"] / read["rounds"]
            self._add(f"among prompts of {prompt}", read, None, scored, scored, prompt + _MIXED_ANSWER / 2)
        samples.gateway.append(self._gateway_times())

    def sample_drafting(self) -> None:
        """What drafting costs the router, and draft rows the target; without drafts, too, which tells the pace."""
        self._session += 1
        for count in _DECODING * _DRAFTING_REPEATS:
            self._add_plain_decoding(count)
            read, _ = self._decode(count, _PROMPT, "on")
            scored = read["rows"] / read["rounds"]
            self._add(f"drafts of {count}", read, None, scored, count, _PROMPT + (_SHORT + _LONG) / 2)
            self.samples.router.setdefault(count, []).append(read["router_s"] / read["rounds"])

    def _add_plain_decoding(self, count: int) -> None:
        read, gap = self._decode(count, _PROMPT)
        rounds = read["rounds"]
        self._add(f"decoding {count}", read, count, read["rows"] / rounds, count, _PROMPT + (_SHORT + _LONG) / 2)
        self.samples.gaps.append(gap - (read["target_s"] + read["router_s"]) / rounds)

    def _add(
        self, kind: str, read: Mapping[str, float], rows: int | None, scored: float, sequences: float, cached: float
    ) -> None:
        """rows: None where they differ from round to round. cached: tokens of a sequence."""
        mean = read["rows"] / read["rounds"]
        filled = mean_padded(mean, self.samples.row_steps) if rows is None else padded(rows, self.samples.row_steps)
        seconds = read["target_s"] / read["rounds"]
        told = MeanRound(kind, self._session, filled, scored, sequences, sequences * cached, seconds)
        self.samples.rounds.append(told)

    def _decode(self, count: int, prompt: int, speculation: str = "off") -> tuple[dict[str, float], float]:
        """What longer answers of so many sequences take more than shorter ones, so that prompts and the first and last
        rounds, in which not all sequences decode, cancel out; and the gap between chunks."""
        short, _ = self._metered(count, count, prompt=prompt, answer=_SHORT, speculation=speculation)
        long, records = self._metered(count, count, prompt=prompt, answer=_LONG, speculation=speculation)
        gap = statistics.median(gap for record in records for gap in record.itls)
        return {name: long[name] - short[name] for name in long}, gap

    def _gateway_times(self) -> tuple[float, float]:
        spent = []
        for answer in (_SHORT, _LONG):
            before = processor_s(GATEWAYS)
            self._ask(_ASKED, _ASKED, prompt=_PROMPT, answer=answer)
            spent.append((processor_s(GATEWAYS) - before) / _ASKED)
        chunk_s = max(0.0, (spent[1] - spent[0]) / (_LONG - _SHORT))
        return max(0.0, spent[0] - _SHORT * chunk_s), chunk_s

    def _metered(self, number, concurrency, *, prompt, answer, speculation="off"):  # type: ignore[no-untyped-def]
        """What the router's metrics say of these requests, and the client's records."""
        meter = RoundMeter(self._url)
        records = self._ask(number, concurrency, prompt=prompt, answer=answer, speculation=speculation)
        return meter.read(), records

    def _ask(self, number, concurrency, *, prompt, answer, speculation="off"):  # type: ignore[no-untyped-def]
        prompts = [
            BenchPrompt(str(index), "", token_ids=tuple(self._random.integers(_FIRST_TOKEN, 40_000, prompt).tolist()))
            for index in range(number)
        ]
        options = ServeOptions(
            url=self._url, num_prompts=number, max_concurrency=concurrency, max_tokens=answer, speculation=speculation,
            ignore_eos=True, num_warmups=0,
        )  # fmt: skip
        return run_serve(prompts, options).records[speculation]


def target_row_steps(config: ClusterConfig) -> tuple[int, ...]:
    """Row counts that a target of this configuration pads its forwards to: the kernels that were fastest on this
    machine decide."""
    torch.set_num_threads(config.target.threads)
    source = resolve_model(config.target.model, paceline_home())
    return tuple(build_target_engine(source, config.target).row_steps)


def padded(rows: int, row_steps: Sequence[int]) -> int:
    """Rows that the target computes for `rows`."""
    step = bisect_left(row_steps, rows)
    return row_steps[step] if step < len(row_steps) else rows


def mean_padded(rows: float, row_steps: Sequence[int]) -> float:
    """The same of rounds that have so many rows in the mean. Most rounds of few rows have one row or four, and no
    padding."""
    step = bisect_left(row_steps, rows)
    if rows <= 4.0 or not 0 < step < len(row_steps):
        return rows
    return rows + (row_steps[step] - row_steps[step - 1] - 1) / 2


def at_one_pace(rounds: Sequence[MeanRound]) -> list[MeanRound]:
    """Each session's times, divided by its pace: the median of how much longer than in all sessions (their median)
    rounds of a kind took. Kinds of one session alone do not count."""
    kinds: dict[str, list[MeanRound]] = {}
    for told in rounds:
        kinds.setdefault(told.kind, []).append(told)
    usual = {
        kind: statistics.median(told.target_s for told in alike)
        for kind, alike in kinds.items()
        if len({told.session for told in alike}) > 1
    }
    found = []
    for session in sorted({told.session for told in rounds}):
        own = [told for told in rounds if told.session == session]
        paces = [told.target_s / usual[told.kind] for told in own if told.kind in usual]
        pace = statistics.median(paces) if paces else 1.0
        found += [replace(told, target_s=told.target_s / pace) for told in own]
    return found


def fit_forward(rounds: Sequence[MeanRound], row_steps: tuple[int, ...]) -> ForwardOptions:
    """The line by rows, which never falls, and the prices, >= 0, that leave the least relative errors."""
    knots = np.array(_KNOTS, np.float64)
    columns = []
    for told in rounds:
        risen = np.clip((told.rows - knots[:-1]) / np.diff(knots), 0.0, 1.0)  # share of each step between two knots
        columns.append([1.0, *risen, told.scored, told.sequences - 1.0, told.context])
    seconds = np.array([told.target_s for told in rounds])
    found = _least_errors(np.array(columns) / seconds[:, None])
    line = np.cumsum(found[: len(knots)])
    return ForwardOptions(
        row_times=tuple(zip(_KNOTS, line.tolist(), strict=True)),
        row_steps=row_steps,
        scored_row_s=float(found[-3]),
        sequence_s=float(found[-2]),
        context_token_s=float(found[-1]),
    )


def _least_errors(columns: np.ndarray) -> np.ndarray:
    """Factors >= 0 of the columns, float64 [n], with which each row adds up to 1: with the least sum of errors, which
    a few slow rounds do not move, by reweighted least squares. A factor that would be negative is left out."""
    weights = np.ones(len(columns))
    kept = np.ones(columns.shape[1], bool)
    found = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        while True:
            found[:] = 0.0
            found[kept] = np.linalg.lstsq(columns[:, kept] * weights[:, None], weights, rcond=None)[0]
            if (found >= 0.0).all():
                break
            kept[np.argmin(found)] = False
        weights = 1.0 / np.sqrt(np.maximum(np.abs(columns @ found - 1.0), _SMALL_ERROR))
    return found
