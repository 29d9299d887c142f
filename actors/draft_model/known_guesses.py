"""Guesses that a draft model has made after a sequence's text, and trees that grow from them without a forward.

A guess is a function of the text before it, seed and position, so it is never repeated: neither for another tree, nor
when tokens before it have been committed.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np

from actors.draft_model.growing_tree import ROOT, GrowingTree

Path = tuple[int, ...]  # tokens after the committed text; () is its last token


@dataclass(slots=True)
class KnownGuesses:
    """Paths of one sequence with guesses of their next tokens. All but () are draft nodes with KV, in `nodes`."""

    width: int  # fewest guesses after each path
    nodes: dict[Path, int] = field(default_factory=dict)  # index among the sequence's draft nodes, ascending
    guesses: dict[Path, list[tuple[int, float]]] = field(default_factory=dict)  # (token, share), likeliest first
    # Only for acceptance == "rejection": the distributions that guesses were drawn from, ids and probabilities.
    probs: dict[Path, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    is_ahead: bool = False  # whether likely outcomes of the last draft are drafted for
    num_reserved: int = 0  # nodes with guaranteed room; others exist only while blocks are free

    def add(
        self, path: Path, guesses: list[tuple[int, float]], probs: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """Record the guesses after a path whose parent is known. Paths other than () become draft nodes."""
        self.guesses[path] = guesses
        if probs is not None:
            self.probs[path] = probs
        if path:
            self.nodes[path] = len(self.nodes)

    def arrays(self, more: Sequences[Path] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents, int32, of the nodes and of further paths whose parents are nodes."""
        paths = [*self.nodes, *more]
        tokens = [path[-1] for path in paths]
        parents = [self.nodes[path[:-1]] if len(path) > 1 else ROOT for path in paths]
        return np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32)

    def follow(self, token_ids: Path) -> tuple[list[int], list[int]] | None:
        """Take the committed tokens off the front of all paths, and drop the other paths.

        Returns the old indices of the nodes on the committed path and of the nodes after it; None, and nothing changes,
        if there is no guess after the last token.
        """
        count = len(token_ids)
        if count == 0 or token_ids not in self.nodes:
            return None
        path = [self.nodes[token_ids[:length]] for length in range(1, count + 1)]
        behind = {node: at for node, at in self.nodes.items() if len(node) > count and node[:count] == token_ids}
        kept = {token_ids, *behind}
        self.guesses = {node[count:]: self.guesses[node] for node in kept}
        self.probs = {node[count:]: self.probs[node] for node in kept & self.probs.keys()}
        self.nodes = {node[count:]: place for place, node in enumerate(behind)}
        return path, list(behind.values())


@dataclass(slots=True)
class Growth:
    """A tree after a path, grown as far as guesses are known."""

    tree: GrowingTree
    known: KnownGuesses
    base: Path = ()
    _step: dict[Path, int] = field(default_factory=dict)  # nodes of the pending step, by path

    def advance(self) -> list[Path]:
        """Make all steps whose guesses are known. Returns the paths that the next step needs guesses for, none if the
        tree is complete."""
        while step := self._step or {(*self.base, *self.tree.path(node)): node for node in self.tree.expandable()}:
            wanted = [path for path in step if path not in self.known.guesses]
            if wanted:
                self._step = step
                return wanted
            self._step = {}
            self.tree.begin_step(step.values())
            for path, node in step.items():
                for token, share in self.known.guesses[path][: self.tree.branch]:
                    if share > 0.0:  # otherwise the token is masked
                        self.tree.add(node, token, share)
        return []
