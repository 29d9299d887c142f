"""The arithmetic of `paceline bench local` and `bench cache`: speeds, ratios and whether answers are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from cluster.offline.results import Generation


@dataclass(frozen=True, slots=True)
class Answer:
    """What `generate` of `transformers` answered to one prompt; fields as in `Generation`, the engine's answer."""

    token_ids: Sequence[int]  # without the stop token
    rounds: int  # target forwards that emitted its tokens
    draft_tokens: int = 0  # verified
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)  # by source
    text: str = ""


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """The prompts that one method answered in one timed call (or one after the other, where it knows no batches)."""

    method: str
    task: str
    prompts: tuple[str, ...]
    seconds: float  # from prompt token ids to answers, prefill included
    answers: tuple[Answer | Generation, ...]  # one per prompt


@dataclass(frozen=True, slots=True)
class Speed:
    """A method over some blocks."""

    num_prompts: int
    num_tokens: int
    seconds: float
    tokens_per_second: float  # all tokens by all seconds
    ratio: float | None  # tokens_per_second by the reference's on the same prompts; None: one of them has no tokens
    tokens_per_round: float
    draft_tokens: int
    accepted_tokens: dict[str, int]  # by source
    accepted_share: float | None  # accepted / draft_tokens; None: there were no drafts


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the reference's."""

    prompt: str
    position: int  # within the answer
    expected: int | None  # the reference's token; None: it had ended
    found: int | None


def measure_speed(blocks: Sequence[TimedBlock], method: str, reference: str, task: str | None = None) -> Speed:
    """Sum up a method's blocks, those of one task only if given. `reference` must have run the same blocks."""
    own, others = (
        [one for one in blocks if one.method == name and task in (None, one.task)] for name in (method, reference)
    )
    answers = [answer for block in own for answer in block.answers]
    rounds = sum(answer.rounds for answer in answers)
    drafted = sum(answer.draft_tokens for answer in answers)
    accepted: Counter[str] = Counter()
    for answer in answers:
        accepted.update(answer.accepted_tokens)
    (num_tokens, seconds), (other_tokens, other_seconds) = _totals(own), _totals(others)
    return Speed(
        num_prompts=len(answers),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds > 0 else 0.0,
        ratio=num_tokens * other_seconds / (other_tokens * seconds) if other_tokens and seconds > 0 else None,
        tokens_per_round=num_tokens / rounds if rounds else 0.0,
        draft_tokens=drafted,
        accepted_tokens=dict(accepted),
        accepted_share=accepted.total() / drafted if drafted else None,
    )


def find_differences(blocks: Sequence[TimedBlock], method: str, reference: str) -> tuple[Difference, ...]:
    """Where the method's answers leave the reference's to the same prompts: the first place in each such answer."""
    expected, found = (
        {
            prompt: answer.token_ids
            for block in blocks
            if block.method == name
            for prompt, answer in zip(block.prompts, block.answers, strict=True)
        }
        for name in (reference, method)
    )
    differences = []
    for prompt, wanted in expected.items():
        pairs = enumerate(zip_longest(wanted, found[prompt]))
        if parted := next(((at, *pair) for at, pair in pairs if pair[0] != pair[1]), None):
            differences.append(Difference(prompt, *parted))
    return tuple(differences)


def _totals(blocks: Sequence[TimedBlock]) -> tuple[int, float]:
    tokens = sum(len(answer.token_ids) for block in blocks for answer in block.answers)
    return tokens, sum(block.seconds for block in blocks)
