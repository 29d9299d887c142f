"""First forwards of a target engine: checks that it works, and measures the cost of rows."""

from __future__ import annotations

import numpy as np

from actors.draft_tree import DraftTree
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem

_PROFILE_ROWS = (1, 4, 8, 16, 32, 64)  # measured row counts; beyond, the curve is extrapolated
_PROFILE_RUNS = 2  # the faster one counts: the first run of a shape compiles and allocates


def warm_up(engine: TargetEngine) -> list[tuple[int, float]]:
    """Run a few forwards; (rows, seconds) of a forward by its rows, in a context of one token.

    To be called on all ranks of a group at once: which forwards there are does not depend on how long they take. One
    token is sampled, because the first sampled token compiles kernels. The engine holds no sequence before or after.
    """
    prompt = np.ones(2, dtype=np.int32)
    sampled = SequenceStart(SamplingParams(seed=0, temperature=1.0, top_k=8, top_p=0.9), len(prompt), "warm-up")
    engine.verify(VerifyBatch(0, [VerifyItem(SequenceDelta(1, 0, prompt), len(prompt), begin=sampled)]))
    engine.verify(VerifyBatch(0, [], [1]))
    room = min(engine.vocab_size, engine.options.num_blocks * engine.options.block_size - 1)
    return [(rows, _fastest(engine, rows)) for rows in _PROFILE_ROWS if rows <= room]


def _fastest(engine: TargetEngine, rows: int) -> float:
    """Seconds of a forward of one committed token and rows - 1 draft nodes below it, all of depth 1, so that no
    position exceeds the model's."""
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), 1, "warm-up")
    delta = SequenceDelta(1, 0, np.ones(1, dtype=np.int32))
    count = rows - 1
    tree = DraftTree(
        token_ids=np.arange(count, dtype=np.int32),
        parents=np.full(count, -1, dtype=np.int32),
        confidence=np.zeros(count, dtype=np.float32),
    )
    seconds = []
    for _ in range(_PROFILE_RUNS):
        batch = VerifyBatch(0, [VerifyItem(delta, 1, tree, begin)])
        seconds.append(engine.verify(batch).elapsed_s)
        engine.verify(VerifyBatch(0, [], [1]))
    return min(seconds)
