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

from actors.training.target_text import Answer, AnswerPlaces, padded_texts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParallelRows:
    """A batch of B texts of W real tokens and M mask tokens each, padded at the end of either part. On the CPU."""

    token_ids: torch.Tensor  # int64 [B, W]
    positions: torch.Tensor  # int64 [B, W + M]
    # Of each mask token, int64 [B, M]:
    last_real: torch.Tensor  # last column of real tokens that it sees; -1 in the padding
    chains: torch.Tensor  # the chain's place in the answer; another negative number for each token of the padding
    chain_depths: torch.Tensor  # tokens of its chain up to it
    # For the n rows that guess a token of an answer, those of real tokens first:
    texts: torch.Tensor  # int64 [n]: in the batch
    columns: torch.Tensor  # int64 [n]: in 0 .. W + M - 1
    places: torch.Tensor  # int64 [n]: guessed token, as an index into all answers' tokens one after the other
    depths: torch.Tensor  # int64 [n]: mask tokens before and including the row

    @property
    def num_masks(self) -> int:
        return self.chains.shape[1]

    def visible(self, device: str) -> torch.Tensor:
        """bool [B, 1, W + M, W + M]: row sees column. Made on the device: it is by far the largest part of a batch."""
        import torch

        last_real, chains, depths = (
            part.to(device, non_blocking=True) for part in (self.last_real, self.chains, self.chain_depths)
        )
        batch, width = self.token_ids.shape
        columns = torch.arange(width, device=device)
        real = columns <= torch.cat([columns.expand(batch, -1), last_real], 1)[..., None]
        masks = (chains[:, :, None] == chains[:, None]) & (depths[:, :, None] >= depths[:, None])
        masks = torch.cat([masks.new_zeros(batch, width, self.num_masks), masks], 1)
        return torch.cat([real, masks], 2)[:, None]


def random_lengths(count: int, most: int, retention: float, generator: torch.Generator) -> torch.Tensor:
    """Mask tokens of each chain, int64 [count], at most `most`: d or more with probability retention ** d."""
    import torch

    if retention == 1.0:
        return torch.full((count,), most)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64).clamp(min=1e-12).log() / math.log(retention)
    return drawn.floor().to(torch.int64).clamp(max=most)


def lay_out(answers: Sequence[Answer], lengths: torch.Tensor) -> ParallelRows:
    """lengths: for each token of all answers, the mask tokens of the chain after its place, int64 [tokens]. The first
    place of an answer is the prompt's last token. Chains end with the answer."""
    import torch

    token_ids, places = padded_texts(answers), AnswerPlaces.of(answers)
    batch, width = token_ids.shape
    lengths = torch.minimum(lengths, places.after)
    chain_of = torch.arange(len(lengths)).repeat_interleave(lengths)  # of each mask token: the place of its chain
    depths = torch.arange(len(chain_of)) - (lengths.cumsum(0) - lengths)[chain_of] + 1
    texts = places.texts[chain_of]
    masks_of = torch.bincount(texts, minlength=batch)
    columns = torch.arange(len(texts)) - (masks_of.cumsum(0) - masks_of)[texts]
    shape = batch, int(masks_of.max())
    last_real, chain_depths = torch.full(shape, -1), torch.ones(shape, dtype=torch.int64)
    chains = -1 - torch.arange(shape[1]).repeat(batch, 1)
    last_real[texts, columns] = places.columns[chain_of]
    chains[texts, columns] = chain_of
    chain_depths[texts, columns] = depths
    return ParallelRows(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(width).repeat(batch, 1), last_real + chain_depths], 1),
        last_real=last_real,
        chains=chains,
        chain_depths=chain_depths,
        texts=torch.cat([places.texts, texts]),
        columns=torch.cat([places.columns, width + columns]),
        places=torch.cat([torch.arange(len(lengths)), chain_of + depths]),
        depths=torch.cat([torch.zeros_like(lengths), depths]),
    )
