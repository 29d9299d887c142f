"""Rounds that the router sends ahead: which of the texts it foresaw came true, and the batch that follows.

Worker and router run the same functions on the same values, so the router knows what the target computes without being
told. Draft trees are only guesses, so a wrong pick could cost time and never change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree
from actors.messages import (
    AheadItem,
    SequenceDelta,
    Verdict,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    no_tokens,
)

_NO_TREE = DraftTree.empty()


class Guesses(NamedTuple):
    """Texts that may follow A sequences: trees in flat arrays, tree a has the nodes offsets[a] .. offsets[a + 1]."""

    tokens: np.ndarray  # int32 [N]
    parents: np.ndarray  # int32 [N]
    confidence: np.ndarray  # float32 [N]
    offsets: np.ndarray  # int64 [A + 1]
    max_nodes: np.ndarray  # int64 [A]: that may be verified
    gains: np.ndarray  # float64 [A]: as of `AheadItem`


class Foreseen(NamedTuple):
    """What of A guesses came true: for each the node that was emitted last, and draft trees of the nodes behind it."""

    roots: np.ndarray  # int64 [A]: -1: the tokens were not foreseen
    nodes: np.ndarray  # int32 [M]: nodes of the guess, ascending
    offsets: np.ndarray  # int64 [A + 1]: tree a has the nodes offsets[a] .. offsets[a + 1]
    tokens: np.ndarray  # int32 [M]
    parents: np.ndarray  # int32 [M]: among the nodes of the tree
    confidence: np.ndarray  # float32 [M]: after the emitted tokens
    lost: float  # tokens that drafts of a round planned later would bring beyond those of these


class Picked(NamedTuple):
    """A round that is carried out: its batch, and where each item's draft comes from."""

    batch: VerifyBatch
    roots: list[int]  # for each item, the node of the tree sent ahead that was emitted last; -1: it was not foreseen
    nodes: list[np.ndarray]  # for each item, the nodes behind it that are verified, int32 [n], ascending
    lost: float


def pick(ahead: VerifyAhead, batch: VerifyBatch, result: VerifyResult) -> Picked | None:
    """The round that `ahead` becomes after `batch` with this result, if it is carried out (`is_carried_out`). None: it
    does not follow, or no sequence goes on.

    A sequence whose tokens were not foreseen is computed without a draft.
    """
    if ahead.after != batch.round_id or result.round_id != batch.round_id:
        return None
    before = {item.delta.seq_id: item for item in batch.items}
    verdicts = {verdict.seq_id: verdict for verdict in result.verdicts}
    finished = set(ahead.finished)
    items: list[AheadItem] = []
    deltas: list[SequenceDelta] = []
    for item in ahead.items:
        last, verdict = before.get(item.seq_id), verdicts.get(item.seq_id)
        if last is None or verdict is None or item.seq_id in finished:
            continue
        token_ids = emitted_tokens(last.tree, verdict)
        if token_ids is not None:
            items.append(item)
            deltas.append(SequenceDelta(item.seq_id, last.delta.start + len(last.delta.token_ids), token_ids))
    if not items:
        return None
    ends = np.cumsum([0, *[len(delta.token_ids) for delta in deltas]])
    found = foresee(guesses_of(items), np.concatenate([delta.token_ids for delta in deltas]), ends, ahead)
    pieces = [slice(begin, end) for begin, end in pairwise(found.offsets.tolist())]
    drafts = [
        DraftTree(found.tokens[piece], found.parents[piece], found.confidence[piece])
        if piece.stop > piece.start
        else None
        for piece in pieces
    ]
    verified = [VerifyItem(delta, 1, draft) for delta, draft in zip(deltas, drafts, strict=True)]
    return Picked(
        VerifyBatch(ahead.round_id, verified, ahead.finished, ahead.num_successors),
        found.roots.tolist(),
        [found.nodes[piece] for piece in pieces],
        found.lost,
    )


def is_carried_out(ahead: VerifyAhead, found: Picked | Foreseen | None) -> bool:
    return found is not None and found.lost <= ahead.most_lost


def emitted_tokens(tree: DraftTree, verdict: Verdict) -> np.ndarray | None:
    """Accepted draft tokens and the target's next one, int32 [n]. None if there is no next token or no such node."""
    path = verdict.path
    if verdict.next_token < 0 or (len(path) and not 0 <= path.min() <= path.max() < len(tree.token_ids)):
        return None
    token_ids = np.empty(len(path) + 1, np.int32)
    token_ids[:-1] = tree.token_ids[path]
    token_ids[-1] = verdict.next_token
    return token_ids


def guesses_of(items: Sequence[AheadItem]) -> Guesses:
    trees = [_NO_TREE if item.tree is None else item.tree for item in items]
    # Copies: numba would compile another version for read-only arrays, which messages are made of.
    return Guesses(
        np.concatenate([no_tokens(), *[tree.token_ids for tree in trees]], dtype=np.int32),
        np.concatenate([no_tokens(), *[tree.parents for tree in trees]], dtype=np.int32),
        np.concatenate([_NO_TREE.confidence, *[tree.confidence for tree in trees]], dtype=np.float32),
        np.cumsum([0, *[len(tree.token_ids) for tree in trees]]),
        np.array([item.max_nodes for item in items], np.int64),
        np.array([item.gain for item in items], np.float64),
    )


def foresee(guesses: Guesses, emitted: np.ndarray, ends: np.ndarray, ahead: VerifyAhead) -> Foreseen:
    """emitted: int32, tokens of all A sequences. ends: int64 [A + 1], where those of each begin and end.

    Takes the most probable of the nodes behind the emitted ones, at most max_nodes, whose probability after these
    tokens is at least `ahead.least_confidence`. A node's parent is among them or is the root.
    """
    return Foreseen(*_foresee(*guesses, emitted, ends, ahead.least_confidence, ahead.trust))


def parents_behind(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Parents of these nodes (ascending) among themselves, int32 [n]; -1 where the parent is not one of them."""
    place = np.full(len(parents) + 1, -1, np.int32)
    place[nodes] = np.arange(len(nodes), dtype=np.int32)
    found: np.ndarray = place[parents[nodes]]
    return found


def warm_up() -> None:
    """Compile or load the kernels, so that no round waits for them."""
    tree = DraftTree.chain(np.zeros(2, np.int32), np.ones(2, np.float32))
    foresee(guesses_of([AheadItem(0, tree, 1)]), np.zeros(1, np.int32), np.array([0, 1]), VerifyAhead(0, 0, []))


@njit(cache=True, nogil=True)
def _foresee(  # type: ignore[no-untyped-def]
    tokens, parents, confidence, offsets, max_nodes, gains, emitted, ends, least_confidence, trust
):
    count = len(max_nodes)
    roots, starts = np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    nodes, places = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
    own_tokens, own_parents = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
    own_confidence = np.empty(len(tokens), np.float32)
    lost = 0.0
    for a in range(count):
        first, end, start = offsets[a], offsets[a + 1], starts[a]
        tree, sure = parents[first:end], confidence[first:end]
        root = _walk(tokens[first:end], tree, emitted[ends[a] : ends[a + 1]])
        roots[a] = root
        num_kept = _keep_behind(tree, sure, root, max_nodes[a], np.float32(least_confidence), nodes[start:])
        places[: end - first] = -1
        promised = 0.0
        for index in range(num_kept):
            node = nodes[start + index]
            places[node] = index
            own_tokens[start + index], own_parents[start + index] = tokens[first + node], places[tree[node]]
            likely = min(np.float32(1.0), np.float32(sure[node] / np.float32(max(np.float64(sure[root]), 1e-9))))
            own_confidence[start + index] = likely
            promised += np.float64(likely)
        lost += max(0.0, gains[a] - min(np.float64(num_kept), trust * promised))
        starts[a + 1] = start + num_kept
    used = starts[count]
    return roots, nodes[:used], starts, own_tokens[:used], own_parents[:used], own_confidence[:used], lost


@njit(cache=True, nogil=True)
def _walk(tree_tokens, parents, token_ids):  # type: ignore[no-untyped-def]
    """The node that these tokens lead to; -1 if they leave the tree."""
    at, wanted = -1, 0
    for node in range(len(tree_tokens)):
        if wanted == len(token_ids):
            break
        if parents[node] == at and tree_tokens[node] == token_ids[wanted]:
            at = node
            wanted += 1
    return at if wanted == len(token_ids) else -1


@njit(cache=True, nogil=True)
def _keep_behind(parents, confidence, root, most, least_confidence, kept):  # type: ignore[no-untyped-def]
    """Fill `kept` with the nodes behind `root`, ascending, as `foresee` takes them. Returns their number."""
    if root < 0 or most < 1:
        return 0
    is_below, is_kept = np.zeros(len(parents), np.bool_), np.zeros(len(parents), np.bool_)
    behind = np.empty(len(parents), np.int32)
    count = 0
    for node in range(root + 1, len(parents)):
        parent = parents[node]
        if parent == root or (parent >= 0 and is_below[parent]):
            is_below[node] = True
            if confidence[node] >= least_confidence * confidence[root]:
                # Sorted by falling probability; stable, and it never rises from parent to child: parents come first.
                place = count
                while place > 0 and confidence[behind[place - 1]] < confidence[node]:
                    behind[place] = behind[place - 1]
                    place -= 1
                behind[place] = node
                count += 1
    for place in range(min(count, most)):
        is_kept[behind[place]] = True
    count = 0
    for node in range(len(parents)):
        if is_kept[node]:
            kept[count] = node
            count += 1
    return count
