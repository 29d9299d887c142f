"""What drafters learn from a round: the contexts of its rows, with the target's predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numba import njit

from actors.drafters.contract import MAX_CONTEXT, VerifiedRows
from actors.messages import VerifyResult
from cluster.router.round import RoundEntry


def successors_of(result: VerifyResult, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Token ids int32 and probabilities float32, both [rows, k]; None where they are missing or invalid."""
    told = result.successors
    if told is None:
        return None
    rows = sum(1 + verdict.num_nodes for verdict in result.verdicts if verdict.next_token >= 0)
    if any(verdict.num_nodes < 0 for verdict in result.verdicts):
        return None
    if told.k < 1 or not len(told.token_ids) == len(told.probs) == rows * told.k:
        return None
    if told.token_ids.dtype.kind != "i" or told.probs.dtype.kind != "f":
        return None
    if rows and not (told.token_ids.min() >= 0 and told.token_ids.max() < vocab_size):
        return None
    if rows and not (told.probs.min() >= 0.0 and told.probs.max() <= 1.0 + 1e-3):  # also refuses NaN
        return None
    return told.token_ids.reshape(rows, told.k), told.probs.reshape(rows, told.k)


def first_rows_of(result: VerifyResult) -> dict[int, tuple[int, int]]:
    """By sequence that emits: its first row in `successors_of`, and how many draft nodes follow the root's row."""
    found = {}
    row = 0
    for verdict in result.verdicts:
        if verdict.next_token >= 0:
            found[verdict.seq_id] = row, verdict.num_nodes
            row += 1 + verdict.num_nodes
    return found


def rows_of_round(
    result: VerifyResult,
    emitting: Iterable[RoundEntry],
    successors: tuple[np.ndarray, np.ndarray],
    shares_prompts: bool = False,
) -> Iterator[VerifiedRows]:
    """The rows of the entries that emitted, grouped by namespace and by whether they may be shared.

    successors: from `successors_of`. shares_prompts: rows whose contexts hold prompt tokens may be shared, too.
    """
    token_ids, probs = successors
    first_rows = first_rows_of(result)
    parts: dict[tuple[str, bool], list[tuple[np.ndarray, ...]]] = {}
    counts: dict[tuple[str, bool], int] = {}  # rows so far
    for entry in emitting:
        row, num_nodes = first_rows[entry.seq_id]
        before = np.full(MAX_CONTEXT, -1, np.int32)
        known = entry.sequence.tokens()[max(0, entry.num_tokens - MAX_CONTEXT) : entry.num_tokens]
        before[MAX_CONTEXT - len(known) :] = known
        # Copies: numba would compile another version for read-only arrays, which messages are made of.
        tree = np.array(entry.tree.token_ids[:num_nodes], np.int32), np.array(entry.tree.parents[:num_nodes], np.int32)
        contexts = _tree_contexts(before, *tree)
        rows = np.arange(row, row + 1 + num_nodes)
        group = entry.sequence.namespace, _may_share(entry, shares_prompts)
        first = counts.get(group, 0)
        counts[group] = first + len(rows)
        parents = np.empty(len(rows), np.int32)
        parents[0] = -1
        parents[1:] = tree[1] + (first + 1)
        parts.setdefault(group, []).append((contexts, rows, np.full(len(rows), entry.seq_id), parents))
    for (namespace, may_share), found in parts.items():
        contexts, rows, sequences, parents = (np.concatenate(column) for column in zip(*found, strict=True))
        yield VerifiedRows(
            namespace, contexts, token_ids[rows], probs[rows], sequences=sequences, parents=parents, may_share=may_share
        )


def _may_share(entry: RoundEntry, shares_prompts: bool) -> bool:
    sequence = entry.sequence
    if sequence.request.cache != "read_write":
        return False
    return shares_prompts or entry.num_tokens >= sequence.begin.num_prompt_tokens + MAX_CONTEXT


def rows_of_prompt(
    token_ids: np.ndarray,
    num_successors: int,
    begin: int = 0,
    end: int | None = None,
    *,
    namespace: str,
    seq_id: int,
    may_share: bool = False,
) -> VerifiedRows:
    """Prompt positions begin to end - 1 (token_ids int32 [n]) as contexts; each is followed by the prompt's next
    token."""
    end = max(0, len(token_ids) - 1) if end is None else end
    count = end - begin
    before = np.full(max(0, MAX_CONTEXT - begin), -1, np.int32)
    padded = np.concatenate([before, token_ids[max(0, begin - MAX_CONTEXT) : end]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, MAX_CONTEXT)[1:]
    successors = np.zeros((count, num_successors), np.int32)
    probs = np.zeros((count, num_successors), np.float32)
    successors[:, 0] = token_ids[begin + 1 : end + 1]
    probs[:, 0] = 1.0
    contexts = np.array(windows, np.int32, order="C")
    return VerifiedRows(namespace, contexts, successors, probs, sequences=np.full(count, seq_id), may_share=may_share)


@njit(cache=True, nogil=True)
def _tree_contexts(before, token_ids, parents):  # type: ignore[no-untyped-def]
    """Last tokens of the root (`before`) and of every node, int32 [1 + nodes, len(before)]."""
    width = len(before)
    contexts = np.empty((1 + len(token_ids), width), np.int32)
    contexts[0] = before
    for node in range(len(token_ids)):
        contexts[1 + node, : width - 1] = contexts[1 + parents[node], 1:]
        contexts[1 + node, width - 1] = token_ids[node]
    return contexts


def warm_up() -> None:
    """Compile or load the kernel before the first request."""
    _tree_contexts(np.zeros(MAX_CONTEXT, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int32))
