"""Where an answer is in its grammar."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from actors.draft_tree import DraftTree
from actors.grammar.forced import forced_tokens
from actors.grammar.limits import MASK_S_PER_ROUND, MOST_AHEAD_S, MOST_MASK_S_AHEAD
from actors.messages import FREE_ROW, TokenMasks

FORCED = 0.999  # probability of a forced token; the target draws no other
_MOST_CHOICES = 256  # of an answer that wait for somebody to learn from them
_SHARED_LIMIT = "lexer error"  # what llguidance says where the lexer, which copies share, has come to a limit

_Path = tuple[int, ...]  # tokens behind the committed ones
_Allowed = int | bytes  # the only token that may follow, or a mask: bit t % 8 of byte t // 8 is token t


class TreeMasks(NamedTuple):
    """Masks of the rows of a draft tree."""

    masks: TokenMasks
    num_unmasked: int  # last nodes whose rows are free because there is no mask; all: not even the root's row has one


class Place(NamedTuple):
    """Where an answer is, as far as that says what follows."""

    before: int  # the answer's last token; -1: none
    allowed: int  # as of `GrammarMatcher.hash_of_allowed`


@dataclass(slots=True)
class _Looked:
    """What is known behind the committed tokens, by a matcher and its copies."""

    known: dict[_Path, _Allowed] = field(default_factory=dict)
    scout: LLMatcher | None = None  # a copy that walks through drafts; None: not needed yet, or it has failed
    scout_at: _Path = ()  # where it stands
    # Processor time for what lies ahead. Masks are charged; all else takes a small part of their time.
    left_s: float = field(default_factory=lambda: MOST_AHEAD_S)
    here_s: float = 0.0  # of processor time, for the mask behind the committed tokens

    def charge(self, started_s: float, path: _Path) -> None:
        """started_s: `time.thread_time()` before some work behind the path."""
        taken_s = time.thread_time() - started_s
        self.left_s -= taken_s
        if not path:
            self.here_s += taken_s


class GrammarMatcher:
    """Follows the committed tokens of one answer. All else leaves it where it was.

    Masks are a function of grammar and tokens, so every process that follows the same tokens gets the same masks. If a
    grammar becomes too complex, no token continues the answer.

    Masks are slow to compute. They are cached for all paths that were asked for until more tokens are committed, so a
    round does not recompute what a drafter has asked for. Masks behind draft tokens are limited to `MOST_AHEAD_S` of
    computing time: a grammar with slow masks has short drafts. If the masks behind committed tokens take more than
    `MASK_S_PER_ROUND` for long, no token continues the answer, because other answers would wait for them.

    Copies of a compiled grammar share its lexer, whose number of states is limited. If other answers or drafts have
    used up the states, the answer continues with a separate lexer and no longer looks ahead.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: LLTokenizer,
        vocab_size: int,
        ends: frozenset[int],
        compile_again: Callable[[], LLMatcher | None] | None = None,
    ) -> None:
        """matcher: a copy that only this object uses. vocab_size: columns of the target's logits. ends: end-of-sequence
        tokens. compile_again: called at most once; returns a matcher that shares no lexer, or None if that fails. None:
        never compiled again."""
        self._matcher = matcher
        self._compile_again = compile_again
        self._is_alone = False  # it shares no lexer
        self._followed: list[int] = []
        self._ends = ends
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._is_broken = False  # a mask could not be computed
        self._left_s = MOST_MASK_S_AHEAD  # of processor time for the masks and ways of committed tokens
        self._looked = _Looked()
        self._ahead: _Path | None = None  # tokens that a copy has followed; None: it is no copy
        self._last = -1  # the last committed token
        self._choices: deque[tuple[Place, int]] = deque(maxlen=_MOST_CHOICES)

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens continue the answer. If not, the matcher is of no further use."""
        if self._ahead is None:
            self._note_choices(token_ids)
            self._left_s = min(MOST_MASK_S_AHEAD, self._left_s + MASK_S_PER_ROUND - self._looked.here_s)
            self._looked = _Looked(left_s=0.0) if self._is_alone else _Looked()
        else:
            self._ahead += tuple(token_ids)
        is_resumed = not self._followed  # then the tokens may be many, which another router has delivered
        self._followed += token_ids
        if self._is_broken or self._left_s < 0:
            return False
        started_s = time.thread_time()
        is_followed = self._matcher.consume_tokens(list(token_ids))
        self._left_s -= 0.0 if is_resumed else time.thread_time() - started_s
        return is_followed or self._goes_on_alone(self._matcher.get_error())

    def _goes_on_alone(self, error: str) -> bool:
        """Whether what failed with this error works with a lexer that nobody shares; then the matcher has one."""
        if _SHARED_LIMIT not in error or self._compile_again is None:
            return False
        matcher, self._compile_again = self._compile_again(), None
        if matcher is None or not matcher.consume_tokens(self._followed):
            return False
        self._matcher, self._looked, self._is_alone = matcher, _Looked(left_s=0.0), True
        return True

    def _note_choices(self, token_ids: Sequence[int]) -> None:
        path: _Path = ()
        known = self._looked.known  # nothing, if these are an answer's many tokens that another router has delivered
        for token in token_ids if known else token_ids[-1:]:
            allowed = known.get(path)
            if isinstance(allowed, bytes):
                self._choices.append((Place(self._last, zlib.crc32(allowed)), token))
            path, self._last = (*path, token), token

    def take_choices(self) -> list[tuple[Place, int]]:
        """The tokens that were followed since this was called last, with their places, where the grammar left a choice.
        Only the last ones, and only those whose masks were computed."""
        choices = list(self._choices)
        self._choices.clear()
        return choices

    @property
    def has_time(self) -> bool:
        """Whether it is not too late to look at what may follow drafts."""
        return self._looked.left_s > 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-sequence token may follow; also after `follow` has said no."""
        return self._matcher.is_stopped()

    def forced_tokens(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        looked, path = self._looked, self._ahead or ()
        if self._matcher.is_stopped() or isinstance(looked.known.get(path), bytes):
            return []
        forced = forced_tokens(self._matcher, self._tokens)
        _note_forced(looked.known, path, forced)
        return forced

    def expected_token(self) -> int | None:
        """The token with which a tokenizer spells the next bytes, where the grammar leaves no choice of bytes, but of
        tokens."""
        spelled = b"" if self._matcher.is_stopped() else self._matcher.compute_ff_bytes()
        if not spelled:
            return None
        token = self._tokens.tokenize_bytes(spelled)[0]
        return None if self._tokens.is_special_token(token) else token

    def copy(self) -> GrammarMatcher:
        """One that goes ahead of the committed tokens."""
        copy = GrammarMatcher(self._matcher.deep_copy(), self._tokens, self._vocab_size, self._ends)
        copy._looked, copy._ahead = self._looked, self._ahead or ()
        return copy

    def hash_of_allowed(self) -> int:
        """Hash of the set of tokens that may follow; the same in every process."""
        return zlib.crc32(self._mask_here())

    def allowed_tokens(self) -> np.ndarray:
        """All tokens that may follow, int64, ascending."""
        bits = np.frombuffer(self._mask_here(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].nonzero()[0]

    def _mask_here(self) -> bytes:
        looked, path = self._looked, self._ahead or ()
        known = looked.known.get(path)
        if isinstance(known, bytes):
            return known
        if forced := self.forced_tokens():
            return _mask_of_one(forced[0], self._vocab_size)
        started_s = time.thread_time()
        mask = _mask(self._matcher, self._vocab_size)
        looked.charge(started_s, path)
        if known is None and not self._matcher.is_error():
            looked.known[path] = mask
        return mask

    def fitted(self, tree: DraftTree, most_added: int = 0) -> DraftTree:
        """The tree without nodes that the grammar does not allow, and without what follows them. Behind the others come
        up to so many nodes more: what the grammar forces there, which is as likely as the node before."""
        if not len(tree):
            return tree
        most_added = 0 if tree.required is not None else most_added
        scout = self._scout()
        paths = dict(scout.walk(tree))
        allowed = [node for node in range(len(tree)) if node in paths]
        fitted = tree if len(allowed) == len(tree) else _only(tree, allowed)
        if not most_added:
            return fitted
        with_children = set(fitted.parents.tolist())
        forced = {
            place: tokens
            for place, node in enumerate(allowed)
            if place not in with_children and (tokens := scout.forced(paths[node], most_added))
        }
        return _extended(fitted, forced, most_added) if forced else fitted

    def masks(self, tree: DraftTree) -> TreeMasks:
        """What may follow the last committed token and each node. Rows after a node that the grammar does not allow are
        free: no answer reaches them. From the first node on behind which a mask is too complex, or comes too late,
        there are none."""
        index = np.full(len(tree) + 1, FREE_ROW, np.int32)
        places: dict[bytes, int] = {}  # of distinct masks
        scout = self._scout()
        first_unmasked = None
        for node, path in scout.walk(tree):
            allowed = scout.allowed(path)
            if allowed is None:
                if node < 0 and self._goes_on_alone(scout.error):
                    return self.masks(tree)
                first_unmasked = max(0, node)
                self._is_broken |= node < 0
                break
            index[node + 1] = _index_of(allowed, places)
        else:
            first_unmasked = scout.stopped_at
        num_unmasked = 0 if first_unmasked is None else len(tree) - first_unmasked
        return TreeMasks(TokenMasks(np.frombuffer(b"".join(places), np.int32), index), num_unmasked)

    def masks_behind(self, paths: Sequence[_Path | None]) -> TokenMasks:
        """What may follow each of these paths of tokens behind the committed ones. Rows are free for None, for paths
        that the grammar does not allow, and where a mask is too complex or comes too late."""
        index = np.full(len(paths), FREE_ROW, np.int32)
        places: dict[bytes, int] = {}
        scout = self._scout()
        for row, path in enumerate(paths):
            allowed = scout.allowed(path) if path is not None and scout.reaches(path) else None
            if allowed is not None:
                index[row] = _index_of(allowed, places)
        return TokenMasks(np.frombuffer(b"".join(places), np.int32), index)

    def _scout(self) -> _Scout:
        return _Scout(self._matcher, self._tokens, self._vocab_size, self._ends, self._looked, self._ahead or ())


class _Scout:
    """Looks at what may follow paths from where a matcher stands. It goes there itself only for what is not known."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: LLTokenizer,
        vocab_size: int,
        ends: frozenset[int],
        looked: _Looked,
        start: _Path,
    ) -> None:
        self.stopped_at: int | None = None  # the node with which a walk has ended, since no more could be computed
        self._origin = matcher
        self._tokens = tokens
        self._ends = ends
        self._vocab_size = vocab_size
        self._looked = looked
        self._start = start
        self.error = ""  # why something could not be computed

    def walk(self, tree: DraftTree) -> Iterator[tuple[int, _Path]]:
        """Node -1, which is where the matcher stands, and each node that the grammar allows, with the path to it.
        Parents come first. See `stopped_at`."""
        paths = {-1: self._start}
        yield -1, self._start
        nodes = zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)
        for node, (token, parent) in enumerate(nodes):
            before = paths.get(parent)
            if before is None:
                continue
            allows = self._allows(before, token)
            if allows is None:
                self.stopped_at = node
                return
            if allows:
                paths[node] = (*before, token)
                yield node, paths[node]

    def reaches(self, path: _Path) -> bool:
        """Whether a path is allowed, and known to be."""
        return all(self._allows(path[:place], token) for place, token in enumerate(path))

    def allowed(self, path: _Path) -> _Allowed | None:
        """What may follow a path that is allowed. None: it is too complex to compute, or there is no time left; behind
        the committed tokens there always is."""
        looked = self._looked
        known = looked.known.get(path)
        if known is not None or self.error or (path and looked.left_s <= 0):
            return known
        started_s = time.thread_time()
        matcher = self._stand(path)
        forced = forced_tokens(matcher, self._tokens)
        mask = b"" if forced else _mask(matcher, self._vocab_size)
        looked.charge(started_s, path)
        if forced:
            _note_forced(looked.known, path, forced)
            return forced[0]
        if self._note_failure():
            return None
        looked.known[path] = mask
        return mask

    def forced(self, path: _Path, most: int) -> list[int]:
        """Up to so many tokens that are forced behind a path that is allowed."""
        looked = self._looked
        tokens: list[int] = []
        while len(tokens) < most:
            here = (*path, *tokens)
            known = looked.known.get(here)
            if isinstance(known, bytes) or (known is None and (self.error or looked.left_s <= 0)):
                break
            if known is None:
                found = forced_tokens(self._stand(here), self._tokens)
                self._note_failure()
                _note_forced(looked.known, here, found)
                return (tokens + found)[:most]
            tokens.append(known)
        return tokens

    def _allows(self, path: _Path, token: int) -> bool | None:
        """None: it cannot be computed."""
        looked = self._looked
        # A mask allows the end of a sequence also where llguidance does not follow it: where nothing else may follow.
        known = None if token in self._ends else looked.known.get(path)
        if isinstance(known, int):
            return known == token
        if known is not None:
            return token >> 3 < len(known) and bool(known[token >> 3] >> (token & 7) & 1)
        if self.error or looked.left_s <= 0:
            return None
        is_allowed = self._stand(path).try_consume_tokens([token]) == 1
        if self._note_failure():
            return None
        if is_allowed:
            looked.scout_at = (*path, token)
        return is_allowed

    def _note_failure(self) -> bool:
        """Whether something was too complex for the copy, which is dropped then: a draft's fault is not the answer's,
        and not the next draft's."""
        if self._looked.scout is not None and self._looked.scout.is_error():
            self.error = self._looked.scout.get_error() or "it is too complex"
            self._looked.scout = None
        return bool(self.error)

    def _stand(self, path: _Path) -> LLMatcher:
        """The copy, behind a path that is allowed."""
        looked = self._looked
        if looked.scout is None:
            looked.scout, looked.scout_at = self._origin.deep_copy(), self._start
        common = 0
        for ours, theirs in zip(looked.scout_at, path, strict=False):
            if ours != theirs:
                break
            common += 1
        if len(looked.scout_at) > common:
            looked.scout.rollback(len(looked.scout_at) - common)
        if len(path) > common:
            looked.scout.try_consume_tokens(list(path[common:]))
        looked.scout_at = path
        return looked.scout


def _index_of(allowed: _Allowed, places: dict[bytes, int]) -> int:
    """As in `TokenMasks.index`. places: of distinct masks, to which this one is added."""
    return -1 - allowed if isinstance(allowed, int) else places.setdefault(allowed, len(places))


def _note_forced(known: dict[_Path, _Allowed], path: _Path, forced: Sequence[int]) -> None:
    for count, token in enumerate(forced):
        known[(*path, *forced[:count])] = token


def _mask(matcher: LLMatcher, vocab_size: int) -> bytes:
    words = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return words.tobytes()


def _mask_of_one(token: int, vocab_size: int) -> bytes:
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    words[token // 32] = 1 << token % 32
    return words.tobytes()


def _only(tree: DraftTree, allowed: Sequence[int]) -> DraftTree:
    """The tree of these nodes, ascending, with their parents."""
    place = np.full(len(tree) + 1, -1, np.int32)  # the last one is the root's: -1
    place[allowed] = np.arange(len(allowed))
    return DraftTree(
        tree.token_ids[allowed],
        place[tree.parents[allowed]],
        tree.confidence[allowed],
        required=None if tree.required is None else tree.required[allowed],
    )


def _extended(tree: DraftTree, forced: dict[int, list[int]], most: int) -> DraftTree:
    """The tree with up to so many nodes more: chains of tokens behind nodes without children, the likeliest first."""
    likely = tree.confidence.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    for node in sorted(forced, key=lambda one: -likely[one]):
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
