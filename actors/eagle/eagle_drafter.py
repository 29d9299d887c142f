"""Drafts of an EAGLE or MTP head from the target's hidden states.

After each round the head runs over the positions with new features, then grows a tree: the `top_k` likeliest children
of each of a level's `top_k` likeliest nodes, for `depth` levels. The likeliest nodes of all are kept (EAGLE-2, Li et
al. 2024, arXiv:2406.16858). On the host, the tree ends where no node reaches the least confidence that the router asks
for, or a level does not pay. On an accelerator the number of levels is chosen before the launch, since shapes must not
depend on scores. Only committed positions keep keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import torch

from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth, pays
from actors.eagle.device_growth import Level, Root, Sent, candidates, grow, level_tier, num_nodes, root_parts
from actors.eagle.head_drafter import HeadDrafter, pack
from actors.engine.arena import Arena, Part
from actors.engine.batch import PackedBatch
from actors.engine.device_inputs import send_inputs
from actors.engine.hidden_state_drafter import HeadRows
from actors.engine.row_tiers import row_tier


@dataclass(slots=True)
class _Tree:
    """All candidate nodes of one sequence, in order of depth. Scores are log-probabilities of their paths."""

    max_nodes: int
    context: np.ndarray  # int64: slots of the committed positions that have keys and values
    position: int  # position of the root's row
    first_slot: int  # first scratch slot
    min_score: float = -math.inf  # of nodes to expand
    worth: np.ndarray = field(default_factory=no_worth)  # of a level, as of `draft_worth.pays`; the same of all trees
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    parents: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    scores: np.ndarray = field(default_factory=lambda: np.empty(0, np.float64))
    frontier: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # nodes to expand next
    # The nodes expanded so far, in the order of their scratch slots:
    sight: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.bool_))  # [e, e]: ancestors and self
    place: dict[int, int] = field(default_factory=dict)  # node -> its index among them

    def add(self, parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray, top_k: int) -> None:
        """Add children, [n] each, and choose which of them to expand: the best `top_k`, without those below `min_score`
        or that cannot be among the final `max_nodes`."""
        first = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, tokens])
        self.parents = np.concatenate([self.parents, parents])
        self.scores = np.concatenate([self.scores, scores])
        best = first + np.argsort(-scores, kind="stable")[:top_k]
        if len(self.scores) >= self.max_nodes:
            bar = np.partition(self.scores, -self.max_nodes)[-self.max_nodes]
            best = best[self.scores[best] >= bar]
        self.frontier = best[self.scores[best] >= self.min_score]

    def expand(self) -> np.ndarray:
        """Give the frontier scratch places. Returns which of all places its nodes see, bool [frontier, places]."""
        before = len(self.sight)
        count = before + len(self.frontier)
        sight = np.zeros((count, count), np.bool_)
        sight[:before, :before] = self.sight
        for index, node in enumerate(self.frontier.tolist(), before):
            parent = int(self.parents[node])
            if parent >= 0:
                sight[index] = sight[self.place[parent]]
            sight[index, index] = True
            self.place[node] = index
        self.sight = sight
        return sight[before:]

    def best(self) -> DraftTree:
        """The `max_nodes` likeliest nodes, likeliest first. Scores fall along a path and the sort is stable, so parents
        come before their children and every prefix of the list is a tree."""
        order = np.argsort(-self.scores, kind="stable")[: self.max_nodes]
        new_index = np.full(len(self.scores) + 1, -1, np.int32)  # the last entry is for the root, -1
        new_index[order] = np.arange(len(order), dtype=np.int32)
        return DraftTree(
            self.tokens[order].astype(np.int32),
            new_index[self.parents[order]],
            np.exp(self.scores[order]).astype(np.float32),
        )


class EagleDrafter(HeadDrafter):
    """A head that guesses one token a forward."""

    is_parallel = False

    def _most_drafted(self) -> int:
        return self.options.depth * self.options.top_k

    def propose(self, asked: Sequences[HeadRows]) -> list[DraftTree]:
        """Run over all rows with the features that `tap` has captured, then grow the trees. Rows with max_nodes 0 get
        an empty tree."""
        self.launched_new = False
        contexts = [self._context_of(part) for part in asked]
        batch = pack(
            [part.token_ids for part in asked],
            [np.arange(part.begin, part.begin + len(part.token_ids)) for part in asked],
            contexts,
        )
        feature_rows = np.concatenate([part.feature_rows for part in asked])
        last_rows = np.cumsum([len(part.token_ids) for part in asked]) - 1
        growing = [index for index, part in enumerate(asked) if part.max_nodes > 0]
        groups = [
            growing[first : first + self._trees_at_a_time] for first in range(0, len(growing), self._trees_at_a_time)
        ]
        trees = {
            index: _Tree(
                asked[index].max_nodes,
                contexts[index],
                asked[index].begin + len(asked[index].token_ids) - 1,
                self._first_scratch + number * self._scratch_per_tree,
                math.log(asked[index].min_confidence) if asked[index].min_confidence > 0.0 else -math.inf,
                asked[index].worth,
            )
            for group in groups
            for number, index in enumerate(group)
        }
        grown = [([trees[index] for index in group], last_rows[group]) for group in groups]
        if self._arena is None:
            hidden = self._forward(batch, self.tap.take(1 + int(feature_rows.max())), feature_rows)
            levels = max([self._grow(group_trees, hidden, root_rows) for group_trees, root_rows in grown], default=0)
        else:
            levels = level_tier(asked[growing[0]].levels, self.options.depth) if growing else 0
            may_record = len(growing) == len(asked)
            self._run_on_device(self._arena, batch, feature_rows, grown, levels, may_record)
        self.num_forwards = 1 + levels if growing else 0
        self._is_known[batch.slots] = True
        return [trees[index].best() if index in trees else DraftTree.empty() for index in range(len(asked))]

    def _top_k(self, trees: Sequences[_Tree]) -> int:
        return min(self.options.top_k, max(tree.max_nodes for tree in trees), self._outputs.num_outputs)

    def _grow(self, trees: Sequences[_Tree], hidden: torch.Tensor, root_rows: np.ndarray) -> int:
        """Returns how many levels were expanded. hidden [rows, h]; root_rows int64 [trees]: those of the roots."""
        top_k = self._top_k(trees)
        hidden = hidden[self._index(root_rows)]
        scores, tokens = self._children(hidden, len(trees), top_k)
        for row, tree in enumerate(trees):
            tree.add(np.full(tokens.shape[1], -1), tokens[row], scores[row], top_k)
        # Rows of `hidden` with the features of the frontiers: the output that predicted a node is its parent's feature.
        feature_rows = [np.full(len(tree.frontier), row) for row, tree in enumerate(trees)]
        for level in range(1, self.options.depth + 1):
            active = [index for index, tree in enumerate(trees) if len(tree.frontier)]
            if not active:
                return level - 1
            growing = [trees[index] for index in active]
            if not pays(growing[0].worth, np.exp(np.concatenate([tree.scores[tree.frontier] for tree in growing]))):
                return level - 1
            batch = self._pack_frontiers(growing, level)
            hidden = self._forward(batch, hidden, np.concatenate([feature_rows[index] for index in active]))
            scores, tokens = self._children(hidden, batch.num_rows, top_k)
            first_row = 0
            for index, tree in zip(active, growing, strict=True):
                expanded = tree.frontier
                own = slice(first_row, first_row + len(expanded))
                first_child = len(tree.tokens)
                width = tokens.shape[1]
                tree.add(
                    np.repeat(expanded, width),
                    tokens[own].reshape(-1),
                    (tree.scores[expanded][:, None] + scores[own]).reshape(-1),
                    top_k,
                )
                feature_rows[index] = first_row + (tree.frontier - first_child) // width
                first_row = own.stop
        return self.options.depth

    def _pack_frontiers(self, trees: Sequences[_Tree], level: int) -> PackedBatch:
        sights = [tree.expand() for tree in trees]
        contexts = [
            np.concatenate([tree.context, np.arange(tree.first_slot, tree.first_slot + sight.shape[1])])
            for tree, sight in zip(trees, sights, strict=True)
        ]
        return pack(
            [tree.tokens[tree.frontier] for tree in trees],
            [np.full(len(tree.frontier), tree.position + level) for tree in trees],
            contexts,
            sights,
        )

    def _children(self, hidden: torch.Tensor, num_rows: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities float64 and token ids int64 of the likeliest next tokens of the first rows, [num_rows, k],
        likeliest first."""
        padding = row_tier(num_rows) - len(hidden)
        if padding > 0:
            hidden = torch.cat([hidden, hidden[:1].expand(padding, -1)])
        scores, tokens = self._outputs.likeliest(hidden[: row_tier(num_rows)], top_k)
        return scores[:num_rows].cpu().numpy(), tokens[:num_rows].cpu().numpy()

    def _run_on_device(
        self,
        arena: Arena,
        batch: PackedBatch,
        feature_rows: np.ndarray,
        groups: Sequences[tuple[Sequences[_Tree], np.ndarray]],
        levels: int,
        may_record: bool,
    ) -> None:
        """Compute the rows and grow groups of trees from root rows, int64 [trees]: one copy up, launches that read
        nothing of the host, and one copy down. levels: to expand, at most the depth."""
        more = [Part(feature_rows, (row_tier(batch.num_rows),))]
        top_ks = [self._top_k(trees) for trees, _ in groups]
        for (trees, root_rows), top_k in zip(groups, top_ks, strict=True):
            more += root_parts(_roots(trees, root_rows), levels, top_k, self._kv.padding_slot)
        nothing = np.empty((2, 0), np.int64)
        inputs = send_inputs(arena, batch, nothing[0], 1, nothing, self._kv.padding_slot, more)
        size = len(Sent._fields)
        sent = [Sent(*inputs.more[first : first + size]) for first in range(1, len(inputs.more), size)]
        kept = self.tap.close()

        def launch() -> torch.Tensor | None:
            features = torch.cat([torch.cat(of_layer) for of_layer in kept], dim=-1)
            level = Level(inputs.token_ids, inputs.positions, inputs.more[0], inputs.rows, inputs.max_context)
            hidden = self._forward_on_device(level, features)
            grown = [
                grow(roots, hidden, top_k, self._outputs.likeliest, self._forward_on_device).flatten()
                for roots, top_k in zip(sent, top_ks, strict=True)
            ]
            return torch.cat(grown) if grown else None

        places = tuple([(part.data_ptr(), part.shape) for of_layer in kept for part in of_layer])
        grown = self._launch((inputs.key, tuple(top_ks), places), launch, may_record)
        if grown is None:
            return
        values = grown.cpu().numpy()
        for (trees, _), roots, top_k in zip(groups, sent, top_ks, strict=True):
            shape = (3, len(roots.root_rows), num_nodes(levels, top_k))
            own, values = values[: math.prod(shape)].reshape(shape), values[math.prod(shape) :]
            for tree, tokens, parents, scores in zip(trees, *candidates(own, len(trees)), strict=True):
                tree.tokens, tree.parents, tree.scores = tokens, parents, scores


def _roots(trees: Sequences[_Tree], rows: np.ndarray) -> list[Root]:
    """rows: int64 [trees]"""
    return [
        Root(row, tree.position, tree.context, tree.first_slot) for row, tree in zip(rows.tolist(), trees, strict=True)
    ]
