"""Grows the trees of a draft head on an accelerator, by launches that read nothing of the host.

The same trees as `eagle_drafter` grows on the host. Every tree expands `top_k` nodes in every level, so that shapes do
not depend on scores; nodes that cannot be among the likeliest are expanded in vain, since a child scores no higher. The
number of levels is known before the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from actors.engine.arena import Part
from actors.engine.attention.tree_rows import TreeRows
from actors.engine.batch import num_words
from actors.engine.row_tiers import context_tier, row_tier

_WORD_BITS = 64


class Root(NamedTuple):
    """Where a tree grows."""

    hidden_row: int  # of the root's output among the hidden states
    position: int
    context: np.ndarray  # int64: slots of the positions up to the root that have keys and values
    first_slot: int  # of `depth * top_k` scratch slots


class Level(NamedTuple):
    """The rows of one forward of the head, `top_k` of each tree."""

    token_ids: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    feature_rows: torch.Tensor  # int64 [rows]: of the hidden states before
    rows: TreeRows
    max_context: int


class Candidates(NamedTuple):
    """All nodes of T trees in order of depth, on the host."""

    tokens: np.ndarray  # int64 [T, nodes]
    parents: np.ndarray  # int64 [T, nodes], -1: the root
    scores: np.ndarray  # float64 [T, nodes]: log-probabilities of their paths


# Hidden states [rows, h], and how many children -> float64 scores and int64 token ids of the likeliest, [rows, k] each.
Children = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
# The next hidden states [rows, h], from a level and those before.
Forward = Callable[[Level, torch.Tensor], torch.Tensor]


class Sent(NamedTuple):
    """The roots of some trees, and of others as padding, on the device. Their number and the tables' width are rounded
    up to few different ones."""

    root_rows: torch.Tensor  # int64 [trees]
    positions: torch.Tensor  # int64 [trees]
    ends: torch.Tensor  # int32 [trees]: slots of the context
    slots: torch.Tensor  # int64 [depth, trees * top_k]
    tables: torch.Tensor  # int32 [trees, slots]: contexts, and then the scratch slots


def level_tier(levels: int | None, depth: int) -> int:
    """Levels to expand where `levels` pay on average, None: all; at least 1 and at most `depth`.

    Out of the whole depth, its half, quarter and eighth, so that few shapes are recorded, and rounded up. What a level
    brings falls by about the same factor from each to the next: levels too many cost less than as many too few.
    """
    if levels is None:
        return depth
    return next((tier for part in (8, 4, 2) if (tier := -(-depth // part)) >= levels), depth)


def root_parts(roots: Sequences[Root], depth: int, top_k: int, padding_slot: int) -> list[Part]:
    """What travels to the device for a `Sent`. padding_slot: where rows of padding are written."""
    trees = row_tier(len(roots))
    longest = max(len(root.context) for root in roots) + depth * top_k
    tables = np.zeros((len(roots), longest), np.int32)
    slots = np.full((depth, trees, top_k), padding_slot)
    for index, (_, _, context, first_slot) in enumerate(roots):
        scratch = np.arange(first_slot, first_slot + depth * top_k)
        tables[index, : len(context)] = context
        tables[index, len(context) : len(context) + len(scratch)] = scratch
        slots[:, index] = scratch.reshape(depth, top_k)
    return [
        Part(np.array([root.hidden_row for root in roots]), (trees,)),
        Part(np.array([root.position for root in roots]), (trees,)),
        Part(np.array([len(root.context) for root in roots], np.int32), (trees,)),
        Part(slots.reshape(depth, -1), (depth, trees * top_k)),
        Part(tables, (trees, context_tier(longest))),
    ]


@torch.inference_mode()
def grow(sent: Sent, hidden: torch.Tensor, top_k: int, children: Children, forward: Forward) -> torch.Tensor:
    """int64 [3, trees, nodes]: tokens, parents, and the bits of scores, of all nodes in order of depth.

    hidden [rows, h]: with the outputs of the roots. top_k: at most the number of outputs.
    """
    depth, trees = len(sent.slots), len(sent.root_rows)
    own_bits, first_rows = _constants(depth, top_k, trees, hidden.device)
    words = own_bits.shape[2]
    slot_positions = torch.zeros((trees, _WORD_BITS * words), dtype=torch.int32, device=hidden.device)

    visible_ends = sent.ends.repeat_interleave(top_k)

    scores, tokens = children(hidden[sent.root_rows], top_k)
    found = [(tokens, torch.full_like(tokens, -1), scores)]
    bits = own_bits[0].expand(trees, -1, -1)
    frontier = torch.arange(top_k, device=hidden.device).expand(trees, -1)  # nodes to expand
    feature_rows = sent.root_rows[:, None].expand(-1, top_k)
    tree_rows = torch.arange(trees, device=hidden.device)[:, None] * top_k
    for level in range(depth):
        positions = (sent.positions + (level + 1)).repeat_interleave(top_k)
        hidden = forward(
            Level(
                token_ids=tokens.reshape(-1),
                positions=positions,
                feature_rows=feature_rows.flatten(),
                rows=TreeRows(
                    slots=sent.slots[level],
                    first_rows=first_rows,
                    begins=sent.ends + level * top_k,
                    tree_starts=sent.ends,
                    block_tables=sent.tables,
                    visible_ends=visible_ends,
                    ancestors=bits.reshape(-1, words),
                    row_positions=positions.to(torch.int32),
                    node_positions=slot_positions,
                ),
                max_context=sent.tables.shape[1],
            ),
            hidden,
        )
        gained, of_each = children(hidden, top_k)  # [trees * top_k, top_k]
        sums = (scores.reshape(-1, 1) + gained).view(trees, -1)
        ids = of_each.view(trees, -1)
        found.append((ids, frontier.repeat_interleave(top_k, dim=1), sums))
        if level + 1 < depth:
            # Stable, as on the host: of equal scores the first counts.
            order = sums.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            parent = order // top_k  # within the level
            scores, tokens = sums.gather(1, order), ids.gather(1, order)
            bits = bits.gather(1, parent[..., None].expand(-1, -1, words)) | own_bits[level + 1]
            frontier = order + (top_k + level * top_k * top_k)
            feature_rows = tree_rows + parent
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return torch.stack([tokens, parents, scores.view(torch.int64)])


def num_nodes(depth: int, top_k: int) -> int:
    return top_k + depth * top_k * top_k


def candidates(values: np.ndarray, count: int) -> Candidates:
    """values: as of `grow`, on the host. count: trees without padding."""
    tokens, parents, scores = values[:, :count]
    return Candidates(tokens, parents, np.ascontiguousarray(scores).view(np.float64))


@cache
def _constants(depth: int, top_k: int, trees: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [depth, top_k, words]: each expanded node's own ancestor bit; int32 [trees + 1]: the first row of each.

    They stay, since recorded launches read them.
    """
    count = depth * top_k
    bits = np.zeros((count, num_words(count)), np.int64)
    places = np.arange(count)
    bits[places, places // _WORD_BITS] = np.int64(1) << (places % _WORD_BITS)
    first_rows = np.arange(trees + 1, dtype=np.int32) * np.int32(top_k)
    with torch.inference_mode(False):
        return (
            torch.from_numpy(bits.reshape(depth, top_k, -1)).to(device),
            torch.from_numpy(first_rows).to(device),
        )
