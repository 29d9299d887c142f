"""What a draft model is known to guess behind a sequence's text, and trees that grow from it without a forward.

A guess is a function of the text before it (and of seed and position), so one that has been made need not be made
again: neither for another tree, nor when tokens before it have been committed.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np

from actors.draft_model.growing_tree import ROOT, GrowingTree

Path = tuple[int, ...]  # tokens behind the committed text; () is its last token


@dataclass(slots=True)
class KnownGuesses:
    """Paths of one sequence whose next tokens have been guessed. All but () are draft nodes with KV, in `nodes`."""

    width: int  # guesses made behind each path, at least
    nodes: dict[Path, int] = field(default_factory=dict)  # index among the sequence's draft nodes, ascending
    guesses: dict[Path, list[tuple[int, float]]] = field(default_factory=dict)  # (token, share), likeliest first
    # The distributions that guesses were drawn from, ids and probabilities, with acceptance == "rejection".
    probs: dict[Path, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    is_ahead: bool = False  # whether likely outcomes of the last draft have been, or are to be, drafted for
    num_reserved: int = 0  # nodes that there has to be room for; more are there while there are blocks

    def add(
        self, path: Path, guesses: list[tuple[int, float]], probs: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """Record the guesses behind a path whose parent is known; () is the root, others become draft nodes."""
        self.guesses[path] = guesses
        if probs is not None:
            self.probs[path] = probs
        if path:
            self.nodes[path] = len(self.nodes)

    def arrays(self, more: Sequences[Path] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents, int32, of the nodes and of `more` behind them, whose parents are nodes."""
        paths = [*self.nodes, *more]
        tokens = [path[-1] for path in paths]
        parents = [self.nodes[path[:-1]] if len(path) > 1 else ROOT for path in paths]
        return np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32)

    def follow(self, token_ids: Path) -> tuple[list[int], list[int]] | None:
        """These tokens have been committed: what was known behind them is what is known now. Returns the nodes on
        their path and the nodes behind it, by their old indices; None, and nothing changed, if there is no guess behind
        the last of them."""
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

    def is_consistent(self) -> bool:
        """Whether each node has its guesses, its parent before it, and the index it should have."""
        parents = {path[:-1] for path in self.nodes}
        return (
            self.guesses.keys() <= self.nodes.keys() | {()}
            and self.nodes.keys() <= self.guesses.keys()
            and [*self.nodes.values()] == [*range(len(self.nodes))]
            and parents <= self.nodes.keys() | {()}
        )


@dataclass(slots=True)
class Growth:
    """A tree that grows behind a path, as far as guesses are known."""

    tree: GrowingTree
    known: KnownGuesses
    base: Path = ()
    _step: dict[Path, int] = field(default_factory=dict)  # nodes of the step that waits for guesses, by their paths

    def advance(self) -> list[Path]:
        """Make the steps whose guesses are all known; the paths that the next one wants guesses behind, none if the
        tree is done."""
        while step := self._step or {(*self.base, *self.tree.path(node)): node for node in self.tree.expandable()}:
            wanted = [path for path in step if path not in self.known.guesses]
            if wanted:
                self._step = step
                return wanted
            self._step = {}
            self.tree.begin_step(step.values())
            for path, node in step.items():
                for token, share in self.known.guesses[path][: self.tree.branch]:
                    if share > 0.0:  # else the token is masked
                        self.tree.add(node, token, share)
        return []
