"""Target predictions after rejected draft tokens, as texts that a phrase pool learns from.

A draft that goes wrong early is often right again further on. The target has computed all of it, so its next token
after each rejected node is known, and predicts how the text goes on (the discarded tails of Ouroboros, Zhao et al.
2024, arXiv:2402.13720).
"""

from __future__ import annotations

import numpy as np

from actors.lookahead.window import MAX_LOOKAHEAD_LEVEL

MAX_TEXTS = 4  # per round; drafts behind a chain share most of their path, and so most of their phrases
MAX_COMMITTED = MAX_LOOKAHEAD_LEVEL - 1  # committed tokens in a text: enough for a phrase with one guess at any level
MAX_GUESSED = MAX_LOOKAHEAD_LEVEL  # guessed tokens in a text


def discarded_texts(
    text: np.ndarray, num_before: int, path: list[int], parents: np.ndarray, likeliest: np.ndarray
) -> np.ndarray:
    """Texts, int32 [n], each ended by -1: committed tokens, then the target's likeliest token after each rejected node
    of a path. The deepest paths come first; no text is a prefix of one before it.

    text: committed tokens, int32 [m], including the round's; num_before: tokens committed before the round. path:
    accepted nodes, in order. parents: int32 [nodes], as in `DraftTree`. likeliest: the target's likeliest next token at
    the root and at each node, int32 [1 + nodes].
    """
    # For each node: how many nodes of the path to it were accepted, and which were rejected.
    accepted = {-1: 0} | {node: depth for depth, node in enumerate(path, 1)}
    rejected: dict[int, tuple[int, ...]] = {}
    for node, parent in enumerate(parents.tolist()):
        if node not in accepted:
            rejected[node] = (*rejected.get(parent, ()), node)
            accepted[node] = accepted[parent]
    inner = set(parents.tolist())
    ends = [node for node in rejected if node not in inner]
    ends.sort(key=lambda node: -(accepted[node] + len(rejected[node])))
    texts: list[list[int]] = []
    for node in ends:
        # The committed token in the place of the first rejected one is the correction.
        behind = num_before + accepted[node] + 1
        found = text[max(0, behind - MAX_COMMITTED) : behind].tolist()
        found += likeliest[1 + np.array(rejected[node][:MAX_GUESSED])].tolist()
        if not any(other[: len(found)] == found for other in texts):
            texts.append(found)
        if len(texts) == MAX_TEXTS:
            break
    return np.array([token for found in texts for token in (*found, -1)], np.int32)
