"""What a turn cost and what speculation brought, in a line each."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.cli.chat.backend import AnswerTotals


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds since the question was asked."""

    first_s: float  # the first tokens were there
    last_s: float
    first_tokens: int  # how many those were


def decode_rate(num_tokens: int, times: TurnTimes) -> float:
    """Tokens a second after the first ones, so that reading the prompt, which drafts cannot speed up, is left out."""
    later, seconds = num_tokens - times.first_tokens, times.last_s - times.first_s
    if later > 0 and seconds > 0:
        return later / seconds
    return num_tokens / times.last_s if times.last_s > 0 else 0.0


def format_stats(totals: AnswerTotals, times: TurnTimes) -> str:
    rounds = max(1, totals.rounds)
    parts = [f"{_count(totals.num_tokens, 'token')} in {_count(totals.rounds, 'round')}"]
    parts[0] += f", {totals.num_tokens / rounds:.2f} a round"
    if totals.draft_tokens:
        accepted = sum(totals.accepted.values())
        share = accepted / totals.draft_tokens
        parts.append(f"accepted {accepted} of {totals.draft_tokens} draft tokens, {share:.0%}{_by_source(totals)}")
    else:
        parts.append("no draft tokens")
    parts.append(f"{decode_rate(totals.num_tokens, times):.1f} tokens/s, the first after {times.first_s:.2f} s")
    if totals.finish_reason == "length":
        parts.append("cut at the length limit")
    return " | ".join(parts)


def format_comparison(
    drafted: tuple[AnswerTotals, TurnTimes],
    plain: tuple[AnswerTotals, TurnTimes],
    texts: tuple[str, str],
    *,
    is_coupled: bool = True,
) -> str:
    """texts: with drafts and without; is_coupled: they should be the same."""
    fast, slow = (decode_rate(totals.num_tokens, times) for totals, times in (drafted, plain))
    line = f"with drafts {fast:.1f} tokens/s, plain decoding {slow:.1f} tokens/s"
    if slow > 0:
        line += f": {fast / slow:.2f} times as fast"
    if texts[0] == texts[1]:
        return f"{line} | the texts are equal"
    same = next((i for i, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    reason = "rounding has turned a near-tie, which --exact bitwise (target.exact of a server) rules out"
    if not is_coupled:
        reason = "with --acceptance rejection only how likely each text is stays the same"
    return f"{line} | the texts differ from character {same + 1} on: {reason}"


def _by_source(totals: AnswerTotals) -> str:
    names = [*totals.accepted, *(name for name in totals.verified if name not in totals.accepted)]
    counts = []
    for name in names:
        count = f"{name} {totals.accepted.get(name, 0)}"
        if name in totals.verified:
            count += f" of {totals.verified[name]}"
        counts.append(count)
    return f" ({', '.join(counts)})" if counts else ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
