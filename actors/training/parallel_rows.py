"""Rows of a training batch with mask tokens: the real tokens of each text, then chains of mask tokens.

A chain belongs to one place of the text. Its rows see the real tokens up to there and the chain before them, as if the
chain followed the text there, and predict the tokens after the next one. Long chains are rare: of the places with a row
of one depth, a random part has a row of the next (conditional drop of tokens, An et al. 2025, arXiv:2504.18583).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.training.target_text import Answer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParallelRows:
    """A batch of B texts of W real tokens and M mask tokens each, padded at the end of either part."""

    token_ids: torch.Tensor  # int64 [B, W]
    positions: torch.Tensor  # int64 [B, W + M]
    visible: torch.Tensor  # bool [B, 1, W + M, W + M]: row sees column
    # For the n rows that guess a token of an answer:
    texts: torch.Tensor  # int64 [n]: in the batch
    columns: torch.Tensor  # int64 [n]: in 0 .. W + M - 1
    places: torch.Tensor  # int64 [n]: guessed token, as an index into all answers' tokens one after the other
    depths: torch.Tensor  # int64 [n]: mask tokens before and including the row

    @property
    def num_masks(self) -> int:
        return self.positions.shape[1] - self.token_ids.shape[1]


def random_lengths(count: int, most: int, retention: float, generator: torch.Generator) -> torch.Tensor:
    """Mask tokens of each chain, int64 [count], at most `most`: d or more with probability retention ** d."""
    import torch

    if retention == 1.0:
        return torch.full((count,), most)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64).clamp(min=1e-12).log() / math.log(retention)
    return drawn.floor().to(torch.int64).clamp(max=most)


def lay_out(answers: Sequence[Answer], lengths: Sequence[torch.Tensor]) -> ParallelRows:
    """lengths: for each answer of n tokens, the mask tokens of the chain after each of its n places, int64 [n]. The
    first place is the prompt's last token. Chains end with the answer."""
    import torch

    width = max(len(answer.token_ids) for answer in answers) - 1
    chains = [_chains_of(answer, wanted) for answer, wanted in zip(answers, lengths, strict=True)]
    total = width + max(len(chain[0]) for chain in chains)
    batch = len(answers)
    token_ids = torch.zeros((batch, width), dtype=torch.int64)
    positions = torch.zeros((batch, total), dtype=torch.int64)
    positions[:, :width] = torch.arange(width)
    visible = torch.eye(total, dtype=torch.bool).repeat(batch, 1, 1)  # a row of padding sees itself
    visible[:, :width, :width] = torch.ones((width, width), dtype=torch.bool).tril()  # never sees right padding
    texts, columns, places, depths = [], [], [], []
    first_place = 0
    for text, (answer, (anchors, depth)) in enumerate(zip(answers, chains, strict=True)):
        token_ids[text, : len(answer.token_ids) - 1] = answer.token_ids[:-1]
        count, end = answer.num_answer_tokens, width + len(anchors)
        begin = answer.num_prompt_tokens - 1
        positions[text, width:end] = begin + anchors + depth
        visible[text, width:end, :width] = torch.arange(width) <= (begin + anchors)[:, None]
        visible[text, width:end, width:end] = (anchors[:, None] == anchors) & (depth[:, None] >= depth)
        texts.append(torch.full((count + len(anchors),), text))
        columns.append(torch.cat([begin + torch.arange(count), width + torch.arange(len(anchors))]))
        places.append(first_place + torch.cat([torch.arange(count), anchors + depth]))
        depths.append(torch.cat([torch.zeros(count, dtype=torch.int64), depth]))
        first_place += count
    return ParallelRows(
        token_ids=token_ids,
        positions=positions,
        visible=visible[:, None],
        texts=torch.cat(texts),
        columns=torch.cat(columns),
        places=torch.cat(places),
        depths=torch.cat(depths),
    )


def _chains_of(answer: Answer, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each mask token: the answer's place that its chain follows, and its depth from 1; int64 [m]."""
    import torch

    count = answer.num_answer_tokens
    lengths = torch.minimum(lengths, count - 1 - torch.arange(count))
    anchors = torch.arange(count).repeat_interleave(lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return anchors, torch.arange(len(anchors)) - starts + 1
