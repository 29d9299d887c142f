"""A worker's copy of one sequence: its tokens, its KV blocks, and the draft nodes computed last."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numba import carray, njit

from actors.engine.block_pool import BlockPool, block_hash, root_hash
from actors.engine.kv_cache import KvCache
from actors.messages import SequenceStart
from actors.records import address_of, pointer
from actors.sampling.sequence_sampling import SequenceSampling

# What compiled functions read and write of a sequence
SEQUENCE = np.dtype(
    [
        ("length", "<i8"),  # known tokens
        ("num_computed", "<i8"),
        ("num_blocks", "<i8"),
        ("num_nodes", "<i8"),  # draft nodes computed last
        ("num_published", "<i8"),  # leading blocks that are full, computed and published
        ("block_size", "<i8"),
        ("sampling", "<i8"),  # address of a record of SAMPLING
        # Addresses of int32 arrays, and the elements that each has
        ("tokens", "<i8"),
        ("token_room", "<i8"),
        ("blocks", "<i8"),
        ("block_room", "<i8"),
        ("tree_tokens", "<i8"),
        ("tree_parents", "<i8"),
        ("tree_room", "<i8"),
    ]
)
_FIELDS = list(SEQUENCE.names or ())
_LENGTH, _COMPUTED, _BLOCKS, _NODES, _PUBLISHED = map(
    _FIELDS.index, ["length", "num_computed", "num_blocks", "num_nodes", "num_published"]
)


@njit(cache=True, nogil=True)
def sequence_at(address):  # type: ignore[no-untyped-def]
    """The record, as an array of one, and its arrays: tokens, blocks, and the tokens and parents of draft nodes."""
    one = carray(pointer(address), 1, SEQUENCE)
    record = one[0]
    return (
        one,
        carray(pointer(record.tokens), record.token_room, np.int32),
        carray(pointer(record.blocks), record.block_room, np.int32),
        carray(pointer(record.tree_tokens), record.tree_room, np.int32),
        carray(pointer(record.tree_parents), record.tree_room, np.int32),
    )


class Sequence:
    """The first `num_computed` of `length` known tokens have valid KV, at logical slots 0 .. num_computed - 1.

    Draft nodes of the last round are after the known tokens: node i at logical slot length + i. All of it is in arrays
    that compiled functions read and write for many sequences at once, by the `address` of a record of `SEQUENCE`.
    """

    shares_prefixes: ClassVar[bool] = True  # whether new ones may begin with cached blocks

    def __init__(self, seq_id: int, begin: SequenceStart, pool: BlockPool) -> None:
        self.seq_id = seq_id
        self.begin = begin
        self.sampling = SequenceSampling(begin.sampling, begin.num_prompt_tokens)
        # Drafts are draws from a distribution that is sent along, or follow from texts alone.
        self.is_rejection = begin.sampling.acceptance == "rejection"
        self.block_size = pool.block_size
        self.num_cached = 0
        self._pool = pool
        self._hashes = [
            root_hash(begin.namespace)
        ]  # hash n is that of the first n blocks, as far as they are published
        self._record = np.zeros(1, SEQUENCE)
        self.address = address_of(self._record)
        self._numbers = self._record.view(np.int64)
        self._tokens = np.empty(256, np.int32)
        self._block_table = np.empty(16, np.int32)
        self._tree = np.empty((2, 16), np.int32)  # tokens and parents
        self._register()

    def _register(self) -> None:
        """Tell the record where the arrays are."""
        record = self._record[0]
        record["block_size"], record["sampling"] = self.block_size, self.sampling.address
        record["tokens"], record["token_room"] = address_of(self._tokens), len(self._tokens)
        record["blocks"], record["block_room"] = address_of(self._block_table), len(self._block_table)
        record["tree_tokens"], record["tree_parents"] = address_of(self._tree[0]), address_of(self._tree[1])
        record["tree_room"] = self._tree.shape[1]

    @property
    def length(self) -> int:
        return self._numbers.item(_LENGTH)

    @property
    def num_computed(self) -> int:
        return self._numbers.item(_COMPUTED)

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self._numbers[_COMPUTED] = count

    @property
    def num_pending(self) -> int:
        """Known tokens without KV."""
        return self.length - self.num_computed

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens, int32 [length]; a view."""
        return self._tokens[: self.length]

    @property
    def num_blocks(self) -> int:
        return self._numbers.item(_BLOCKS)

    @property
    def blocks(self) -> np.ndarray:
        """The blocks, int32 [n]; a view."""
        return self._block_table[: self.num_blocks]

    @property
    def tree_tokens(self) -> np.ndarray:
        """Tokens of the draft nodes computed last, int32 [n]; a view."""
        return self._tree[0, : self._numbers.item(_NODES)]

    @property
    def tree_parents(self) -> np.ndarray:
        """int32 [n]; a view."""
        return self._tree[1, : self._numbers.item(_NODES)]

    def slots(self, begin: int, end: int) -> np.ndarray:
        """Physical slots of the logical ones begin .. end - 1, int64."""
        size = self.block_size
        first = begin // size
        starts = self._block_table[first : -(-end // size)].astype(np.int64) * size
        return (starts[:, None] + np.arange(size)).reshape(-1)[begin - first * size : end - first * size]

    def make_room(self, num_tokens: int, num_nodes: int = 0) -> None:
        """Let so many further known tokens and so many draft nodes be stored."""
        needed = self.length + num_tokens
        if needed > len(self._tokens):
            self._tokens = _grown(self._tokens, max(needed, 2 * len(self._tokens)))
            self._register()
        if num_nodes > self._tree.shape[1]:
            self._tree = _grown(self._tree, max(num_nodes, 2 * self._tree.shape[1]))
            self._register()
        if self.sampling.uses_history:
            self.sampling.make_room(num_tokens)

    def extend(self, token_ids: np.ndarray) -> None:
        """Append known tokens, int [n]."""
        length = self.length
        end = length + len(token_ids)
        if end > len(self._tokens):
            self.make_room(len(token_ids))
        self._tokens[length:end] = token_ids
        self._numbers[_LENGTH] = end
        self.sampling.extend(token_ids)

    def reuse_prefix(self) -> None:
        """Use cached blocks with the beginning of a new sequence. The last token is always computed, for its logits."""
        self._begin_with(*self._pool.find_prefix(self.begin.namespace, self.tokens[: self.length - 1]))

    def _begin_with(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Have cached blocks as the first ones."""
        self._add_blocks(blocks)
        self._hashes += hashes
        self._numbers[_PUBLISHED] = len(hashes)
        self.num_computed = self.num_cached = len(blocks) * self.block_size

    def follow(self, token_ids: np.ndarray, path: list[int], behind: list[int], kv: KvCache) -> None:
        """Append committed tokens, int32 [n], which are the draft nodes `path`. The nodes `behind` the last of them,
        ascending, keep their KV and become the draft nodes."""
        assert self.num_pending == 0, "draft nodes without the tokens before them"
        nodes = np.asarray([*path, *behind])
        moved = np.flatnonzero(nodes != np.arange(len(nodes)))
        if len(moved):
            own = self.slots(self.length, self.length + len(self.tree_tokens))
            kv.move(np.stack([own[nodes[moved]], own[moved]]))
        index = {node: place for place, node in enumerate(behind)} | {path[-1]: -1}
        tokens, parents = self.tree_tokens[behind], self.tree_parents[behind].tolist()
        self._set_tree(tokens, np.asarray([index[node] for node in parents], dtype=np.int32))
        self.num_computed += len(path)
        self.extend(token_ids)

    def cut_tree(self, count: int) -> None:
        """Drop draft nodes beyond the first `count`, and blocks that only they used."""
        self._numbers[_NODES] = min(count, self._numbers.item(_NODES))
        kept = -(-(self.length + count) // self.block_size)
        if kept < self.num_blocks:
            self._pool.release(self.blocks[kept:].tolist())
            self._numbers[_BLOCKS] = kept

    def reserve(self, count: int) -> bool:
        """Allocate blocks for `count` logical slots. Returns False and takes nothing if there are not enough."""
        held = self.num_blocks
        needed = -(-count // self.block_size) - held
        if needed > 0:
            taken = self._pool.allocate(needed, int(self._block_table[held - 1]) if held else -1)
            if taken is None:
                return False
            self._add_blocks(taken)
        return True

    def reserve_most(self, count: int) -> None:
        """Allocate blocks for `count` logical slots, or as many as there are."""
        if not self.reserve(count):
            self.reserve((self.num_blocks + self._pool.num_free) * self.block_size)

    def _add_blocks(self, blocks: list[int]) -> None:
        held = self.num_blocks
        end = held + len(blocks)
        if end > len(self._block_table):
            self._block_table = _grown(self._block_table, 2 * end)
            self._register()
        self._block_table[held:end] = blocks
        self._numbers[_BLOCKS] = end

    def computed(self, count: int, tree_tokens: np.ndarray, tree_parents: np.ndarray) -> None:
        """Record that a forward has computed `count` further known tokens and the nodes of a tree after them."""
        self.num_computed += count
        self._set_tree(tree_tokens, tree_parents)

    def _set_tree(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        count = len(tokens)
        if count > self._tree.shape[1]:
            self.make_room(0, count)
        self._tree[0, :count], self._tree[1, :count] = tokens, parents
        self._numbers[_NODES] = count

    def publish(self) -> None:
        """Share full blocks of computed, committed tokens with other sequences."""
        size, tokens = self.block_size, self._tokens
        first, end = self._numbers.item(_PUBLISHED), self.num_computed // self.block_size
        for index in range(first, end):
            self._hashes.append(block_hash(self._hashes[-1], tokens[index * size : (index + 1) * size]))
            self._pool.publish(int(self._block_table[index]), self._hashes[-1])
        self._numbers[_PUBLISHED] = max(first, end)

    def free(self) -> None:
        self._pool.release(self.blocks.tolist())
        self.drop()

    def drop(self) -> None:
        """Have no blocks any more, without releasing them: the pool is cleared."""
        self._numbers[[_BLOCKS, _PUBLISHED, _COMPUTED]] = 0
        del self._hashes[1:]


def _grown(array: np.ndarray, room: int) -> np.ndarray:
    """With further elements in the last dimension."""
    grown = np.empty((*array.shape[:-1], room), array.dtype)
    grown[..., : array.shape[-1]] = array
    return grown
