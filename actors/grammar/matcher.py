"""Where an answer is in its grammar."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from actors.draft_tree import DraftTree
from actors.messages import FREE_ROW, TokenMasks

FORCED = 0.999  # probability of a forced token; the target draws no other


class GrammarMatcher:
    """Follows the committed tokens of one answer. All else leaves it where it was.

    It is a function of grammar and tokens: whoever follows the same tokens gets the same masks. A grammar may become
    too complex to go on; then no token continues the answer.

    A mask takes long to compute, so that those behind the committed tokens are remembered until there are more of them:
    what a drafter has looked at while it drafted, the round need not compute again.
    """

    def __init__(self, matcher: LLMatcher, tokens: LLTokenizer, vocab_size: int) -> None:
        """matcher: a copy of its own. vocab_size: columns of the target's logits."""
        self._matcher = matcher
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._is_broken = False  # a mask could not be computed
        self._known: dict[tuple[int, ...], np.ndarray] = {}  # masks by the tokens behind the committed ones
        self._ahead: tuple[int, ...] | None = None  # tokens that a copy has followed; None: it is no copy

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens continue the answer. If not, the matcher is of no further use."""
        if self._ahead is None:
            self._known = {}
        else:
            self._ahead += tuple(token_ids)
        return not self._is_broken and self._matcher.consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow; also after `follow` has said no."""
        return self._matcher.is_stopped()

    def forced_tokens(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def expected_token(self) -> int | None:
        """The token with which a tokenizer spells the next bytes, where the grammar leaves no choice of bytes, but of
        tokens."""
        spelled = b"" if self._matcher.is_stopped() else self._matcher.compute_ff_bytes()
        return self._tokens.tokenize_bytes(spelled)[0] if spelled else None

    def copy(self) -> GrammarMatcher:
        """One that goes ahead of the committed tokens."""
        copy = GrammarMatcher(self._matcher.deep_copy(), self._tokens, self._vocab_size)
        copy._known, copy._ahead = self._known, self._ahead or ()
        return copy

    def hash_of_allowed(self) -> int:
        """Hash of the set of tokens that may follow; the same in every process."""
        return zlib.crc32(self._allowed_here().tobytes())

    def allowed_tokens(self) -> np.ndarray:
        """All tokens that may follow, int64, ascending."""
        words = self._allowed_here()
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size].nonzero()[0]

    def _allowed_here(self) -> np.ndarray:
        return self._mask_of(self._matcher, self._ahead or ())

    def _mask_of(self, matcher: LLMatcher, behind: tuple[int, ...]) -> np.ndarray:
        """The mask where the matcher stands. int32 [words]."""
        known = self._known.get(behind)
        if known is None:
            known = np.zeros(self._num_words, np.int32)
            matcher.unsafe_compute_mask_ptr(known.ctypes.data, known.nbytes)
            if not matcher.is_error():
                self._known[behind] = known
        return known

    def fitted(self, tree: DraftTree, most_added: int = 0) -> DraftTree:
        """The tree without nodes that the grammar does not allow, and without what follows them. Behind the others come
        up to so many nodes more: what the grammar forces there, which is as likely as the node before."""
        if not len(tree):
            return tree
        most_added = 0 if tree.required is not None else most_added
        allowed: list[int] = []
        forced: dict[int, list[int]] = {}  # by node
        matcher = self._matcher.deep_copy()
        for node in _walk(matcher, tree):
            if node >= 0:
                allowed.append(node)
                if most_added and not matcher.is_stopped() and (tokens := matcher.compute_ff_tokens()):
                    forced[node] = tokens
        pruned = tree if len(allowed) == len(tree) else self._only(tree, sorted(allowed))
        if not forced:
            return pruned
        places = {node: place for place, node in enumerate(sorted(allowed))}
        return _extended(pruned, {places[node]: tokens for node, tokens in forced.items()}, most_added)

    @staticmethod
    def _only(tree: DraftTree, allowed: list[int]) -> DraftTree:
        """The tree of these nodes, ascending, with their parents."""
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
        distinct: list[np.ndarray] = []
        places: dict[bytes, int] = {}
        paths: dict[int, tuple[int, ...]] = {-1: self._ahead or ()}
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        matcher = self._matcher.deep_copy()  # a draft's fault is not the answer's
        for node in _walk(matcher, tree):
            if node >= 0:
                paths[node] = (*paths[parents[node]], tokens[node])
            forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
            if forced:
                index[node + 1] = -1 - forced[0]
                continue
            words = self._mask_of(matcher, paths[node])
            if matcher.is_error():
                if node >= 0:
                    return None
                self._is_broken = True
            place = index[node + 1] = places.setdefault(words.tobytes(), len(distinct))
            if place == len(distinct):
                distinct.append(words)
        return TokenMasks(np.concatenate(distinct) if distinct else np.empty(0, np.int32), index)


def _extended(tree: DraftTree, forced: dict[int, list[int]], most: int) -> DraftTree:
    """The tree with up to so many nodes more: chains of tokens behind nodes, the likeliest first, without what is
    there."""
    with_children = set(tree.parents.tolist())
    likely = tree.confidence.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    for node in sorted(forced.keys() - with_children, key=lambda one: -likely[one]):
        parent = node
        for place, token in enumerate(forced[node][: most - len(tokens)], 1):
            tokens.append(token)
            parents.append(parent)
            confidence.append(likely[node] * FORCED**place)
            parent = len(tree) + len(tokens) - 1
    return DraftTree(
        np.concatenate([tree.token_ids, np.array(tokens, np.int32)]),
        np.concatenate([tree.parents, np.array(parents, np.int32)]),
        np.concatenate([tree.confidence, np.array(confidence, np.float32)]),
    )


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
