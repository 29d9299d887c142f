"""The arithmetic of `paceline bench local` and `bench cache`: speeds, ratios and whether answers are the same."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEAR_TIE = 1e-3  # logit gap under which two ways to add up the same numbers may choose differently


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method said to one prompt."""

    token_ids: tuple[int, ...]  # without the stop token
    rounds: int  # forwards of the target that emitted tokens of it
    draft_tokens: int = 0  # verified
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)  # by source
    text: str = ""
    round_tokens: tuple[int, ...] | None = None  # how many each round emitted; None here and below: not known
    target_rows: int | None = None  # computed for it, prompt included
    seconds: float | None = None  # of its own, from its first round to its last


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """The prompts that one method answered in one timed call (or one after the other, where it knows no batches)."""

    method: str
    task: str
    prompts: tuple[str, ...]
    seconds: float  # wall time from prompt token ids to answers, prefill included
    answers: tuple[Answer, ...]  # one per prompt

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """A method over some blocks. Ratios are against the reference on the same prompts; None where it said nothing."""

    num_prompts: int
    num_tokens: int
    seconds: float
    tokens_per_second: float  # all tokens by all seconds
    ratio: float | None  # of tokens_per_second
    median_ratio: float | None  # of tokens_per_second block by block
    tokens_per_round: float
    draft_tokens: int
    accepted_tokens: dict[str, int]  # by source
    accepted_share: float | None  # of the draft tokens; None: there were none


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the reference's."""

    prompt: str
    position: int  # within the answer
    expected: int | None  # the reference's token; None: it had ended
    found: int | None
    logit_gap: float | None  # of the reference model's two best tokens there; None: not computed


@dataclass(frozen=True, slots=True)
class Equality:
    """How a method's answers compare with the reference's, token by token."""

    num_compared: int
    differences: tuple[Difference, ...]  # the first of each answer that has one

    @property
    def num_identical(self) -> int:
        return self.num_compared - len(self.differences)

    @property
    def num_near_ties(self) -> int:
        return sum(one.logit_gap is not None and one.logit_gap < NEAR_TIE for one in self.differences)

    @property
    def largest_gap(self) -> float | None:
        return max((one.logit_gap for one in self.differences if one.logit_gap is not None), default=None)


def measure_speed(
    blocks: Sequence[TimedBlock], method: str, reference: str | None = None, task: str | None = None
) -> Speed:
    """Sum up a method's blocks, those of one task only if given. `reference` must have run the same blocks."""
    own = _blocks_of(blocks, method, task)
    answers = [answer for block in own for answer in block.answers]
    num_tokens, seconds = _totals(own)
    rounds = sum(answer.rounds for answer in answers)
    drafted = sum(answer.draft_tokens for answer in answers)
    accepted: Counter[str] = Counter()
    for answer in answers:
        accepted.update(answer.accepted_tokens)
    ratio = median_ratio = None
    if reference is not None:
        others = _blocks_of(blocks, reference, task)
        ratio = _ratio((num_tokens, seconds), _totals(others))
        rates = {block.prompts: block.tokens_per_second for block in others}
        ratios = [block.tokens_per_second / rates[block.prompts] for block in own if rates[block.prompts] > 0]
        median_ratio = statistics.median(ratios) if ratios else None
    return Speed(
        num_prompts=len(answers),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds > 0 else 0.0,
        ratio=ratio,
        median_ratio=median_ratio,
        tokens_per_round=num_tokens / rounds if rounds else 0.0,
        draft_tokens=drafted,
        accepted_tokens=dict(accepted),
        accepted_share=accepted.total() / drafted if drafted else None,
    )


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first index at which two answers differ; where one merely ends earlier, its length. None: identical."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return index
    shorter, longer = sorted((len(expected), len(found)))
    return None if shorter == longer else shorter


def answers_by_prompt(blocks: Sequence[TimedBlock], method: str) -> dict[str, Answer]:
    """In the order in which they were given; keys are `TimedBlock.prompts`."""
    return {
        prompt: answer
        for block in _blocks_of(blocks, method, None)
        for prompt, answer in zip(block.prompts, block.answers, strict=True)
    }


def _blocks_of(blocks: Sequence[TimedBlock], method: str, task: str | None) -> list[TimedBlock]:
    return [block for block in blocks if block.method == method and task in (None, block.task)]


def _totals(blocks: Sequence[TimedBlock]) -> tuple[int, float]:
    return sum(block.num_tokens for block in blocks), sum(block.seconds for block in blocks)


def _ratio(own: tuple[int, float], other: tuple[int, float]) -> float | None:
    (tokens, seconds), (other_tokens, other_seconds) = own, other
    return (tokens * other_seconds) / (other_tokens * seconds) if other_tokens and seconds > 0 else None
