"""Guesses that a draft model has made after a sequence's text, and trees that grow from them without a forward.

A guess is a function of the text before it, seed and position, so it is never repeated: neither for another tree, nor
when tokens before it have been committed.

A parallel model guesses several tokens after a path in one forward. Guesses of the later ones do not depend on the
guesses before them, so they hold after each of these.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np

from actors.draft_model.growing_tree import ROOT, GrowingTree

Path = tuple[int, ...]  # tokens after the committed text; () is its last token
Probs = tuple[np.ndarray, np.ndarray]  # ids int32 [k] and probabilities float32 [k] that a guess was drawn from
Guess = tuple[list[tuple[int, float]], Probs | None]  # (token, share), likeliest first; Probs only under rejection


@dataclass(slots=True)
class KnownGuesses:
    """Paths of one sequence with guesses of their next tokens. All but () are draft nodes with KV, in `nodes`.

    With a parallel model, nodes on the way to a path may have no guesses.
    """

    width: int  # fewest guesses after each path
    nodes: dict[Path, int] = field(default_factory=dict)  # index among the sequence's draft nodes, ascending
    guesses: dict[Path, list[tuple[int, float]]] = field(default_factory=dict)  # (token, share), likeliest first
    # Only for acceptance == "rejection": the distributions that guesses were drawn from, ids and probabilities.
    probs: dict[Path, Probs] = field(default_factory=dict)
    # Only of a parallel model: guesses of the second and later tokens after each path with guesses.
    later: dict[Path, list[Guess]] = field(default_factory=dict)
    is_ahead: bool = False  # whether likely outcomes of the last draft are drafted for
    num_reserved: int = 0  # nodes with guaranteed room; others exist only while blocks are free

    def add(
        self,
        path: Path,
        guesses: list[tuple[int, float]],
        probs: Probs | None = None,
        later: list[Guess] | None = None,
    ) -> None:
        """Record the guesses after a path. It and the paths that lead to it become draft nodes, except ().

        later: guesses of the tokens after the next one, from a parallel model.
        """
        self.guesses[path] = guesses
        if probs is not None:
            self.probs[path] = probs
        if later is not None:
            self.later[path] = later
        for node in self.new_nodes([path]):
            self.nodes[node] = len(self.nodes)

    def after(self, path: Path, base: Path = ()) -> list[tuple[int, float]] | None:
        """Guesses after a path at or after `base`, as the tree after `base` has them; None if there are none.

        A parallel model's are those made after `base`: empty beyond the tokens that it has guessed.
        """
        if path == base or base not in self.later:
            return self.guesses.get(path)
        later, depth = self.later[base], len(path) - len(base)
        return later[depth - 1][0] if depth <= len(later) else []

    def likeliest_after(self, path: Path) -> list[tuple[int, float]] | None:
        """The best guesses after a path; None if there are none."""
        return self.guesses.get(path) or self.after(path) or None

    def probs_after(self, path: Path) -> Probs:
        """The distribution that the guess after a path of a chain was drawn from."""
        if path in self.probs:
            return self.probs[path]
        probs = self.later[()][len(path) - 1][1]
        assert probs is not None
        return probs

    def new_nodes(self, paths: Sequences[Path]) -> list[Path]:
        """Paths that must be computed for guesses after `paths` and are no nodes yet, parents first."""
        leading = (path[:length] for path in paths for length in range(1, len(path) + 1))
        return [node for node in dict.fromkeys(leading) if node not in self.nodes]

    def arrays(self, more: Sequences[Path] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents, int32, of the nodes and of `more` paths, from `new_nodes`."""
        paths = [*self.nodes, *more]
        places = {path: place for place, path in enumerate(paths)} | {(): ROOT}
        tokens = [path[-1] for path in paths]
        parents = [places[path[:-1]] for path in paths]
        return np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32)

    def follow(self, token_ids: Path) -> tuple[list[int], list[int]] | None:
        """Take the committed tokens off the front of all paths, and drop the other paths.

        Returns the old indices of the nodes on the committed path and of the nodes after it; None, and nothing changes,
        if there is no guess after the last token.
        """
        count = len(token_ids)
        if count == 0 or token_ids not in self.nodes or token_ids not in self.guesses:
            return None
        path = [self.nodes[token_ids[:length]] for length in range(1, count + 1)]
        behind = {node: at for node, at in self.nodes.items() if len(node) > count and node[:count] == token_ids}
        kept = {token_ids, *behind}
        self.guesses = {node[count:]: self.guesses[node] for node in kept & self.guesses.keys()}
        self.probs = {node[count:]: self.probs[node] for node in kept & self.probs.keys()}
        self.later = {node[count:]: self.later[node] for node in kept & self.later.keys()}
        self.nodes = {node[count:]: place for place, node in enumerate(behind)}
        return path, list(behind.values())


@dataclass(slots=True)
class Growth:
    """A tree after a path, grown as far as guesses are known."""

    tree: GrowingTree
    known: KnownGuesses
    base: Path = ()
    _step: dict[Path, int] = field(default_factory=dict)  # nodes of the pending step, by path

    @property
    def pending(self) -> list[float]:
        """Confidence of the nodes of the pending step: of a tree's first one, 1."""
        return [self.tree.confidence(node) for node in self._step.values()]

    def advance(self) -> list[Path]:
        """Make all steps whose guesses are known. Returns the paths that the next step needs guesses for, none if the
        tree is complete."""
        while step := self._step or {(*self.base, *self.tree.path(node)): node for node in self.tree.expandable()}:
            wanted = [path for path in step if self.known.after(path, self.base) is None]
            if wanted:
                self._step = step
                return wanted
            self._step = {}
            self.tree.begin_step(step.values())
            for path, node in step.items():
                for token, share in (self.known.after(path, self.base) or ())[: self.tree.branch]:
                    if share > 0.0:  # otherwise the token is masked
                        self.tree.add(node, token, share)
        return []
