"""Decides which draft tokens the target accepts.

`walk_tree` follows the draft as long as it equals the target's own draws. It works for every drafter, a seed's output
does not depend on the draft, and at temperature 0 it is argmax equality. `verify_rejections` is the classic
accept/residual rule for chains drawn from a draft model: the same distribution, but a seed's output depends on the
draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from actors.draft_tree import TopProbs
from actors.sampling import noise
from actors.sampling.processors import process_logits
from actors.sampling.rows import RowSampling
from actors.sampling.sampler import sample_tokens


def walk_tree(target_tokens: np.ndarray, token_ids: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, int]:
    """Follow the target's own tokens through a draft tree of n nodes.

    target_tokens: int [n + 1], the token that the target draws at the root (index 0) and at node i (index i + 1).
    token_ids, parents: int [n], as in `DraftTree`. Returns the accepted nodes, int32 in order, and the token that the
    target emits after them: recovered where the draft said otherwise, bonus at a leaf.
    """
    nodes, _, next_tokens = walk_trees(
        np.array(target_tokens, np.int64),
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array([0, len(token_ids)]),
    )
    return nodes, int(next_tokens[0])


@njit(cache=True, nogil=True)
def walk_trees(target_tokens, token_ids, parents, offsets):  # type: ignore[no-untyped-def]
    """`walk_tree` of T trees of together n nodes, one after the other.

    target_tokens: int64 [n + T]. token_ids, parents: int32 [n]. offsets: int64 [T + 1], where each tree's nodes begin
    and end. Returns the accepted nodes of all trees, int32, where those of each tree begin and end, int64 [T + 1], and
    the next tokens, int64 [T].
    """
    num_trees = len(offsets) - 1
    nodes = np.empty(len(token_ids), np.int32)
    ends = np.zeros(num_trees + 1, np.int64)
    next_tokens = np.empty(num_trees, np.int64)
    count = 0
    for tree in range(num_trees):
        first = offsets[tree]
        root = first + tree
        node, wanted = -1, target_tokens[root]
        # Parents come before children, so one pass meets every node of the walk in order.
        for index in range(offsets[tree + 1] - first):
            if parents[first + index] == node and token_ids[first + index] == wanted:
                nodes[count] = index
                count += 1
                node, wanted = index, target_tokens[root + 1 + index]
        ends[tree + 1], next_tokens[tree] = count, wanted
    return nodes[:count].copy(), ends, next_tokens


def verify_rejections(
    logits: Tensor, rows: RowSampling, draft_tokens: Sequence[np.ndarray], probs: Sequence[TopProbs | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Speculative sampling (Leviathan, Kalman, Matias 2023) for C chains at once.

    logits: [N, V]; the rows of chain c, its root and then its n_c nodes, follow those of chain c - 1, N = sum(n_c + 1).
    rows: as for `sample_tokens`, in the same order. draft_tokens[c]: int [n_c]. probs[c]: the distribution each of them
    was drawn from, which *is* the truncated one; None for an empty chain. Returns the number of accepted tokens and
    the next token, int64 [C].

    A draft token x is accepted if u < p(x) / q(x). The first that is not is replaced by a draw from the positive part
    of p - q; after a whole chain the next token is drawn as if there had been no draft. The accept test and the
    residual use separate noise streams. At temperature 0 a token is accepted if it is the argmax. A node whose q is no
    distribution, or does not hold its own token, ends the chain before it. Raises ValueError when the numbers of rows,
    tokens and probabilities do not fit together.
    """
    lengths = np.array([len(tokens) for tokens in draft_tokens], np.int64)
    if len(probs) != len(lengths) or len(logits) != len(rows) or len(rows) != int((lengths + 1).sum()):
        raise ValueError(
            f"{len(logits)} rows of logits, {len(rows)} of parameters, {len(probs)} distributions; "
            f"{len(lengths)} chains of together {int(lengths.sum())} tokens need one row more than tokens each"
        )
    roots = (lengths + 1).cumsum() - (lengths + 1)
    if not lengths.any():
        return np.zeros(len(lengths), np.int64), sample_tokens(logits[roots], rows.take(roots)).cpu().numpy()

    scores = process_logits(logits.detach(), rows)
    tokens = np.concatenate(draft_tokens).astype(np.int64)
    starts = lengths.cumsum() - lengths
    node_rows = np.arange(len(tokens)) + np.repeat(roots - starts, lengths)  # the row that judges each token
    q_ids, q_probs, usable = _draft_distributions(draft_tokens, probs, logits.shape[-1])
    usable &= _mass_of(tokens, q_ids, q_probs) > 0.0
    passes = _accept(scores[node_rows], rows.take(node_rows), tokens, _mass_of(tokens, q_ids, q_probs)) & usable

    accepted = np.zeros(len(lengths), np.int64)
    for chain, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        accepted[chain] = length if passes[start : start + length].all() else passes[start : start + length].argmin()
    ends = roots + accepted
    rejected_node = np.minimum(starts + accepted, len(tokens) - 1)
    is_residual = (accepted < lengths) & usable[rejected_node] & rows.is_hot[ends]

    next_tokens = np.empty(len(lengths), np.int64)
    plain = np.flatnonzero(~is_residual)
    if len(plain) > 0:
        next_tokens[plain] = sample_tokens(logits[ends[plain]], rows.take(ends[plain])).cpu().numpy()
    residual = np.flatnonzero(is_residual)
    if len(residual) > 0:
        nodes = rejected_node[residual]
        next_tokens[residual] = _draw_residual(
            scores[ends[residual]], rows.take(ends[residual]), q_ids[nodes], q_probs[nodes]
        )
    return accepted, next_tokens


def _accept(scores: Tensor, rows: RowSampling, tokens: np.ndarray, q: np.ndarray) -> np.ndarray:
    """bool [D]: whether each token passes its own test. scores: processed, [D, V]. q: float64 [D], of the token."""
    seeds, positions = torch.from_numpy(rows.seeds), torch.from_numpy(rows.positions)
    u = noise.uniform(seeds, positions, noise.ACCEPT).numpy()
    columns = torch.from_numpy(tokens).to(scores.device).unsqueeze(-1)
    wide = scores.to(torch.float64)
    p = (wide.gather(-1, columns).squeeze(-1) - wide.logsumexp(dim=-1)).exp_().cpu().numpy()
    is_argmax = (scores.argmax(dim=-1, keepdim=True) == columns).squeeze(-1).cpu().numpy()
    passes: np.ndarray = np.where(rows.is_hot, u * q < p, is_argmax)
    return passes


def _draw_residual(scores: Tensor, rows: RowSampling, q_ids: np.ndarray, q_probs: np.ndarray) -> np.ndarray:
    """Tokens int64 [C] from max(p - q, 0) normalised. scores: processed, [C, V]. q_ids, q_probs: [C, k]."""
    device = scores.device
    p = scores.to(torch.float64).softmax(dim=-1)
    residual = p.scatter_add(-1, torch.from_numpy(q_ids).to(device), torch.from_numpy(-q_probs).to(device)).clamp_min_(
        0
    )
    # If p equals q up to rounding, nothing is left: redraw from p.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0.0, residual, p)
    seeds, positions = torch.from_numpy(rows.seeds).to(device), torch.from_numpy(rows.positions).to(device)
    ids = torch.arange(scores.shape[-1], device=device)
    sums = residual.log_() + noise.gumbel(seeds, positions, ids, noise.RESIDUAL)
    drawn: np.ndarray = sums.argmax(dim=-1).cpu().numpy()
    return drawn


def _draft_distributions(
    draft_tokens: Sequence[np.ndarray], probs: Sequence[TopProbs | None], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids int64 [D, k], probabilities float64 [D, k], normalised, and whether they are a distribution, bool [D]."""
    width = max((part.k for part in probs if part is not None), default=1)
    num_nodes = sum(len(tokens) for tokens in draft_tokens)
    # Narrower chains are padded with id 0 and probability 0, which changes nothing.
    q_ids, q_probs = np.zeros((num_nodes, width), np.int64), np.zeros((num_nodes, width), np.float64)
    at = 0
    for tokens, part in zip(draft_tokens, probs, strict=True):
        count = len(tokens)
        if count == 0:
            continue
        if part is None:
            raise ValueError(f"probs is None for a chain of {count} tokens; each needs its draft distribution")
        if part.k < 1 or len(part.token_ids) != count * part.k or len(part.probs) != count * part.k:
            raise ValueError(
                f"probs has {len(part.token_ids)} ids and {len(part.probs)} values; {count} tokens with k = {part.k} "
                f"need {count * part.k} of each"
            )
        q_ids[at : at + count, : part.k] = part.token_ids.reshape(count, part.k)
        q_probs[at : at + count, : part.k] = part.probs.reshape(count, part.k)
        at += count
    usable = ((q_probs >= 0.0) & (q_probs <= 2.0) & (q_ids >= 0) & (q_ids < vocab_size)).all(axis=-1)
    usable &= q_probs.sum(axis=-1) > 0.0
    q_ids, q_probs = np.where(usable[:, None], q_ids, 0), np.where(usable[:, None], q_probs, 1.0)
    return q_ids, q_probs / q_probs.sum(axis=-1, keepdims=True), usable


def _mass_of(tokens: np.ndarray, q_ids: np.ndarray, q_probs: np.ndarray) -> np.ndarray:
    mass: np.ndarray = np.where(q_ids == tokens[:, None], q_probs, 0.0).sum(axis=-1)
    return mass
