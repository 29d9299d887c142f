"""Drafts of a one-pass head: all tokens of a draft from one forward after each round.

Rows of a mask token follow the positions with new features; what each row guesses does not depend on the guesses before
it. A tree has the likeliest paths of the best tokens at each position. Keys and values of the added rows are not kept.
The drafts are no random draws: under rejection each node is a point distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.draft_tree import DraftTree
from actors.eagle.device_growth import Level
from actors.eagle.draft_head import MaskRows
from actors.eagle.head_drafter import HeadDrafter, pack
from actors.eagle.likeliest_paths import likeliest_paths
from actors.engine.arena import Arena, Part
from actors.engine.batch import PackedBatch
from actors.engine.device_inputs import send_inputs
from actors.engine.hidden_state_drafter import HeadRows
from actors.engine.row_tiers import row_tier


class _Rows(NamedTuple):
    """The rows of one forward."""

    batch: PackedBatch
    feature_rows: np.ndarray  # int64 [rows]: of the target's forward; -1: the row has no feature
    guess_rows: np.ndarray  # int64 [guesses]


class OnePassDrafter(HeadDrafter):
    """A head with `masks`. It guesses `depth` + 1 tokens: the longest path of a head that guesses one a forward."""

    is_parallel = True

    def __init__(self, *args: Any, **options: Any) -> None:
        """As of `HeadDrafter`."""
        super().__init__(*args, **options)
        likeliest_paths(np.zeros((1, 1)), 1, 0.0)  # compiled or loaded, so that no request waits for it

    @property
    def _masks(self) -> MaskRows:
        assert self._head.masks is not None
        return self._head.masks

    def _most_guesses(self) -> int:
        most = self._masks.most
        return self.options.depth + 1 if most is None else min(most, self.options.depth + 1)

    def _most_drafted(self) -> int:
        return len(_added_rows(self._masks, 0, self._most_guesses()))

    def propose(self, asked: Sequences[HeadRows]) -> list[DraftTree]:
        """Run over all rows with the features that `tap` has captured, and over those of the drafts. Rows with
        max_nodes 0 get an empty tree."""
        features = self.tap.close()
        trees: list[DraftTree] = []
        self.launched_new = False
        for first in range(0, len(asked), self._trees_at_a_time):
            trees += self._propose(asked[first : first + self._trees_at_a_time], features)
        self.num_forwards = int(any(part.max_nodes for part in asked))
        return trees

    def _propose(self, asked: Sequences[HeadRows], features: list[tuple[torch.Tensor, ...]]) -> list[DraftTree]:
        counts = [self._num_guesses(part) for part in asked]
        rows = self._packed(asked, counts)
        most = max(part.max_nodes for part in asked)
        top_k = max(1, min(self.options.top_k, most, self._outputs.num_outputs))
        if self._arena is None:
            tokens, scores = self._guess(rows, features, top_k)
        else:
            tokens, scores = self._guess_on_device(self._arena, rows, features, top_k, may_record=all(counts))
        for part in asked:
            self._is_known[part.slots[part.begin :]] = True
        firsts = np.cumsum([0, *counts]).tolist()
        return [
            _tree_of(part, tokens[first : first + count], scores[first : first + count])
            for part, first, count in zip(asked, firsts, counts, strict=False)
        ]

    def _num_guesses(self, part: HeadRows) -> int:
        """A block is guessed whole: what its rows see of one another is part of each guess."""
        if part.max_nodes == 0:
            return 0
        most = self._most_guesses()
        return most if self._masks.is_block else min(most, part.max_nodes)

    def _packed(self, asked: Sequences[HeadRows], counts: Sequences[int]) -> _Rows:
        """counts: guesses of each sequence, which its last rows give."""
        masks = self._masks
        added = [
            _added_rows(masks, part.token_ids[-1], count) if count else np.empty(0, np.int64)
            for part, count in zip(asked, counts, strict=True)
        ]
        sizes = [len(part.token_ids) + len(own) for part, own in zip(asked, added, strict=True)]
        scratch = self._first_scratch + self._scratch_per_tree * np.arange(len(asked))
        batch = pack(
            [np.concatenate([part.token_ids, own]) for part, own in zip(asked, added, strict=True)],
            [np.arange(part.begin, part.begin + size) for part, size in zip(asked, sizes, strict=True)],
            [
                np.concatenate([self._context_of(part), first + np.arange(len(own))])
                for part, own, first in zip(asked, added, scratch, strict=True)
            ],
        )
        ends = batch.first_rows[1:].tolist()
        if masks.is_block:
            for end, own in zip(ends, added, strict=True):
                batch.visible_ends[end - len(own) : end] = batch.visible_ends[end - 1]
        without = [np.full(len(own), -1) for own in added]
        feature_rows = [rows for part, own in zip(asked, without, strict=True) for rows in (part.feature_rows, own)]
        guess_rows = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return _Rows(batch, np.concatenate(feature_rows), np.concatenate(guess_rows))

    def _guess(
        self, rows: _Rows, features: list[tuple[torch.Tensor, ...]], top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 and log-probabilities float64 of the likeliest tokens of `guess_rows`, [guesses, k]."""
        count = len(rows.guess_rows)
        hidden = self._forward(rows.batch, _joined(features, 1 + int(rows.feature_rows.max())), rows.feature_rows)
        scores, tokens = self._outputs.likeliest(hidden[self._index(_padded(rows.guess_rows))], top_k)
        return tokens[:count].cpu().numpy(), scores[:count].cpu().numpy()

    def _guess_on_device(
        self, arena: Arena, rows: _Rows, features: list[tuple[torch.Tensor, ...]], top_k: int, *, may_record: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `_guess`: one copy up, launches that read nothing of the host, and one copy down."""
        count, nothing = len(rows.guess_rows), np.empty((2, 0), np.int64)
        wanted, parts = _padded(rows.guess_rows), [Part(rows.feature_rows, (row_tier(rows.batch.num_rows),))]
        inputs = send_inputs(arena, rows.batch, wanted, len(wanted), nothing, self._kv.padding_slot, parts)

        def launch() -> torch.Tensor:
            level = Level(inputs.token_ids, inputs.positions, inputs.more[0], inputs.rows, inputs.max_context)
            hidden = self._forward_on_device(level, _joined(features))
            scores, tokens = self._outputs.likeliest(hidden[inputs.logit_rows], top_k)
            return torch.stack([tokens, scores.view(torch.int64)])

        places = tuple([(part.data_ptr(), part.shape) for of_layer in features for part in of_layer])
        guessed = self._launch((inputs.key, top_k, places), launch, may_record)
        tokens, bits = guessed.cpu().numpy()[:, :count]
        return tokens, np.ascontiguousarray(bits).view(np.float64)


def _added_rows(masks: MaskRows, last: int, count: int) -> np.ndarray:
    """Token ids, int64, of the rows that give `count` guesses after the token `last` of a text."""
    if masks.is_block:
        return np.append(np.int64(last), np.full(count, masks.token))
    return np.full(count - 1, masks.token)


def _padded(rows: np.ndarray) -> np.ndarray:
    """To one of few different lengths, of at least 1."""
    return np.pad(rows, (0, row_tier(len(rows)) - len(rows)))


def _joined(features: list[tuple[torch.Tensor, ...]], most: int | None = None) -> torch.Tensor:
    """Features of the first `most` rows, [rows, f], of all layers' parts."""
    return torch.cat([torch.cat(of_layer)[:most] for of_layer in features], dim=-1)


def _tree_of(part: HeadRows, tokens: np.ndarray, scores: np.ndarray) -> DraftTree:
    if not len(tokens):
        return DraftTree.empty()
    min_score = math.log(part.min_confidence) if part.min_confidence > 0.0 else -math.inf
    places, parents, sums = likeliest_paths(scores, part.max_nodes, min_score)
    return DraftTree(tokens[places[:, 0], places[:, 1]].astype(np.int32), parents, np.exp(sums).astype(np.float32))
