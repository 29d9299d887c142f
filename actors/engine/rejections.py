"""Chains of a round that are accepted by the rejection rule, which needs whole rows of logits on the host."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from itertools import pairwise

import numpy as np
import torch

from actors.engine.draft_trees import joined, offsets_of
from actors.engine.draws import Emitted
from actors.engine.planned_round import PlannedRound, row_sampling
from actors.messages import VerifyItem
from actors.sampling.verification import verify_rejections


def rejecting_places(round: PlannedRound, items: Sequences[VerifyItem]) -> list[int]:
    """Places of drafts that are accepted by the rejection rule. items: of the ready sequences."""
    return [
        place
        for place, (sequence, item, count) in enumerate(
            zip(round.sequences, items, round.items["num_nodes"].tolist(), strict=True)
        )
        if sequence.is_rejection and item.tree.probs is not None and count > 0
    ]


@torch.inference_mode()
def with_rejections(
    emitted: Emitted, round: PlannedRound, items: Sequences[VerifyItem], places: Sequences[int]
) -> Emitted:
    """What is emitted where some drafts are accepted by the rejection rule, at `places` in the round. items: of the
    ready sequences."""
    assert emitted.logits is not None
    trees, tree_of = round.emitting_trees, {place: index for index, place in enumerate(round.emitting.tolist())}
    paths = [emitted.nodes[begin:end] for begin, end in pairwise(emitted.ends.tolist())]
    next_tokens = emitted.next_tokens.copy()
    for place in places:
        index = tree_of[place]
        begin, end = int(trees.offsets[index]), int(trees.offsets[index + 1])
        tokens, probs = trees.tokens[begin:end], items[place].tree.probs
        assert probs is not None
        own = joined([tokens], [trees.parents[begin:end]])
        sampling = row_sampling([round.sequences[place]], own)
        logits = emitted.logits[begin + index : end + index + 1]
        accepted, next_token = verify_rejections(logits, sampling, [tokens], [probs.first(end - begin)])
        paths[index], next_tokens[index] = np.arange(accepted[0], dtype=np.int32), next_token[0]
    ends = offsets_of([*map(len, paths)])
    return Emitted(np.concatenate(paths), ends, next_tokens, emitted.successors, None, emitted.raw_logits)
