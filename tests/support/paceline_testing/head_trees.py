"""The trees of a head by the published rule, with every node computed anew."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Path = tuple[int, ...]  # tokens from below the root
# From a path and the outputs that predicted each of its tokens, [h]: the output after the path, and log-probabilities
# [vocab] of the next token.
Expand = Callable[[Path, tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]


def likeliest_tree(
    expand: Expand, depth: int, top_k: int, max_nodes: int, min_confidence: float = 0.0
) -> dict[Path, float]:
    """Paths of the `max_nodes` likeliest nodes with their probabilities, of trees whose `top_k` likeliest nodes of each
    of `depth` levels have `top_k` children, if they have at least this probability."""

    def children(path: Path, outputs: tuple[torch.Tensor, ...], score: float):
        output, log_probs = expand(path, outputs)
        best = log_probs.topk(top_k)
        return [
            ((*path, token), score + more, (*outputs, output))
            for token, more in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    level = children((), (), 0.0)
    found = {path: score for path, score, _ in level}
    for _ in range(depth):
        expanded = sorted(level, key=lambda node: -node[1])[:top_k]
        expanded = [node for node in expanded if math.exp(node[1]) >= min_confidence]
        level = [child for path, score, outputs in expanded for child in children(path, outputs, score)]
        found |= {path: score for path, score, _ in level}
    best = sorted(found.items(), key=lambda item: -item[1])[:max_nodes]
    return {path: math.exp(score) for path, score in best}
