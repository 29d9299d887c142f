"""The likeliest next tokens after a head's hidden states, on one rank or on several."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.eagle.draft_head import DraftHead
from actors.models.collectives import gather_ranks
from actors.models.shards import VocabularyShard


class HeadOutputs:
    """A head with an output layer: its own, or the target's, of which a rank may have a shard."""

    def __init__(self, head: DraftHead, output_layer: nn.Module, agree: bool = False) -> None:
        """output_layer: the target's. agree: all ranks get what rank 0 finds, to the last bit."""
        self._head = head
        self._output_layer = output_layer
        self._agree = agree
        used = output_layer if head.lm_head is None else head.lm_head
        self._shard = used if isinstance(used, VocabularyShard) else None
        self.num_outputs = int(used.out_features)

    def likeliest(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities float64 and token ids int64 of the k likeliest next tokens, [rows, k], likeliest first.

        hidden: [rows, h]. k is at most `num_outputs`. Launches only.
        """
        logits = self._head.logits(hidden, self._output_layer).float()
        if self._shard is not None:
            scores, ids = _likeliest_of_shards(logits, self._shard.first_id, k)
        else:
            top = logits.topk(k, dim=-1)
            scores, ids = top.values - logits.logsumexp(dim=-1, keepdim=True), top.indices
        if self._agree:
            scores, ids = gather_ranks(scores)[0], gather_ranks(ids)[0]
        draft_ids = self._head.draft_ids
        return scores.clamp_(max=0.0).double(), ids if draft_ids is None else draft_ids[ids]


def _likeliest_of_shards(logits: Tensor, first_id: int, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 and ids int64, [rows, k], among all shards. logits: float32, of this rank's. One
    exchange of 2 k + 1 words of 4 bytes a row."""
    rows, columns = logits.shape
    top = logits.topk(min(k, columns), dim=-1)
    found = logits.new_full((rows, k + 1), -torch.inf)
    found[:, : top.values.shape[1]] = top.values
    found[:, k] = logits.logsumexp(dim=-1)
    own_ids = top.indices.new_zeros((rows, k), dtype=torch.int32)
    own_ids[:, : top.values.shape[1]] = top.indices + first_id
    shards = gather_ranks(torch.cat([found.view(torch.int32), own_ids], dim=1))
    scores, ids = shards[:, :, : k + 1].view(torch.float32), shards[:, :, k + 1 :]
    best = scores[:, :, :k].transpose(0, 1).reshape(rows, -1).topk(k, dim=-1)
    total = scores[:, :, k].logsumexp(dim=0)
    return best.values - total[:, None], ids.transpose(0, 1).reshape(rows, -1).gather(1, best.indices).long()
