"""Where an answer is in its grammar."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from llguidance import LLMatcher

from actors.draft_tree import DraftTree
from actors.messages import FREE_ROW, TokenMasks


class GrammarMatcher:
    """Follows the committed tokens of one answer. All else leaves it where it was.

    It is a function of grammar and tokens: whoever follows the same tokens gets the same masks. A grammar may become
    too complex to go on; then no token continues the answer.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """matcher: a copy of its own. vocab_size: columns of the target's logits."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._is_broken = False  # a mask could not be computed

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens continue the answer. If not, the matcher is of no further use."""
        return not self._is_broken and self._matcher.consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow; also after `follow` has said no."""
        return self._matcher.is_stopped()

    def forced_tokens(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)

    def hash_of_allowed(self) -> int:
        """Hash of the set of tokens that may follow; the same in every process."""
        return zlib.crc32(_mask(self._matcher, self._num_words).tobytes())

    def allowed_tokens(self) -> np.ndarray:
        """All tokens that may follow, int64, ascending."""
        words = _mask(self._matcher, self._num_words)
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size].nonzero()[0]

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without nodes that the grammar does not allow, and without what follows them."""
        if not len(tree):
            return tree
        allowed = sorted(node for node in _walk(self._matcher.deep_copy(), tree) if node >= 0)
        if len(allowed) == len(tree):
            return tree
        place = np.full(len(tree) + 1, -1, np.int32)  # the last one is the root's: -1
        place[allowed] = np.arange(len(allowed))
        return DraftTree(
            tree.token_ids[allowed],
            place[tree.parents[allowed]],
            tree.confidence[allowed],
            required=None if tree.required is None else tree.required[allowed],
        )

    def masks(self, tree: DraftTree) -> TokenMasks | None:
        """What may follow the last committed token and each node. Rows after a node that the grammar does not allow are
        free: no answer reaches them. None: a mask behind a node is too complex; without drafts there may be one."""
        index = np.full(len(tree) + 1, FREE_ROW, np.int32)
        words = np.empty((len(tree) + 1, self._num_words), np.int32)
        places: dict[bytes, int] = {}  # of distinct masks
        matcher = self._matcher.deep_copy()  # a draft's fault is not the answer's
        for node in _walk(matcher, tree):
            forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
            if forced:
                index[node + 1] = -1 - forced[0]
                continue
            count = len(places)
            _write_mask(matcher, words[count])
            if matcher.is_error():
                if node >= 0:
                    return None
                self._is_broken = True
            index[node + 1] = places.setdefault(words[count].tobytes(), count)
        return TokenMasks(words[: len(places)].reshape(-1), index)


def _mask(matcher: LLMatcher, num_words: int) -> np.ndarray:
    words = np.zeros(num_words, np.int32)
    _write_mask(matcher, words)
    return words


def _write_mask(matcher: LLMatcher, words: np.ndarray) -> None:
    """words: int32 [ceil(vocab_size / 32)], filled."""
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def _walk(matcher: LLMatcher, tree: DraftTree) -> Iterator[int]:
    """Stand where the matcher stands (-1), then behind each node that the grammar allows."""
    yield -1
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    tokens = tree.token_ids.tolist()
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent].append(node)  # those of the root are the last
    depth = 0
    waiting = [(node, 0) for node in children[-1]]
    while waiting:
        node, parent_depth = waiting.pop()
        if depth > parent_depth:
            matcher.rollback(depth - parent_depth)
            depth = parent_depth
        if matcher.try_consume_tokens([tokens[node]]):
            depth += 1
            yield node
            waiting.extend((child, depth) for child in children[node])
