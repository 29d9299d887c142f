"""Branches of tokens with equal beginnings merged."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ROOT = -1


class TokenTrie:
    """Nodes in order of creation, so parents come before children. Siblings have distinct tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> dict[int, int]:
        """Nodes below a node, by token, in order of creation."""
        return self._children.get(node, {})

    def add(self, parent: int, tokens: Iterable[int]) -> list[int]:
        """The nodes of a branch below `parent`. Missing nodes are created."""
        nodes = []
        for token in tokens:
            below = self._children.setdefault(parent, {})
            if token not in below:
                below[token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            parent = below[token]
            nodes.append(parent)
        return nodes

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents, int32 [n]."""
        return np.asarray(self.tokens, dtype=np.int32), np.asarray(self.parents, dtype=np.int32)
