"""A worker's copy of one sequence: its tokens, its KV blocks, and the draft nodes computed last."""

from __future__ import annotations

import numpy as np

from actors.engine.block_pool import BlockPool, block_hash, root_hash
from actors.engine.kv_cache import KvCache
from actors.messages import SequenceDelta, SequenceStart, no_tokens
from actors.sampling.sampler import SequenceSampling


class Sequence:
    """The first `num_computed` of `length` known tokens have valid KV, at logical slots 0 .. num_computed - 1.

    Draft nodes of the last round are after the known tokens: node i at logical slot length + i.
    """

    def __init__(self, seq_id: int, begin: SequenceStart, pool: BlockPool) -> None:
        self.seq_id = seq_id
        self.begin = begin
        self.sampling = SequenceSampling(begin.sampling, begin.num_prompt_tokens)
        self.num_computed = 0
        self.num_cached = 0
        self.blocks: list[int] = []
        self._hashes: list[bytes] = []  # hashes of the leading blocks that are full, computed and published
        self._pool = pool
        self._buffer = np.empty(256, dtype=np.int32)
        self.length = 0
        self._tree_tokens = no_tokens()
        self._tree_parents = no_tokens()
        self._slots = np.empty(0, dtype=np.int64)

    @property
    def num_pending(self) -> int:
        """Known tokens without KV."""
        return self.length - self.num_computed

    @property
    def draws_from_probs(self) -> bool:
        """Whether drafts are draws from a distribution that is sent along, as the rejection rule needs."""
        return self.sampling.params.acceptance == "rejection"

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens, int32 [length]; a view."""
        return self._buffer[: self.length]

    def slots(self, count: int) -> np.ndarray:
        """Physical slots of the first `count` logical ones, int64 [count]; a view."""
        return self._slots[:count]

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
        self.blocks, self._hashes = blocks, hashes
        self.num_computed = self.num_cached = len(blocks) * self._pool.block_size
        self._map_slots()

    def apply(self, delta: SequenceDelta, kv: KvCache) -> None:
        """Append committed tokens and keep the KV of accepted draft nodes."""
        if len(self._tree_tokens):
            path = self._walk(delta.token_ids)
            self._keep(path, kv)
            self._tree_tokens = self._tree_parents = no_tokens()
        self.extend(delta.token_ids)

    def _walk(self, token_ids: np.ndarray) -> list[int]:
        """Nodes of the last tree along token_ids, without the last token: its logits are still needed."""
        path: list[int] = []
        parent = -1
        for token in token_ids[:-1].tolist():
            found = np.flatnonzero((self._tree_parents == parent) & (self._tree_tokens == token))
            if len(found) == 0:
                break
            parent = int(found[0])
            path.append(parent)
        return path

    def _keep(self, path: list[int], kv: KvCache) -> None:
        if not path or self.num_computed != self.length:
            return
        moved = [(node, index) for index, node in enumerate(path) if node != index]
        if moved:
            source = self._slots[[self.length + node for node, _ in moved]]
            target = self._slots[[self.length + index for _, index in moved]]
            kv.move(source, target)
        self.num_computed += len(path)

    def follow(self, token_ids: np.ndarray, path: list[int], behind: list[int], kv: KvCache) -> None:
        """Append committed tokens, int32 [n], which are the draft nodes `path`. The nodes `behind` the last of them,
        ascending, keep their KV and become the draft nodes."""
        assert self.num_pending == 0, "draft nodes without the tokens before them"
        nodes = np.asarray([*path, *behind])
        moved = np.flatnonzero(nodes != np.arange(len(nodes)))
        if len(moved):
            own = self._slots[self.length :]
            kv.move(own[nodes[moved]], own[moved])
        index = {node: place for place, node in enumerate(behind)} | {path[-1]: -1}
        self._tree_tokens = self._tree_tokens[behind]
        self._tree_parents = np.asarray([index[node] for node in self._tree_parents[behind].tolist()], dtype=np.int32)
        self.num_computed += len(path)
        self.extend(token_ids)

    def cut_tree(self, count: int) -> None:
        """Drop draft nodes beyond the first `count`, and blocks that only they used."""
        self._tree_tokens, self._tree_parents = self._tree_tokens[:count], self._tree_parents[:count]
        kept = -(-(self.length + count) // self._pool.block_size)
        if kept < len(self.blocks):
            self._pool.release(self.blocks[kept:])
            del self.blocks[kept:]
            self._map_slots()

    def reserve(self, count: int) -> bool:
        """Allocate blocks for `count` logical slots. Returns False and takes nothing if there are not enough."""
        needed = -(-count // self._pool.block_size) - len(self.blocks)
        if needed > 0:
            taken = self._pool.allocate(needed, self.blocks[-1] if self.blocks else -1)
            if taken is None:
                return False
            self.blocks.extend(taken)
            self._map_slots()
        return True

    def _map_slots(self) -> None:
        size = self._pool.block_size
        starts = np.asarray(self.blocks, dtype=np.int64)[:, None] * size
        self._slots = (starts + np.arange(size)).reshape(-1)

    def computed(self, count: int, tree_tokens: np.ndarray, tree_parents: np.ndarray) -> None:
        """Record that a forward has computed `count` further known tokens and the nodes of a tree after them."""
        self.num_computed += count
        self._tree_tokens, self._tree_parents = tree_tokens, tree_parents

    def publish(self) -> None:
        """Share full blocks of computed, committed tokens with other sequences."""
        size = self._pool.block_size
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
