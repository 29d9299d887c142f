"""Rounds that the router sends ahead: which of the texts it foresaw came true, and the batch that follows.

Worker and router run the same functions on the same values, so the router knows what the target computes without being
told. Draft trees are only guesses, so a wrong pick could cost time and never change a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree
from actors.messages import (
    SequenceDelta,
    Verdict,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    no_tokens,
)

_NO_NODES = no_tokens()


class Picked(NamedTuple):
    """A round that is carried out: its batch, and where each item's draft comes from."""

    batch: VerifyBatch
    roots: list[int]  # for each item, the node of the tree sent ahead that was emitted last; -1: it was not foreseen
    nodes: list[np.ndarray]  # for each item, the nodes behind it that are verified, int32 [n], ascending
    lost: float  # tokens that drafts of a round planned later would bring beyond those of these


def pick(ahead: VerifyAhead, batch: VerifyBatch, result: VerifyResult) -> Picked | None:
    """The round that `ahead` becomes after `batch` with this result, if it is carried out (`is_carried_out`). None: it
    does not follow, or no sequence goes on.

    A sequence whose tokens were not foreseen is computed without a draft.
    """
    if ahead.after != batch.round_id or result.round_id != batch.round_id:
        return None
    before = {item.delta.seq_id: item for item in batch.items}
    verdicts = {verdict.seq_id: verdict for verdict in result.verdicts}
    picked = Picked(VerifyBatch(ahead.round_id, [], ahead.finished, ahead.num_successors), [], [], 0.0)
    finished = set(ahead.finished)
    lost = 0.0
    for item in ahead.items:
        last, verdict = before.get(item.seq_id), verdicts.get(item.seq_id)
        if last is None or verdict is None or item.seq_id in finished:
            continue
        token_ids = emitted_tokens(last.tree, verdict)
        if token_ids is None:
            continue
        tree = DraftTree.empty() if item.tree is None else item.tree
        root, nodes = foreseen_nodes(tree, token_ids, item.max_nodes, ahead.least_confidence)
        draft = tree_behind(tree, root, nodes)
        promised = ahead.trust * float(draft.confidence.sum(dtype=np.float64))
        lost += max(0.0, item.gain - min(len(nodes), promised))
        delta = SequenceDelta(item.seq_id, last.delta.start + len(last.delta.token_ids), token_ids)
        picked.batch.items.append(VerifyItem(delta, 1, draft if len(nodes) else None))
        picked.roots.append(root)
        picked.nodes.append(nodes)
    return picked._replace(lost=lost) if picked.batch.items else None


def is_carried_out(ahead: VerifyAhead, picked: Picked | None) -> bool:
    return picked is not None and picked.lost <= ahead.most_lost


def emitted_tokens(tree: DraftTree, verdict: Verdict) -> np.ndarray | None:
    """Accepted draft tokens and the target's next one, int32 [n]. None if there is no next token or no such node."""
    path = verdict.path
    if verdict.next_token < 0 or (len(path) and not 0 <= path.min() <= path.max() < len(tree.token_ids)):
        return None
    token_ids = np.empty(len(path) + 1, np.int32)
    token_ids[:-1] = tree.token_ids[path]
    token_ids[-1] = verdict.next_token
    return token_ids


def foreseen_nodes(
    tree: DraftTree, token_ids: np.ndarray, max_nodes: int, least_confidence: float
) -> tuple[int, np.ndarray]:
    """(the node at the end of these tokens, -1 if they leave the tree; the nodes behind it to verify, int32 [n]).

    Of the nodes behind it, the most probable ones are taken, at most max_nodes, as far as their probability after
    these tokens is at least least_confidence. They ascend, and a node's parent is among them or is the first.
    """
    if not len(tree.token_ids):
        return -1, _NO_NODES
    # Copies: numba would compile another version for read-only arrays, which messages are made of.
    parents = np.array(tree.parents, np.int32)
    root = _walk(np.array(tree.token_ids, np.int32), parents, token_ids)
    if root < 0 or max_nodes < 1:
        return int(root), _NO_NODES
    behind = _behind(parents, root)
    behind = behind[tree.confidence[behind] >= np.float32(least_confidence) * tree.confidence[root]]
    # Stable, and confidence never rises from parent to child: parents come first.
    likeliest = np.argsort(-tree.confidence[behind], kind="stable")[:max_nodes]
    return int(root), np.sort(behind[likeliest])


def tree_behind(tree: DraftTree, root: int, nodes: np.ndarray) -> DraftTree:
    """The tree of these nodes behind `root`, with their probabilities after it."""
    if not len(nodes):
        return DraftTree.empty()
    confidence = tree.confidence[nodes] / max(float(tree.confidence[root]), 1e-9)
    return DraftTree(
        tree.token_ids[nodes],
        parents_behind(tree.parents, nodes),
        np.minimum(confidence, 1.0).astype(np.float32),
    )


def parents_behind(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Parents of these nodes (ascending) among themselves, int32 [n]; -1 where the parent is not one of them."""
    place = np.full(len(parents) + 1, -1, np.int32)
    place[nodes] = np.arange(len(nodes), dtype=np.int32)
    found: np.ndarray = place[parents[nodes]]
    return found


def warm_up() -> None:
    """Compile or load the kernels, so that no round waits for them."""
    tree = DraftTree.chain(np.zeros(2, np.int32), np.ones(2, np.float32))
    foreseen_nodes(tree, np.zeros(1, np.int32), 1, 0.0)


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
def _behind(parents, root):  # type: ignore[no-untyped-def]
    """All nodes below `root`, int32, ascending."""
    is_below = np.zeros(len(parents), np.bool_)
    found = np.empty(len(parents), np.int32)
    count = 0
    for node in range(root + 1, len(parents)):
        parent = parents[node]
        if parent == root or (parent >= 0 and is_below[parent]):
            is_below[node] = True
            found[count] = node
            count += 1
    return found[:count]
