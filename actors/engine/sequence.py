"""A worker's copy of one sequence: its tokens, its KV blocks, and the draft nodes computed last."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from itertools import pairwise

import numpy as np
from numba import njit

from actors.engine.block_pool import BlockPool, block_hash, root_hash
from actors.engine.draft_trees import offsets_of
from actors.engine.kv_cache import KvCache
from actors.messages import SequenceDelta, SequenceStart, no_tokens
from actors.sampling.sampler import SequenceSampling

_NO_TOKENS = no_tokens()


class Sequence:
    """The first `num_computed` of `length` known tokens have valid KV, at logical slots 0 .. num_computed - 1.

    Draft nodes of the last round are after the known tokens: node i at logical slot length + i.
    """

    def __init__(self, seq_id: int, begin: SequenceStart, pool: BlockPool) -> None:
        self.seq_id = seq_id
        self.begin = begin
        self.sampling = SequenceSampling(begin.sampling, begin.num_prompt_tokens)
        # Whether drafts are draws from a distribution that is sent along, as the rejection rule needs
        self.draws_from_probs = begin.sampling.acceptance == "rejection"
        self.block_size = pool.block_size
        self.num_computed = 0
        self.num_cached = 0
        self.blocks: list[int] = []
        self._hashes: list[bytes] = []  # hashes of the leading blocks that are full, computed and published
        self._pool = pool
        self._buffer = np.empty(256, dtype=np.int32)
        self.length = 0
        self._tree_tokens = _NO_TOKENS
        self._tree_parents = _NO_TOKENS
        self._block_table = np.empty(16, dtype=np.int32)  # `blocks`, then room

    @property
    def num_pending(self) -> int:
        """Known tokens without KV."""
        return self.length - self.num_computed

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens, int32 [length]; a view."""
        return self._buffer[: self.length]

    @property
    def block_table(self) -> np.ndarray:
        """The blocks, int32 [n]; a view."""
        return self._block_table[: len(self.blocks)]

    def pending(self, count: int) -> np.ndarray:
        """The next `count` known tokens without KV, int32; a view."""
        return self._buffer[self.num_computed : self.num_computed + count]

    def slots(self, begin: int, end: int) -> np.ndarray:
        """Physical slots of the logical ones begin .. end - 1, int64."""
        size = self.block_size
        first = begin // size
        starts = self._block_table[first : -(-end // size)].astype(np.int64) * size
        return (starts[:, None] + np.arange(size)).reshape(-1)[begin - first * size : end - first * size]

    def extend(self, token_ids: np.ndarray) -> None:
        needed = self.length + len(token_ids)
        if needed > len(self._buffer):
            grown = np.empty(max(needed, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : needed] = token_ids
        self.length = needed
        self.sampling.extend(token_ids)

    def reuse_prefix(self) -> None:
        """Use cached blocks with the beginning of a new sequence. The last token is always computed, for its logits."""
        blocks, hashes = self._pool.find_prefix(self.begin.namespace, self.tokens[: self.length - 1])
        self._add_blocks(blocks)
        self._hashes = hashes
        self.num_computed = self.num_cached = len(blocks) * self.block_size

    def apply(self, delta: SequenceDelta, path: list[int], kv: KvCache) -> None:
        """Append committed tokens and keep the KV of accepted draft nodes. path: from `accepted_paths`."""
        if path and self.num_computed == self.length:
            self._keep(path, kv)
            self.num_computed += len(path)
        self._tree_tokens = self._tree_parents = _NO_TOKENS
        self.extend(delta.token_ids)

    def _keep(self, path: list[int], kv: KvCache) -> None:
        """Move the KV of accepted nodes behind that of the committed tokens."""
        size, blocks = self.block_size, self.blocks
        moves = {}
        for place, node in enumerate(path, self.length):
            source = self.length + node
            if source != place:
                moves[blocks[place // size] * size + place % size] = blocks[source // size] * size + source % size
        if moves:
            kv.move(moves)

    def follow(self, token_ids: np.ndarray, path: list[int], behind: list[int], kv: KvCache) -> None:
        """Append committed tokens, int32 [n], which are the draft nodes `path`. The nodes `behind` the last of them,
        ascending, keep their KV and become the draft nodes."""
        assert self.num_pending == 0, "draft nodes without the tokens before them"
        nodes = np.asarray([*path, *behind])
        moved = np.flatnonzero(nodes != np.arange(len(nodes)))
        if len(moved):
            own = self.slots(self.length, self.length + len(self._tree_tokens))
            kv.move(dict(zip(own[moved].tolist(), own[nodes[moved]].tolist(), strict=True)))
        index = {node: place for place, node in enumerate(behind)} | {path[-1]: -1}
        self._tree_tokens = self._tree_tokens[behind]
        self._tree_parents = np.asarray([index[node] for node in self._tree_parents[behind].tolist()], dtype=np.int32)
        self.num_computed += len(path)
        self.extend(token_ids)

    def cut_tree(self, count: int) -> None:
        """Drop draft nodes beyond the first `count`, and blocks that only they used."""
        self._tree_tokens, self._tree_parents = self._tree_tokens[:count], self._tree_parents[:count]
        kept = -(-(self.length + count) // self.block_size)
        if kept < len(self.blocks):
            self._pool.release(self.blocks[kept:])
            del self.blocks[kept:]

    def reserve(self, count: int) -> bool:
        """Allocate blocks for `count` logical slots. Returns False and takes nothing if there are not enough."""
        needed = -(-count // self.block_size) - len(self.blocks)
        if needed > 0:
            taken = self._pool.allocate(needed, self.blocks[-1] if self.blocks else -1)
            if taken is None:
                return False
            self._add_blocks(taken)
        return True

    def _add_blocks(self, blocks: list[int]) -> None:
        held = len(self.blocks)
        self.blocks.extend(blocks)
        if len(self.blocks) > len(self._block_table):
            grown = np.empty(2 * len(self.blocks), dtype=np.int32)
            grown[:held] = self._block_table[:held]
            self._block_table = grown
        self._block_table[held : len(self.blocks)] = blocks

    def computed(self, count: int, tree_tokens: np.ndarray, tree_parents: np.ndarray) -> None:
        """Record that a forward has computed `count` further known tokens and the nodes of a tree after them."""
        self.num_computed += count
        self._tree_tokens, self._tree_parents = tree_tokens, tree_parents

    def publish(self) -> None:
        """Share full blocks of computed, committed tokens with other sequences."""
        size = self.block_size
        while (len(self._hashes) + 1) * size <= self.num_computed:
            index = len(self._hashes)
            parent = self._hashes[-1] if self._hashes else root_hash(self.begin.namespace)
            content = block_hash(parent, self.tokens[index * size : (index + 1) * size])
            self._pool.publish(self.blocks[index], content)
            self._hashes.append(content)

    def free(self) -> None:
        self._pool.release(self.blocks)
        self.blocks = []
        self._hashes = []
        self.num_computed = 0


def accepted_paths(sequences: Sequences[Sequence | None], token_ids: Sequences[np.ndarray]) -> list[list[int]]:
    """Nodes of each sequence's last tree along the tokens that follow its known ones (int32 [n]), without the last
    token: its logits are still needed."""
    if not sequences:
        return []
    trees = [(_NO_TOKENS, _NO_TOKENS) if one is None else (one._tree_tokens, one._tree_parents) for one in sequences]
    nodes, ends = _follow(
        np.concatenate([tokens for tokens, _ in trees], dtype=np.int32),
        np.concatenate([parents for _, parents in trees], dtype=np.int32),
        offsets_of([len(parents) for _, parents in trees]),
        np.concatenate(token_ids, dtype=np.int32),
        offsets_of([len(tokens) for tokens in token_ids]),
    )
    flat = nodes.tolist()
    return [flat[begin:end] for begin, end in pairwise(ends.tolist())]


@njit(cache=True, nogil=True)
def _follow(tree_tokens, tree_parents, tree_offsets, token_ids, token_offsets):  # type: ignore[no-untyped-def]
    """Nodes of all paths, int32, and where each begins and ends, int64 [S + 1]. Trees and tokens are int32, one after
    the other; where each begins and ends, int64 [S + 1]."""
    nodes = np.empty(len(tree_tokens), np.int32)
    ends = np.zeros(len(tree_offsets), np.int64)
    count = 0
    for s in range(len(tree_offsets) - 1):
        node, wanted, last = -1, token_offsets[s], token_offsets[s + 1] - 1
        # Parents come before children, so one pass meets every node of the walk in order.
        for index in range(tree_offsets[s], tree_offsets[s + 1]):
            if wanted >= last:
                break
            if tree_parents[index] == node and tree_tokens[index] == token_ids[wanted]:
                node = index - tree_offsets[s]
                nodes[count] = node
                count += 1
                wanted += 1
        ends[s + 1] = count
    return nodes[:count].copy(), ends
