"""First forwards of a target engine: checks that it works, and measures the cost of rows."""

from __future__ import annotations

import numpy as np

from actors.draft_tree import DraftTree
from actors.engine.options import RoundLimits
from actors.engine.recorded_launches import MOST_RECORDED
from actors.engine.row_tiers import power_tier, row_tier
from actors.engine.target_engine import TargetEngine
from actors.messages import (
    AheadItem,
    RoundMasks,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TokenMasks,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
)

_PROFILE_ROWS = (1, 4, 8, 16, 32, 64)  # measured row counts; beyond, the curve is extrapolated
# Uses every step of sampling: kernels are compiled when the first row needs them.
_SAMPLING = SamplingParams(seed=0, temperature=1.0, top_k=8, top_p=0.9, presence_penalty=0.5)
_MOST_RECORDED_AHEAD = MOST_RECORDED * 3 // 4  # the rest is for other rounds
_PROFILE_RUNS = 4  # the first of a shape compiles and allocates, the second may record launches


def warm_up(engine: TargetEngine, runs: int = _PROFILE_RUNS) -> list[tuple[int, float]]:
    """Run a few forwards; (rows, seconds) of a forward by its rows, in a context of one token.

    runs: forwards of each number of rows, of which the fastest counts. To be called on all ranks of a group at once:
    which forwards there are does not depend on how long they take. The first round samples two sequences with draft
    trees, one of them within masks, and the next one is sent ahead: the first round of either kind compiles kernels.
    The engine holds no sequence before or after.
    """
    prompt = np.ones(2, dtype=np.int32)
    sampled = SequenceStart(_SAMPLING, len(prompt), "warm-up")
    tree = _tree(engine, 2)
    items = [VerifyItem(SequenceDelta(seq_id, 0, prompt), len(prompt), tree, begin=sampled) for seq_id in (1, 2)]
    everything = TokenMasks(np.full(-(-engine.vocab_size // 32), -1, np.int32), np.zeros(3, np.int32))
    engine.verify(VerifyBatch(0, items, masks_follow=True), lambda: RoundMasks(0, [everything, None]))
    if engine.overlaps:
        _follow_once(engine, items[0])
    engine.verify(VerifyBatch(0, [], [1, 2]))
    room = min(engine.vocab_size, engine.options.num_blocks * engine.options.block_size - 1)
    # The largest first: recorded launches share memory, and smaller ones fit into that of larger ones.
    profile = [(rows, _fastest(engine, rows, runs)) for rows in reversed(_PROFILE_ROWS) if rows <= room]
    return profile[::-1]


def record_rounds(engine: TargetEngine, limits: RoundLimits) -> int:
    """Have the launches of rounds that only decode recorded, where an engine records any: else each would take longer
    when it first comes. Returns their number.

    All numbers of sequences and rows come up to the limits, fewest sequences first, in the shortest tier of contexts,
    without penalties or top-p. To be called on all ranks of a group at once. The engine holds no sequence before or
    after.
    """
    if not engine.records_launches:
        return 0
    shapes = recordable_shapes(limits)
    for sequences, rows in reversed(shapes):  # recorded launches share memory, and smaller ones fit into larger ones
        each, rest = divmod(rows - sequences, sequences)
        items = [
            VerifyItem(
                SequenceDelta(index + 1, 0, np.ones(1, dtype=np.int32)),
                1,
                _tree(engine, each + (index < rest)),
                SequenceStart(SamplingParams(seed=0, temperature=0.0), 1, "warm-up"),
                head_nodes=0 if engine.has_head else -1,  # a head reads every round
            )
            for index in range(sequences)
        ]
        for _ in range(2):  # the second is recorded
            engine.verify(VerifyBatch(0, items, num_successors=limits.successors))
            engine.verify(VerifyBatch(0, [], [item.delta.seq_id for item in items]))
    return len(shapes)


def recordable_shapes(limits: RoundLimits) -> list[tuple[int, int]]:
    """(sequences, rows) of decoding rounds, each standing for all that are padded to the same numbers."""
    tiers = {power_tier(count) for count in range(1, limits.sequences + 1)}
    # The fewest of a tier have rounds of fewer rows than the most.
    counts = {min(count, limits.sequences) for tier in tiers for count in (tier // 2 + 1, tier)}
    shapes = {
        (power_tier(sequences), row_tier(rows)): (sequences, rows)
        for sequences in sorted(counts)
        for rows in range(sequences, sequences + min(limits.draft_rows, sequences * limits.tree_rows) + 1)
    }
    return list(shapes.values())[:_MOST_RECORDED_AHEAD]


def largest_round_slots(limits: RoundLimits, longest: int, block_size: int) -> int:
    """KV slots that `run_largest_round` fills."""
    lengths = _prompt_chunks(limits, longest) + [1 + nodes for nodes in _tree_sizes(limits)]
    return sum(-(-length // block_size) * block_size for length in lengths)


def run_largest_round(engine: TargetEngine, limits: RoundLimits, longest: int) -> int:
    """Run a round as large as rounds may be, sampled; its number of rows. longest: tokens of a sequence.

    The engine holds no sequence before or after.
    """
    items: list[VerifyItem] = []
    for rows in _prompt_chunks(limits, longest):
        prompt = np.ones(rows + 1, dtype=np.int32)
        begin = SequenceStart(_SAMPLING, len(prompt), "warm-up")
        items.append(VerifyItem(SequenceDelta(len(items) + 1, 0, prompt), rows, begin=begin))
    for nodes in _tree_sizes(limits):
        begin = SequenceStart(_SAMPLING, 1, "warm-up")
        delta = SequenceDelta(len(items) + 1, 0, np.ones(1, dtype=np.int32))
        items.append(VerifyItem(delta, 1, _tree(engine, min(nodes, engine.vocab_size)), begin))
    rows = engine.verify(VerifyBatch(0, items, num_successors=limits.successors)).rows
    engine.verify(VerifyBatch(0, [], [item.delta.seq_id for item in items]))
    return rows


def _prompt_chunks(limits: RoundLimits, longest: int) -> list[int]:
    """Rows of prompts that are not yet whole."""
    most = max(1, longest - 1)
    full, rest = divmod(limits.prefill_rows, most)
    return [most] * full + [rest] * (rest > 0)


def _tree_sizes(limits: RoundLimits) -> list[int]:
    """Draft nodes of each decoding sequence."""
    each, rest = divmod(limits.draft_rows, limits.sequences)
    return [each + (index < rest) for index in range(limits.sequences)]


def _tree(engine: TargetEngine, count: int) -> DraftTree:
    """All of depth 1, so that no position exceeds the model's, unless it must be a chain."""
    if engine.chain_only:
        return DraftTree.chain(np.arange(count, dtype=np.int32), np.zeros(count, np.float32))
    return DraftTree(
        token_ids=np.arange(count, dtype=np.int32),
        parents=np.full(count, -1, dtype=np.int32),
        confidence=np.zeros(count, dtype=np.float32),
    )


def _follow_once(engine: TargetEngine, item: VerifyItem) -> None:
    """Run a round, and after it one that was sent ahead."""
    begun = engine.begin(VerifyBatch(0, [item]))
    prepared = engine.prepare(VerifyAhead(1, 0, [AheadItem(item.delta.seq_id, None, 0)]), begun)
    engine.settle(begun)
    following = None if prepared is None else engine.follow(prepared, begun)
    if following is not None:
        engine.settle(following)


def _fastest(engine: TargetEngine, rows: int, runs: int) -> float:
    """Seconds of a forward of one committed token and rows - 1 draft nodes after it."""
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), 1, "warm-up")
    delta = SequenceDelta(1, 0, np.ones(1, dtype=np.int32))
    tree = _tree(engine, rows - 1)
    seconds = []
    for _ in range(runs):
        batch = VerifyBatch(0, [VerifyItem(delta, 1, tree, begin)])
        seconds.append(engine.verify(batch).elapsed_s)
        engine.verify(VerifyBatch(0, [], [1]))
    return min(seconds)
