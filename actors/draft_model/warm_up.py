"""First drafts of a draft engine, so that no round waits for kernels to be compiled or launches to be recorded."""

from __future__ import annotations

import numpy as np

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart

# Uses every step of sampling: kernels are compiled when the first row needs them.
_SAMPLED = SamplingParams(seed=0, temperature=1.0, top_k=8, top_p=0.9, presence_penalty=0.5)
_GREEDY = SamplingParams(seed=0, temperature=0.0)
_SEQUENCES = (8, 4, 2, 1)  # of drafts that are recorded; the largest first: smaller ones fit into their memory
_MOST_ACCEPTED = 4  # tokens of a draft
_PROMPT = 32  # tokens


def warm_up(engine: DraftEngine | RetokenizedDraftEngine, gamma: int, branch: int) -> None:
    """Draft once, sampled: the first draft allocates the cache and compiles kernels. Where launches are recorded, draft
    behind a prompt, too, and greedily for up to 8 sequences, after drafts of which none to four tokens were accepted.
    The engine holds no sequence before or after.

    gamma, branch: of trees, as in the configuration; drafts of `ouroboros` are not among these.
    """
    shape = gamma, branch
    _draft(engine, _SAMPLED, shape, [[2]])
    if not engine.records_launches:
        return
    _draft(engine, _SAMPLED, shape, [[_PROMPT]])
    most = min(gamma, _MOST_ACCEPTED) + 1
    for count in _SEQUENCES:
        # Sums of new tokens, of sequences that accept unlike numbers of tokens
        sums = range(count, count * most + 1, max(1, count // 2))
        accepted = [[new // count + (index < new % count) for index in range(count)] for new in sums]
        _draft(engine, _GREEDY, shape, [[2] * count, *accepted, *accepted])  # the second time is recorded


def _draft(
    engine: DraftEngine | RetokenizedDraftEngine,
    sampling: SamplingParams,
    shape: tuple[int, int],
    new_tokens: list[list[int]],
) -> None:
    """Drafts for some sequences, one after each of their numbers of new tokens. shape: gamma and branch."""
    (gamma, branch), count = shape, len(new_tokens[0])
    begin: SequenceStart | None = SequenceStart(sampling, new_tokens[0][0], "warm-up")
    lengths = [0] * count
    for number, new in enumerate(new_tokens):
        items = [
            DraftItem(
                SequenceDelta(index + 1, lengths[index], np.ones(new[index], np.int32)),
                gamma * branch,
                begin,
                max_depth=gamma,
                branch=branch,
            )
            for index in range(count)
        ]
        engine.draft(DraftBatch(number, items))
        lengths, begin = [length + more for length, more in zip(lengths, new, strict=True)], None
    engine.draft(DraftBatch(len(new_tokens), [], list(range(1, count + 1))))
