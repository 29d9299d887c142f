"""What the target had in mind at the draft tokens that it refused, as texts that a phrase pool learns from.

A draft that goes wrong early is often right again further on. The target has read all of it, so what it would have said
behind each refused token is known, and stands where the text will go on (the harvest of discarded tails in Ouroboros,
Zhao et al. 2024, arXiv:2402.13720).
"""

from __future__ import annotations

import numpy as np

from actors.lookahead.limits import MAX_LOOKAHEAD_LEVEL

# Of a round; drafts behind a chain share most of their path, and with that most of their phrases.
MAX_TEXTS = 4
# Tokens of one text: those that the first phrase with a guessed token needs, whatever the level, and those guessed.
MAX_COMMITTED = MAX_LOOKAHEAD_LEVEL - 1
MAX_GUESSED = MAX_LOOKAHEAD_LEVEL


def discarded_texts(
    text: np.ndarray, num_before: int, path: list[int], parents: np.ndarray, likeliest: np.ndarray
) -> np.ndarray:
    """Texts, int32 [n], each ended by -1: committed tokens, then the target's likeliest token behind each refused node
    of a path. The deepest paths come first; no text is the beginning of one before it.

    text: int32 [m], committed, those of the round included; num_before: how many there were before it. path:
    accepted nodes, in order; parents: int32 [nodes] of the draft tree, -1: child of the root, always lower than the
    node. likeliest: int32 [1 + nodes], of the root and the nodes.
    """
    # By node: of the path to it, how many nodes were accepted and which were refused.
    accepted = {-1: 0} | {node: depth for depth, node in enumerate(path, 1)}
    refused: dict[int, tuple[int, ...]] = {}
    for node, parent in enumerate(parents.tolist()):
        if node not in accepted:
            refused[node] = (*refused.get(parent, ()), node)
            accepted[node] = accepted[parent]
    inner = set(parents.tolist())
    ends = [node for node in refused if node not in inner]
    ends.sort(key=lambda node: -(accepted[node] + len(refused[node])))
    texts: list[list[int]] = []
    for node in ends:
        # The token of the text in the place of the path's first refused one is the correction.
        behind = num_before + accepted[node] + 1
        found = text[max(0, behind - MAX_COMMITTED) : behind].tolist()
        found += likeliest[1 + np.array(refused[node][:MAX_GUESSED])].tolist()
        if not any(other[: len(found)] == found for other in texts):
            texts.append(found)
        if len(texts) == MAX_TEXTS:
            break
    return np.array([token for found in texts for token in (*found, -1)], np.int32)
