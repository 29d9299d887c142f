"""Which draft nodes are worth verifying: spends the round's rows where they bring the most tokens a second.

Pure functions over the trees that `merged_trees` makes. Nothing here knows requests or workers.
"""

from __future__ import annotations

import numba
import numpy as np

from actors.draft_tree import DraftTree
from cluster.router.calibration import SourceCalibration, observe
from cluster.router.merged_trees import MergedTrees, Proposal, SequenceLimits, best_paths, keep_nodes, merge_trees


def choose_nodes(
    merged: MergedTrees,
    max_nodes: np.ndarray,
    expected_tokens: float,
    fixed_s: float,
    verify_s: np.ndarray,
    min_rows: int = 0,
) -> MergedTrees:
    """Keep the required nodes, and of the others those with which the round's rate, expected emitted tokens / time, is
    greatest.

    The others are ranked by probability (parents before children), at most max_nodes[s] of sequence s (int32) and
    len(verify_s) - 1 in all. Of all beginnings of this ranking, the one with the greatest
    (expected_tokens + sum of probabilities) / (fixed_s + verify_s[k]) is kept. Looking at all beginnings rather than
    stopping at the first node that does not pay sees past a step of the curve.

    expected_tokens: what the round emits without drafts, one for each sequence; verify_s: float64, seconds of a forward
    with all required nodes and k = 0, 1, ... others; min_rows: keep at least so many others, to measure a forward of
    that many rows.
    """
    nodes = merged.nodes
    if not len(nodes) or (len(verify_s) < 2 and not nodes["is_required"].any()):
        return MergedTrees.empty(len(max_nodes))
    ranked, num_paying = _rank(merged.start, nodes, max_nodes, expected_tokens, fixed_s, verify_s)
    is_kept = nodes["is_required"].copy()
    is_kept[ranked[: max(num_paying, min_rows)]] = True
    start, kept = keep_nodes(merged.start, nodes, is_kept)
    return MergedTrees(start, kept)


def most_nodes_that_can_pay(expected_tokens: float, fixed_s: float, verify_s: np.ndarray) -> int:
    """How many nodes could pay if every one of them were accepted; 0 means that drafting is lost work, because not
    even then would the round's rate rise by a hundredth."""
    if expected_tokens <= 0.0 or len(verify_s) < 2:
        return 0
    rates = (expected_tokens + np.arange(len(verify_s))) / (fixed_s + verify_s)
    best = int(rates.argmax())
    return best if rates[best] > 1.01 * rates[0] else 0


def price_of_a_row(expected_tokens: float, fixed_s: float, verify_s: np.ndarray) -> float:
    """The acceptance probability from which a node pays, on average over the rows of `verify_s`."""
    if len(verify_s) < 2:
        return 1.0
    slope = (verify_s[-1] - verify_s[0]) / (len(verify_s) - 1)
    return float(expected_tokens * slope / (fixed_s + verify_s[0]))


def tally_nodes(
    chosen: MergedTrees, was_verified: np.ndarray, was_accepted: np.ndarray, calibration: SourceCalibration
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Teach the calibration what became of the round's nodes, and count them per sequence and source.

    was_verified and was_accepted are bool [len(chosen)]. Returns the verified and the accepted nodes of each source,
    int32 [sequences, sources], and how many the calibration expected to be accepted, float64 [sequences, sources]. A
    node of several sources counts for each. A required node that is no guess counts for nobody.
    """
    shape = len(chosen.start) - 1, calibration.num_sources
    counts = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape)
    outcome = np.where(was_verified, was_accepted.view(np.int8), np.int8(-1))
    _learn(chosen.start, chosen.nodes, outcome, calibration.by_sources.curves, counts)
    return counts


def warm_up() -> None:
    """Compile or load the kernels, so that no request waits for them."""
    calibration = SourceCalibration(1)
    limits = SequenceLimits(np.ones(1, np.int32), np.ones(1, np.int32), np.empty(0, np.int32), np.zeros(2, np.int32))
    tree = DraftTree.chain(np.zeros(1, np.int32), np.ones(1, np.float32))
    merged, _ = merge_trees([Proposal(0, 0, tree)], limits, calibration, 1)
    chosen = choose_nodes(best_paths(merged), limits.max_nodes, 1.0, 0.0, np.ones(2))
    flags = np.ones(len(chosen), np.bool_)
    tally_nodes(chosen, flags, flags, calibration)
    calibration.chain.observe(0, np.ones(1), flags)
    calibration.end_round()


@numba.njit(cache=True)
def _rank(start, nodes, max_nodes, expected_tokens, fixed_s, verify_s):  # type: ignore[no-untyped-def]
    """(indices of the nodes that may be verified and are not required, most probable first; how many of them pay)."""
    sequence_of = np.empty(len(nodes), np.int32)
    for s in range(len(max_nodes)):
        sequence_of[start[s] : start[s + 1]] = s
    tokens = expected_tokens
    for m in range(len(nodes)):
        if nodes[m].is_required:
            tokens += nodes[m].probability
    ranked = np.empty(min(len(nodes), len(verify_s) - 1), np.int32)
    taken = np.zeros(len(max_nodes), np.int32)
    count = 0
    num_paying = 0
    best_rate = tokens / (fixed_s + verify_s[0])
    # Stable: of equally probable nodes the parent, which has the smaller index, comes first.
    for m in np.argsort(-nodes["probability"], kind="mergesort"):
        if count == len(ranked):
            break
        s = sequence_of[m]
        if nodes[m].is_required or taken[s] >= max_nodes[s]:
            continue
        taken[s] += 1
        ranked[count] = m
        count += 1
        tokens += nodes[m].probability
        rate = tokens / (fixed_s + verify_s[count])
        if rate > best_rate:
            best_rate, num_paying = rate, count
    return ranked[:count], num_paying


@numba.njit(cache=True)
def _learn(start, nodes, outcome, curves, counts):  # type: ignore[no-untyped-def]
    """Add every verified guess to its calibration curve, and to the counts by sequence and source. outcome: int8 [n],
    -1 not verified, else whether it was accepted."""
    verified, accepted, expected = counts
    num_sources = verified.shape[1]
    for s in range(len(start) - 1):
        for m in range(start[s], start[s + 1]):
            node = nodes[m]
            if outcome[m] < 0 or not node.sources:
                continue
            observe(node.uncalibrated_probability, outcome[m], curves[node.curve])
            for source in range(num_sources):
                if node.sources >> source & 1:
                    verified[s, source] += 1
                    accepted[s, source] += outcome[m]
                    expected[s, source] += node.probability
