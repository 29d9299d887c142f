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


def warm_up(engine: DraftEngine | RetokenizedDraftEngine, gamma: int, branch: int) -> None:
    """Draft once, sampled: the first draft allocates the cache and compiles kernels. Where launches are recorded, draft
    greedily for up to 8 sequences, after drafts of which no token to four were accepted. The engine holds no sequence
    before or after.

    gamma, branch: of drafts, as in the configuration.
    """
    _draft(engine, 1, _SAMPLED, gamma, branch, (2,))
    if engine.records_launches:
        for count in _SEQUENCES:
            accepted = range(1, min(gamma, _MOST_ACCEPTED) + 2)
            _draft(engine, count, _GREEDY, gamma, branch, (2, *accepted, *accepted))  # the second time is recorded


def _draft(
    engine: DraftEngine | RetokenizedDraftEngine,
    count: int,
    sampling: SamplingParams,
    gamma: int,
    branch: int,
    new_tokens: tuple[int, ...],
) -> None:
    """Drafts for `count` sequences, one after each number of new tokens."""
    begin: SequenceStart | None = SequenceStart(sampling, new_tokens[0], "warm-up")
    length = 0
    for number, new in enumerate(new_tokens):
        items = [
            DraftItem(
                SequenceDelta(seq_id, length, np.ones(new, np.int32)),
                gamma * branch,
                begin,
                max_depth=gamma,
                branch=branch,
            )
            for seq_id in range(1, count + 1)
        ]
        engine.draft(DraftBatch(number, items))
        length, begin = length + new, None
    engine.draft(DraftBatch(len(new_tokens), [], list(range(1, count + 1))))
