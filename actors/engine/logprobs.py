"""Log-probabilities of emitted tokens and of a prompt's tokens, by the raw logits: the same with any draft or none."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from actors.engine.draws import Emitted
from actors.engine.planned_round import PlannedRound
from actors.messages import TokenLogprobs


class ScoredPrompt(NamedTuple):
    """Rows of a sequence's prompt whose next tokens are known, and get log-probabilities."""

    place: int  # of the sequence in the round
    first_row: int
    tokens: np.ndarray  # int32 [n]: the next token of each row
    k: int  # likeliest tokens to report of each row

    @property
    def rows(self) -> np.ndarray:
        return np.arange(self.first_row, self.first_row + len(self.tokens))


def wants_logprobs(round: PlannedRound) -> bool:
    """Whether a sequence that may emit wants them."""
    return max([sequence.begin.num_logprobs for sequence in round.sequences]) >= 0


def scored_prompts(round: PlannedRound) -> list[ScoredPrompt]:
    """The parts of prompts that this round scores."""
    scored: list[ScoredPrompt] = []
    if max([sequence.begin.num_prompt_logprobs for sequence in round.sequences]) < 0:
        return scored
    counts = round.items["count"].tolist()
    nodes = round.items["num_nodes"].tolist()
    first_row = 0
    for place, (sequence, count, num_nodes) in enumerate(zip(round.sequences, counts, nodes, strict=True)):
        begin = sequence.begin
        first = sequence.num_computed + 1  # the token after the first row
        last = min(first + count, begin.num_prompt_tokens)
        if begin.num_prompt_logprobs >= 0 and first < last:
            tokens = sequence.tokens[first:last].copy()
            scored.append(ScoredPrompt(place, first_row, tokens, begin.num_prompt_logprobs))
        first_row += count + num_nodes
    return scored


def token_logprobs(round: PlannedRound, emitted: Emitted) -> dict[int, TokenLogprobs]:
    """Those of the tokens that each sequence emits, by its place in the round. emitted: with `raw_logits`."""
    assert emitted.raw_logits is not None
    found: dict[int, TokenLogprobs] = {}
    trees = round.emitting_trees
    ends, next_tokens = emitted.ends.tolist(), emitted.next_tokens.tolist()
    for tree, (place, (begin, end)) in enumerate(zip(round.emitting.tolist(), pairwise(ends), strict=True)):
        k = round.sequences[place].begin.num_logprobs
        if k < 0:
            continue
        path = emitted.nodes[begin:end]
        first = int(trees.offsets[tree])
        root = first + tree
        rows = np.concatenate([[root], root + 1 + path])
        tokens = np.concatenate([trees.tokens[first + path], [next_tokens[tree]]])
        found[place] = _logprobs_of(emitted.raw_logits, rows, tokens, k)
    return found


def prompt_logprobs(logits: torch.Tensor, scored: list[ScoredPrompt]) -> dict[int, TokenLogprobs]:
    """logits: [rows of all parts, vocab], in order. By the sequence's place in the round."""
    found: dict[int, TokenLogprobs] = {}
    first = 0
    for part in scored:
        rows = np.arange(first, first + len(part.tokens))
        found[part.place] = _logprobs_of(logits, rows, part.tokens, part.k)
        first += len(part.tokens)
    return found


@torch.inference_mode()
def _logprobs_of(logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, k: int) -> TokenLogprobs:
    """logits: [R, vocab]. rows: int [n]. tokens: int [n]."""
    device = logits.device
    own = logits[torch.from_numpy(rows).to(device)].float()
    total = own.logsumexp(dim=-1, keepdim=True)
    chosen = own.gather(-1, torch.from_numpy(tokens.astype(np.int64)).to(device).unsqueeze(-1)) - total
    k = min(k, own.shape[-1])
    best = own.topk(k, dim=-1)
    return TokenLogprobs(
        chosen.squeeze(-1).cpu().numpy(),
        best.indices.to(torch.int32).reshape(-1).cpu().numpy(),
        (best.values - total).reshape(-1).cpu().numpy(),
        k,
    )
