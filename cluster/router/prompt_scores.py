"""Log-probabilities of a prompt's tokens, which come in parts with the rounds that compute it."""

from __future__ import annotations

import msgspec

from actors.messages import TokenLogprobs, Verdict
from cluster.router.round import RoundEntry
from cluster.router.sequence import Sequence


def take_in(entry: RoundEntry, verdict: Verdict) -> bool:
    """Keep what the verdict says of the prompt. False: a part is missing, so that the prompt must be computed again."""
    sequence = entry.sequence
    parts = sequence.progress.prompt_parts
    if entry.target_known == 0:
        parts.clear()
    if verdict.prompt_logprobs is not None:
        parts.append(verdict.prompt_logprobs)
    return verdict.next_token < 0 or sum(map(len, parts)) == sequence.begin.num_prompt_tokens - 1


def completed(sequence: Sequence) -> TokenLogprobs | None:
    """All parts as one, when the sequence emits first; they are not asked for again. None: not wanted."""
    if sequence.begin.num_prompt_logprobs < 0:
        return None
    sequence.begin = msgspec.structs.replace(sequence.begin, num_prompt_logprobs=-1)
    parts, sequence.progress.prompt_parts = sequence.progress.prompt_parts, []
    return TokenLogprobs.joined(parts, 0)
