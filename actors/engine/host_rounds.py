"""Rounds whose tokens are drawn on the host; the model may be on any device."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np
import torch

from actors.engine.draws import Draws, Emitted
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.logprobs import ScoredPrompt
from actors.engine.model_runner import ModelRunner
from actors.engine.planned_round import PlannedRound, wanted_rows
from actors.messages import Successors
from actors.sampling.row_masks import mask_rows
from actors.sampling.sampler import sample_tokens
from actors.sampling.top_tokens import most_probable
from actors.sampling.verification import walk_trees


class HostRounds:
    draw_on_all_ranks = False

    def __init__(self, runner: ModelRunner | EncoderDecoderRunner) -> None:
        self._runner = runner

    def begin(self, round: PlannedRound, draws: Draws | None) -> Emitted | None:
        """Compute the rows and draw tokens. draws: None if nothing is drawn."""
        logits = self._logits(round)
        return None if draws is None else _emit(logits, round, draws)

    def begin_scoring(
        self, round: PlannedRound, draws: Draws | None, scored: Sequences[ScoredPrompt]
    ) -> tuple[Emitted | None, torch.Tensor]:
        """As `begin`, with the logits of all scored rows, [n, vocab]."""
        assert isinstance(self._runner, ModelRunner)  # else nothing is scored
        batch = round.pack()
        wanted = wanted_rows(round.items, batch.first_rows)
        rows = np.concatenate([part.rows for part in scored])
        every = np.union1d(wanted, rows)
        logits = self._runner.forward_sequences(batch, every, round.sequences)
        own = logits[torch.from_numpy(every.searchsorted(rows)).to(logits.device)]
        if draws is None:
            return None, own
        return _emit(logits[torch.from_numpy(every.searchsorted(wanted)).to(logits.device)], round, draws), own

    def read(self, begun: Emitted | None) -> Emitted | None:
        """The outcome of a round that has begun; here it is known at once."""
        return begun

    def _logits(self, round: PlannedRound) -> torch.Tensor:
        """Logits of the rows that tokens are drawn from, [T + nodes, vocab]."""
        if isinstance(self._runner, ModelRunner):
            batch = round.pack()
            rows = wanted_rows(round.items, batch.first_rows)
            return self._runner.forward_sequences(batch, rows, round.sequences)
        return self._runner.run(round.parts(), (round.items["is_last"] * (1 + round.items["num_nodes"])).tolist())


@torch.inference_mode()
def _emit(logits: torch.Tensor, round: PlannedRound, draws: Draws) -> Emitted:
    masks = None if draws.masks is None else draws.masks()
    sampling, successors, likeliest = round.sampling(), None, None
    raw = logits if draws.keeps_raw else None
    if draws.num_successors:
        ids, probs = most_probable(logits, draws.num_successors)
        successors = Successors(ids.reshape(-1).cpu().numpy(), probs.reshape(-1).cpu().numpy(), ids.shape[1])
        # Elsewhere equal logits may come in another order.
        if sampling.is_greedy and masks is None and logits.device.type == "cpu":
            likeliest = ids[:, 0].to(torch.int64)
    if masks is not None and draws.keeps_logits:
        logits = logits if raw is None else logits.clone()
        mask_rows(logits, masks)
        masks = None
    sampled = sample_tokens(logits, sampling, masks=masks) if likeliest is None else likeliest
    nodes, ends, next_tokens = walk_trees(sampled.cpu().numpy(), *round.emitting_trees)
    return Emitted(nodes, ends, next_tokens, successors, logits if draws.keeps_logits else None, raw)
