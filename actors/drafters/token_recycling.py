"""Token recycling: drafts the target's last predictions after a token when the token occurs again.

After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(2024, arXiv:2408.08696), which fills one fixed tree of ranks. Here the probability of each rank is measured while
serving, so that trees can also be drawn best first, and every node has a confidence.

With a shared cache, half of a tree and the room that the map leaves are for what followed the last token anywhere in
the namespaces that the sequence may read.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numba import njit

from actors.draft_tree import DraftTree
from actors.drafters._options import Floor
from actors.drafters.contract import CpuDrafter, DraftContext, VerifiedRows
from actors.errors import InvalidRequest
from cache_service.automata.automata_index import AutomataIndex
from cache_service.automata.shared_phrases import SharedPhrases
from cache_service.store.fair_share import first_to_give_way

_SUCCESSORS = 8
_MAX_NAMESPACES = 64  # at 4 bytes a successor and 150,000 tokens, 5 MB each

# Probability of each rank before any has been measured, and the number of rows that it counts as.
_PRIOR = np.array([0.40, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01])
_PRIOR_ROWS = 200.0
_MEMORY_ROWS = 20_000.0  # after so many rows all counts are halved

_FLOOR = 0.02  # lowest confidence of a node of a dynamic tree

# The tree of the paper's code, which SAM-Decoding's port has, too: the number of children of each node by level, from
# the root on; children have the ranks 0, 1, ...
_PUBLISHED_CHILDREN = (
    "8",
    "84321111",
    "83211111 2100 100 10 1 1 0 0",
    "52111000 100 10 0 0 0 0 0 10 0 1 1 0 0",
    "31100 10 0 0 0 1 0 1 0 0",
    "200 1 0 0 0 0",
)
# A smaller tree: this many likely paths by length.
_LIKELY_LEVELS = (7, 20, 21, 8, 4)
_STATIC = ("static-60", "static-80")


class _Namespace:
    """Successors of each token, the most probable first, and how often the target chose each rank."""

    __slots__ = ("hits", "successors")

    def __init__(self) -> None:
        self.successors = np.full((0, _SUCCESSORS), -1, np.int32)
        self.hits = np.append(_PRIOR, 1.0 - _PRIOR.sum()) * _PRIOR_ROWS  # float64 [successors + 1]; last: none

    @property
    def rank_chances(self) -> npt.NDArray[np.float64]:
        chances: npt.NDArray[np.float64] = self.hits[:-1] / self.hits.sum()
        return chances

    def make_room(self, num_tokens: int) -> None:
        if num_tokens > len(self.successors):
            grown = np.full((max(num_tokens, 2 * len(self.successors)), _SUCCESSORS), -1, np.int32)
            grown[: len(self.successors)] = self.successors
            self.successors = grown


class TokenRecyclingDrafter(CpuDrafter):
    """Trees from a map of each token's likely successors, learnt from every row. One map a namespace."""

    name = "token_recycling"
    num_successors = _SUCCESSORS

    def __init__(
        self,
        *,
        tree: str = "dynamic",
        floor: Floor = _FLOOR,
        max_namespaces: int = _MAX_NAMESPACES,
        index: AutomataIndex | None = None,
    ) -> None:
        """tree: "dynamic" (best first), "static-80" (the published tree), "static-60" (a smaller one), or a JSON file.

        The file has either paths of ranks, [[0], [0, 0], [1], ...], or the children of each node, {"tree_adj": {"0":
        [1, 2], "1": [3], ...}}, where node 0 is the root and a child's rank is its place in the list. floor: lowest
        confidence of a node of a dynamic tree. index: the shared cache, if there is one. Raises InvalidRequest."""
        if max_namespaces < 1:
            raise InvalidRequest("max_namespaces", max_namespaces, "it must be at least 1")
        self._shape = None if tree == "dynamic" else _static_tree(tree)
        self._floor = float(floor)
        self._max_namespaces = max_namespaces
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()  # least recently used first
        self._shared = None if index is None else SharedPhrases(index)
        self._warm_up()

    def drop_namespace(self, namespace: str) -> None:
        """Drop a namespace's map and rank probabilities."""
        self._namespaces.pop(namespace, None)

    def memory_bytes(self) -> int:
        return sum(one.successors.nbytes + one.hits.nbytes for one in self._namespaces.values())

    def remember(self, rows: VerifiedRows) -> None:
        if not len(rows.contexts):
            return
        known = self._namespace(rows.namespace)
        tokens = rows.contexts[:, -1]
        known.make_room(int(tokens.max()) + 1)
        # Copied: numba would compile another version for read-only arrays and other layouts.
        token_ids, probs = np.array(rows.token_ids, np.int32, order="C"), np.array(rows.probs, np.float32, order="C")
        _learn(known.successors, known.hits, np.array(tokens, np.int32), token_ids, probs)
        if known.hits.sum() > _MEMORY_ROWS:
            known.hits *= 0.5

    def _namespace(self, name: str) -> _Namespace:
        known = self._namespaces.get(name)
        if known is None:
            known = self._namespaces[name] = _Namespace()
            if len(self._namespaces) > self._max_namespaces:
                del self._namespaces[first_to_give_way(list(self._namespaces))]
        self._namespaces.move_to_end(name)
        return known

    def _propose_one(self, context: DraftContext) -> DraftTree:
        namespaces = context.shared_namespaces
        if context.max_nodes < 1:
            return DraftTree.empty()
        if self._shared is None or not namespaces:
            return self._from_map(context, context.max_nodes)
        if not context.start:
            self._shared.follow(namespaces)
        own = self._from_map(context, (context.max_nodes + 1) // 2)
        count, room = len(own), context.max_nodes
        token_ids, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        token_ids[:count], parents[:count], confidence[:count] = own.token_ids, own.parents, own.confidence
        grown = self._shared.grow(
            namespaces, context.tokens[-1:], token_ids=token_ids, parents=parents, confidence=confidence, count=count
        )
        if grown == count:
            return self._from_map(context, room)
        return DraftTree(token_ids[:grown], parents[:grown], confidence[:grown])

    def _from_map(self, context: DraftContext, max_nodes: int) -> DraftTree:
        known = self._namespaces.get(context.namespace)
        root = int(context.tokens[-1])
        if known is None or root >= len(known.successors):
            return DraftTree.empty()
        chances = known.rank_chances
        if self._shape is None:
            found = _draw(known.successors, chances, root, max_nodes, self._floor)
        else:
            found = _fill(known.successors, chances, root, max_nodes, *self._shape)
        return DraftTree(*found) if len(found[0]) else DraftTree.empty()

    def _warm_up(self) -> None:
        table, hits = np.full((2, _SUCCESSORS), -1, np.int32), np.ones(_SUCCESSORS + 1)
        ids, probs = np.ones((1, 2), np.int32), np.ones((1, 2), np.float32)
        _learn(table, hits, np.ones(1, np.int32), ids, probs)
        _draw(table, _PRIOR, 1, 2, self._floor)
        _fill(table, _PRIOR, 1, 2, np.zeros(1, np.int32), np.full(1, -1, np.int32))


def _static_tree(spec: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Rank and parent of every node, parents first. Raises InvalidRequest."""
    if spec == "static-80":
        paths = _published_paths()
    else:
        paths = _likely_paths(_LIKELY_LEVELS) if spec == "static-60" else _read_paths(Path(spec))
    index = {path: node for node, path in enumerate(paths)}
    ranks = np.array([path[-1] for path in paths], np.int32)
    return ranks, np.array([index[path[:-1]] if len(path) > 1 else -1 for path in paths], np.int32)


def _published_paths() -> list[tuple[int, ...]]:
    """The paths of ranks of the paper's tree, level by level."""
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for counts in _PUBLISHED_CHILDREN:
        children = zip(level, map(int, counts.replace(" ", "")), strict=True)
        level = [(*path, rank) for path, count in children for rank in range(count)]
        paths += level
    return paths


def _likely_paths(levels: Sequence[int]) -> list[tuple[int, ...]]:
    """The paths of ranks with the largest products of prior probabilities, levels[i] of length i + 1."""
    paths: list[tuple[int, ...]] = []
    above: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for count in levels:
        level = [(chance * float(_PRIOR[rank]), (*path, rank)) for chance, path in above for rank in range(_SUCCESSORS)]
        above = sorted(level, key=lambda node: (-node[0], node[1]))[:count]
        paths += sorted(path for _, path in above)
    return paths


def _read_paths(file: Path) -> list[tuple[int, ...]]:
    limit = (
        f"a JSON list of paths, each a list of ranks 0 to {_SUCCESSORS - 1}, every path's beginning a path too, "
        'or {"tree_adj": {"0": [1, 2], ...}}, the children of each node, 0 being the root'
    )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        paths = {tuple(row) for row in (_paths_of(found["tree_adj"]) if isinstance(found, dict) else found)}
        is_right = all(
            path and all(type(rank) is int and 0 <= rank < _SUCCESSORS for rank in path)
            and (len(path) == 1 or path[:-1] in paths)
            for path in paths
        )  # fmt: skip
    except OSError as error:
        raise InvalidRequest("tree", str(file), f"dynamic, {', '.join(_STATIC)} or {limit}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise InvalidRequest("tree", str(file), limit) from error
    if not paths or not is_right:
        raise InvalidRequest("tree", str(file), limit)
    return sorted(paths, key=lambda path: (len(path), path))


def _paths_of(children: dict[str, list[int]]) -> list[tuple[int, ...]]:
    """Paths of all nodes below node 0. Raises TypeError or ValueError if it is not a tree with root 0."""
    if not isinstance(children, dict):
        raise TypeError(type(children))
    paths: dict[str, tuple[int, ...]] = {"0": ()}
    waiting = ["0"]
    while waiting:
        node = waiting.pop()
        for rank, child in enumerate(children.get(node, ())):
            if type(child) is not int or str(child) in paths:
                raise ValueError(child)
            paths[str(child)] = (*paths[node], rank)
            waiting.append(str(child))
    if not children.keys() <= paths.keys():
        raise ValueError(children.keys() - paths.keys())
    return [path for path in paths.values() if path]


@njit(cache=True, nogil=True)
def _learn(successors, hits, tokens, token_ids, probs):  # type: ignore[no-untyped-def]
    width = successors.shape[1]
    for row in range(len(tokens)):
        known = successors[tokens[row]]
        best = token_ids[row, 0]
        rank = 0
        while rank < width and known[rank] != best:
            rank += 1
        if known[0] >= 0:
            hits[rank] += 1.0
        if token_ids.shape[1] > 1 and probs[row, 1] > 0.0:
            for column in range(width):
                known[column] = token_ids[row, column] if column < token_ids.shape[1] else -1
        else:  # one observed token moves to the front
            for column in range(min(rank, width - 1), 0, -1):
                known[column] = known[column - 1]
            known[0] = best


@njit(cache=True, nogil=True)
def _draw(successors, chances, root, max_nodes, floor):  # type: ignore[no-untyped-def]
    """Draw nodes best first: (token ids int32, parents int32, confidence float32). A drawn node makes its next sibling
    and its first child candidates."""
    tokens = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    confidence = np.empty(max_nodes, np.float32)
    open_parent = np.empty(2 * max_nodes + 1, np.int32)
    open_rank = np.empty(2 * max_nodes + 1, np.int32)
    open_chance = np.empty(2 * max_nodes + 1, np.float64)
    open_parent[0], open_rank[0], open_chance[0] = -1, 0, chances[0]
    num_open, count = 1, 0
    while num_open and count < max_nodes:
        best = 0
        for i in range(1, num_open):
            if open_chance[i] > open_chance[best]:
                best = i
        parent, rank, chance = open_parent[best], open_rank[best], open_chance[best]
        num_open -= 1
        open_parent[best], open_rank[best] = open_parent[num_open], open_rank[num_open]
        open_chance[best] = open_chance[num_open]
        if chance < floor:
            break
        of = root if parent < 0 else tokens[parent]
        token = successors[of, rank] if of < len(successors) else -1
        if token < 0:
            continue
        tokens[count], parents[count], confidence[count] = token, parent, chance
        if rank + 1 < len(chances):
            whole = 1.0 if parent < 0 else np.float64(confidence[parent])
            open_parent[num_open], open_rank[num_open] = parent, rank + 1
            open_chance[num_open] = min(chance, whole * chances[rank + 1])
            num_open += 1
        open_parent[num_open], open_rank[num_open], open_chance[num_open] = count, 0, chance * chances[0]
        num_open += 1
        count += 1
    return tokens[:count].copy(), parents[:count].copy(), confidence[:count].copy()


@njit(cache=True, nogil=True)
def _fill(successors, chances, root, max_nodes, ranks, shape):  # type: ignore[no-untyped-def]
    """The nodes of a fixed tree whose tokens are known. `ranks`: rank of each node; `shape`: its parent."""
    tokens = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    confidence = np.empty(max_nodes, np.float32)
    node_of = np.full(len(ranks), -1, np.int32)
    count = 0
    for i in range(len(ranks)):
        if count == max_nodes:
            break
        parent = -1
        if shape[i] >= 0:
            parent = node_of[shape[i]]
            if parent < 0:
                continue
        of = root if parent < 0 else tokens[parent]
        token = successors[of, ranks[i]] if of < len(successors) else -1
        if token < 0:
            continue
        tokens[count], parents[count] = token, parent
        confidence[count] = chances[ranks[i]] * (1.0 if parent < 0 else confidence[parent])
        node_of[i] = count
        count += 1
    return tokens[:count].copy(), parents[:count].copy(), confidence[:count].copy()
