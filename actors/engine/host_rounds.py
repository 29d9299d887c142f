"""Rounds whose tokens are drawn by the host's code, wherever the model is."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from itertools import pairwise

import torch

from actors.engine.batch import SequenceRows
from actors.engine.draws import Draws, Emitted
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.model_runner import ModelRunner
from actors.messages import Successors
from actors.sampling.rows import rows_for
from actors.sampling.sampler import sample_tokens
from actors.sampling.top_tokens import most_probable
from actors.sampling.verification import walk_trees


class HostRounds:
    draw_on_all_ranks = False
    rows_for = staticmethod(rows_for)

    def __init__(self, runner: ModelRunner | EncoderDecoderRunner) -> None:
        self._runner = runner

    def run(self, parts: Sequences[SequenceRows], wanted: Sequences[int], draws: Draws | None) -> Emitted | None:
        """Compute the rows and draw. wanted: of each part, the last rows whose logits are drawn from, 0 if it emits
        nothing. draws: of the parts that emit; None: nothing is drawn."""
        logits = self._runner.run(parts, wanted)
        return None if draws is None else _emit(logits, draws)


def _emit(logits: torch.Tensor, draws: Draws) -> Emitted:
    sampled = sample_tokens(logits, draws.sampling).cpu().numpy()
    nodes, ends, next_tokens = walk_trees(sampled, *draws.trees)
    paths = [nodes[begin:end] for begin, end in pairwise(ends.tolist())]
    successors = None
    if draws.num_successors:
        ids, probs = most_probable(logits, draws.num_successors)
        successors = Successors(ids.reshape(-1).cpu().numpy(), probs.reshape(-1).cpu().numpy(), ids.shape[1])
    return Emitted(next_tokens.tolist(), paths, successors, logits if draws.keeps_logits else None)
