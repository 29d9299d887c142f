"""A draft model that guesses a chain per sequence: the drafter behind the name `draft_model`.

It draws with the target's own noise, `argmax(process(q) + G)` (design: coupled sampling), so no probabilities travel;
with `acceptance: rejection` it draws from its truncated distribution instead and sends that along
(Leviathan et al. 2023).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.draft_tree import DraftTree
from actors.engine.batch import SequenceRows, pack
from actors.engine.block_pool import BlockPool
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.sequence import Sequence
from actors.engine.sequence_table import SequenceTable, distinct
from actors.messages import DraftBatch, DraftItem, DraftResult, TopProbs, TreeMessage, no_tokens
from actors.sampling.sampler import RowSampling, draft_with_probs, rows_for, sample_tokens

# Below this chance of being reached a further guess costs more draft time than it can earn.
_MIN_CONFIDENCE = 0.08
# Pairs sent per node with acceptance == "rejection"; q is defined as these, so few suffice (256 bytes a node).
_NUM_PROBS = 32
# Rows a forward of prompts; longer ones are computed in several.
_MAX_PREFILL_ROWS = 512


@dataclass(slots=True)
class _Chain:
    """One sequence being drafted for."""

    sequence: Sequence
    length: int  # committed tokens
    max_nodes: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def wants_more(self) -> bool:
        if len(self.tokens) >= self.max_nodes:
            return False
        return not self.confidence or self.confidence[-1] >= _MIN_CONFIDENCE

    @property
    def draws_from_probs(self) -> bool:
        return self.sequence.sampling.params.acceptance == "rejection"


class DraftEngine:
    """Sequences, their KV blocks and the draft model. One call of `draft` answers one `DraftBatch`."""

    def __init__(self, model: PreTrainedModel, options: EngineOptions, vocab_map: torch.Tensor | None = None) -> None:
        """vocab_map int64 [outputs]: target token id of each column of the model's logits; None: they are equal."""
        self.pool = BlockPool(options.num_blocks, options.block_size, options.prefix_cache)
        self._runner = ModelRunner(model, options.num_blocks * options.block_size)
        self._table = SequenceTable(self.pool, self._runner.kv)
        self._vocab_map = vocab_map

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftResult:
        """One chain per item, in order; empty where there is no room for the sequence."""
        started = time.perf_counter()
        for seq_id in batch.finished:
            self._table.forget(seq_id)
        stale: list[int] = []
        chains: list[_Chain] = []
        for item in distinct(batch.items):
            sequence = self._table.find(item.delta, item.begin)
            if sequence is None:
                stale.append(item.delta.seq_id)
            elif self._table.bring_up_to_date(sequence, item.delta, len(sequence.tokens) + len(item.delta.token_ids)):
                chains.append(self._start(sequence, item))
            else:
                # Forgotten, so that the next delta is answered stale and starts over when there is room.
                self._table.forget(item.delta.seq_id)
        self._prefill(chains)
        self._grow(chains)
        for chain in chains:
            chain.sequence.pop_drafts(chain.length)
            chain.sequence.publish()
        return DraftResult(
            batch.round_id,
            [chain.sequence.seq_id for chain in chains],
            [_tree_message(chain) for chain in chains],
            stale,
            time.perf_counter() - started,
        )

    def _start(self, sequence: Sequence, item: DraftItem) -> _Chain:
        room = sequence.reserve(sequence.length + item.max_nodes)
        return _Chain(sequence, sequence.length, item.max_nodes if room else 0)

    def _prefill(self, chains: list[_Chain]) -> None:
        """Compute committed tokens until at most one chunk is left, which goes with the first guess. Where no guess is
        wanted only the last token is left, whose logits the first guess will want."""
        for chain in chains:
            most_left = _MAX_PREFILL_ROWS if chain.max_nodes else 1
            while (pending := _pending(chain)) > most_left:
                self._forward([chain], min(pending - 1, _MAX_PREFILL_ROWS))

    def _grow(self, chains: list[_Chain]) -> None:
        while True:
            growing = [chain for chain in chains if chain.wants_more]
            if not growing:
                return
            logits = self._forward(growing, _MAX_PREFILL_ROWS)
            for coupled in (True, False):
                rows = [row for row, chain in enumerate(growing) if chain.draws_from_probs != coupled]
                if rows:
                    self._draw([growing[row] for row in rows], logits[rows], coupled)

    def _draw(self, chains: list[_Chain], logits: torch.Tensor, coupled: bool) -> None:
        sampling = self._row_sampling(chains)
        if coupled:
            tokens = sample_tokens(logits, sampling, self._vocab_map)
            chosen = self._share_of(logits, tokens)
            for chain, token, share in zip(chains, tokens.tolist(), chosen.tolist(), strict=True):
                self._push(chain, token, share)
            return
        drawn, ids, probs = draft_with_probs(logits, sampling, _NUM_PROBS, self._vocab_map)
        shares = torch.where(ids == drawn[:, None], probs, 0.0).sum(dim=1)
        for row, chain in enumerate(chains):
            chain.probs.append((ids[row].to(torch.int32).cpu().numpy(), probs[row].float().cpu().numpy()))
            self._push(chain, int(drawn[row]), float(shares[row]))

    def _push(self, chain: _Chain, token: int, share: float) -> None:
        before = chain.confidence[-1] if chain.confidence else 1.0
        chain.tokens.append(token)
        chain.confidence.append(min(before, before * share))
        chain.sequence.push_draft(token)

    def _share_of(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Probability that the draft model gives to the drawn tokens, float32 [rows]: how sure it is."""
        logits = logits.float()
        if self._vocab_map is None:
            columns = tokens
        else:
            columns = torch.searchsorted(self._vocab_map, tokens)
        chosen = logits.gather(1, columns[:, None].to(logits.device))[:, 0]
        return torch.exp(chosen - torch.logsumexp(logits, dim=1)).clamp_(0.0, 1.0)

    def _row_sampling(self, chains: list[_Chain]) -> RowSampling:
        samplings = [chain.sequence.sampling for chain in chains]
        positions = np.asarray([chain.length + len(chain.tokens) for chain in chains], dtype=np.int64)
        paths = None
        if any(sampling.uses_history for sampling in samplings):
            paths = [np.asarray(chain.tokens, dtype=np.int32) for chain in chains]
        return rows_for(samplings, np.arange(len(chains)), positions, paths)

    def _forward(self, chains: list[_Chain], max_rows: int) -> torch.Tensor:
        """Compute pending tokens, guesses included; logits behind the last of each, [chains, outputs]."""
        parts = [
            SequenceRows(chain.sequence, min(_pending(chain), max_rows), no_tokens(), no_tokens()) for chain in chains
        ]
        ends = np.cumsum([part.count for part in parts]) - 1
        logits = self._runner.forward(pack(parts), ends)
        for part in parts:
            part.sequence.computed(part.count, no_tokens(), no_tokens())
        return logits

    def answer(self, batch: DraftBatch) -> DraftResult:
        """`draft` under the name that every worker's engine has."""
        return self.draft(batch)

    def clear(self) -> None:
        """Forget every sequence; their next deltas are answered stale."""
        self._table.clear()

    def check_integrity(self) -> str | None:
        return self._table.check_integrity()


def _pending(chain: _Chain) -> int:
    return chain.sequence.num_pending


def _tree_message(chain: _Chain) -> TreeMessage:
    tree = DraftTree.chain(np.asarray(chain.tokens, np.int32), np.asarray(chain.confidence, np.float32))
    probs = None
    if chain.probs:
        ids, shares = (np.concatenate(parts) for parts in zip(*chain.probs, strict=True))
        probs = TopProbs(ids, shares, len(chain.probs[0][0]))
    return TreeMessage(tree.token_ids, tree.parents, tree.confidence, probs)
