"""Lookahead decoding on the draft model: the drafter `ouroboros`.

A forward computes one tree after the draft so far: the pool's phrases for its last token, and the lookahead window. The
model's own draws are followed through the tree, so that a forward gives several tokens. In the end the newest phrases
after the last token are appended without a forward (Ouroboros, Zhao et al. 2024, arXiv:2402.13720). The pool learns
from the window, from committed tokens, and from the target's predictions after rejected draft tokens.

Draws are those of the draft engine, `argmax(process(q) + G)`, so that this works at any temperature. Under `acceptance:
rejection` G is left out: the tokens and the number of forwards then follow from texts alone, as a tree's must. With G
they would know the noise of tokens to come. It decides those tokens in a round without a drawn chain, and does not in a
round with one, so late drafts would select among them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch

from actors.draft_model.growing_tree import GrowingTree
from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth, pays
from actors.drafters.contract import Drafter
from actors.drafters.registry import OUROBOROS
from actors.engine.batch import SequenceRows, pack
from actors.engine.model_runner import ModelRunner
from actors.engine.sequence import Sequence
from actors.lookahead.phrase_pool import Phrase, PhrasePool
from actors.lookahead.shares import SharesByNamespace, initial_shares, share_after
from actors.lookahead.token_trie import ROOT, TokenTrie
from actors.lookahead.window import LookaheadWindow
from actors.options import LookaheadOptions
from actors.sampling.sampler import likeliest_tokens, rows_for

_FIRST_YIELD, _YIELD_WEIGHT = 2.0, 0.05  # tokens of a forward before any was made, and weight of a new forward
_YIELD_FORWARDS = 4.0  # forwards of a draft that the namespace's yield counts as
_POWER_RATE, _LEAST_POWER, _MOST_POWER = 0.2, 0.01, 32.0  # of `_Learnt.power`: weight of a token's error, and limits


@dataclass(slots=True)
class _Learnt:
    """What the drafts of a namespace have shown."""

    suffix_shares: list[float]  # acceptance of the suffixes' tokens, by depth
    forward_yield: float = _FIRST_YIELD  # tokens that a forward adds to a chain
    power: float = 1.0  # a token of a chain that the draft model gives the share s is right with probability s^power

    def judge(self, surprise: float, is_right: bool) -> None:
        """Learn from a token of a chain whose tokens before were right. surprise: -log of its share, nats.

        A stochastic step in log(power); it rests where such tokens are right as often as s^power promises, over all
        kinds of sampling.
        """
        error = math.exp(-surprise * self.power) - is_right
        self.power = min(max(self.power * math.exp(_POWER_RATE * error), _LEAST_POWER), _MOST_POWER)


@dataclass(slots=True)
class _State:
    """State of a sequence between drafts."""

    scope: Hashable  # key of its phrases in the pool
    window: LookaheadWindow
    learnt: _Learnt  # shared by its namespace
    chain: list[int] = field(default_factory=list)  # the last draft that was sent, without its suffixes
    surprises: list[float] = field(default_factory=list)  # -log of the share that the draft model gave each token
    suffixes: TokenTrie = field(default_factory=TokenTrie)


@dataclass(slots=True)
class OuroborosDraft:
    """A draft in progress."""

    sequence: Sequence
    max_nodes: int  # in the resulting tree; 0: no draft is wanted
    num_wanted: int  # tokens after which no further forward is made
    min_confidence: float = 0.0  # nor after a chain that is less likely
    chain: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # probability of each, given those before it, by `_Learnt.power`
    surprises: list[float] = field(default_factory=list)  # as of `_State`
    worth: np.ndarray = field(default_factory=no_worth)  # of one forward; equal for all forwards
    num_forwards: int = 0
    num_computed: int = 0  # first tokens of the chain that have KV
    given: dict[int, list[Phrase]] = field(default_factory=dict)  # phrases by the token they follow, for this draft
    confidence: float = 1.0  # of the whole chain
    is_ready = False  # never drafted ahead

    @property
    def is_done(self) -> bool:
        return len(self.chain) >= self.num_wanted or self.confidence < self.min_confidence

    def next_confidences(self, usual_yield: float) -> tuple[np.ndarray, np.ndarray]:
        """What the next forward extends if it yields as many tokens as the forwards so far and those before
        (usual_yield, tokens a forward), as likely as the ones so far: confidences of the chain before each of these
        tokens, and how much of a token each brings, 1 but for the last; float64 [n], n >= 1. The chain is not empty."""
        length, forwards = len(self.chain), self.num_forwards
        num_tokens = max(1.0, (length + _YIELD_FORWARDS * usual_yield) / (forwards + _YIELD_FORWARDS))
        places = np.arange(math.ceil(num_tokens))
        return self.confidence ** (1.0 + places / length), np.minimum(1.0, num_tokens - places)


@dataclass(slots=True)
class _Step:
    """One forward of a draft, and the walk through its tree."""

    draft: OuroborosDraft
    last_token: int  # parent of phrases and window
    trie: TokenTrie
    node: int  # reached by the model's draws so far; at first the node of the last token
    rows: dict[int, int]  # rows of logits, by node
    ends: list[int]  # nodes at which the window's columns end; empty if it has no room
    path: list[int] = field(default_factory=list)  # nodes followed
    num_drawn: int = 0  # tokens added to the chain
    is_walking: bool = True


class OuroborosDrafter(Drafter[OuroborosDraft]):
    """Holds the pool of a draft worker and the windows of its sequences. The engine holds the sequences."""

    name = OUROBOROS

    def __init__(
        self, runner: ModelRunner, options: LookaheadOptions, max_positions: int, vocab_map: torch.Tensor | None
    ) -> None:
        """max_positions: limit of the model; vocab_map: see DraftEngine."""
        self._runner = runner
        self._options = options
        self._max_positions = max_positions
        self._vocab_map = vocab_map
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()
        self._num_scopes = 0
        self.drop_all_namespaces()

    @property
    def most_nodes(self) -> int:
        """Limit of the nodes of a forward, without the draft's nodes."""
        options = self._options
        window = LookaheadWindow.most_nodes(options.window_size, options.lookahead_level)
        return window + options.num_guesses * options.phrase_length

    def observe_tokens(self, sequence: Sequence, num_new: int, corrections: Sequences[list[int]] = ()) -> None:
        """Learn from a sequence's last `num_new` committed tokens, its prompt at first, and from `corrections`, the
        target's predictions after rejected draft tokens."""
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = self._new_state(sequence)
        for text in corrections:
            self.pool.insert_runs(state.scope, text)
        self.pool.insert_text(state.scope, sequence.tokens, num_new)
        if state.chain and num_new:
            self._judge(state, sequence.tokens[-num_new:].tolist())
            state.chain = []

    def drop_namespace(self, namespace: str) -> None:
        """Drop a namespace's phrases and what its drafts have shown. Phrases of a single request end with
        it."""
        self.pool.drop_scope(namespace)
        self._learnt.drop_namespace(namespace)

    def drop_all_namespaces(self) -> None:
        options = self._options
        self.pool = PhrasePool(options.phrase_length, options.guess_set_size, options.pool_phrases)
        self._learnt = SharesByNamespace(lambda: _Learnt(initial_shares(options.phrase_length)))

    def _new_state(self, sequence: Sequence) -> _State:
        begin, options = sequence.begin, self._options
        scope: Hashable = begin.namespace
        if not options.keep_phrases:
            self._num_scopes += 1
            scope = self._num_scopes
        prompt = sequence.tokens[: max(1, begin.num_prompt_tokens)]
        window = LookaheadWindow(options.window_size, options.lookahead_level, prompt, begin.sampling.seed)
        return _State(scope, window, self._learnt.of(begin.namespace))

    def _judge(self, state: _State, committed: list[int]) -> None:
        """Update what chains' tokens promise, and the acceptance shares of suffixes by depth."""
        learnt = state.learnt
        for token, guess, surprise in zip(committed, state.chain, state.surprises, strict=False):
            learnt.judge(surprise, token == guess)
            if token != guess:
                return
        if len(committed) < len(state.chain):
            return
        node, shares = ROOT, learnt.suffix_shares
        for depth, token in enumerate(committed[len(state.chain) :]):
            children = state.suffixes.children(node)
            for guess in children:
                shares[depth] = share_after(shares[depth], guess == token)
            if token not in children:
                break
            node = children[token]

    def start(
        self,
        sequence: Sequence,
        max_nodes: int,
        num_wanted: int,
        runs: list[list[int]] | None = None,
        min_confidence: float = 0.0,
        worth: np.ndarray | None = None,
    ) -> OuroborosDraft:
        """A draft with blocks for its forwards, or an empty one if there is no room. runs: texts that may follow,
        beginning with the last token; they fill in for missing phrases and are not stored. min_confidence: chains below
        it are not extended; worth: of a forward, as in `draft_worth.pays`; None: all forwards pay."""
        most = min(num_wanted, max_nodes) + self.most_nodes
        if not max_nodes or not sequence.reserve(sequence.length + most):
            return OuroborosDraft(sequence, 0, 0)
        draft = OuroborosDraft(sequence, max_nodes, min(num_wanted, max_nodes), min_confidence)
        if worth is not None:
            draft.worth = worth
        for run in runs or ():
            for place, token in enumerate(run[:-1], 1):
                phrases = draft.given.setdefault(token, [])
                phrase = tuple(run[place : place + self._options.phrase_length])
                if phrase not in phrases:
                    phrases.append(phrase)
        return draft

    def _phrases(self, draft: OuroborosDraft, token: int, count: int) -> list[Phrase]:
        """Up to `count` phrases after a token: the pool's, newest first, then the given ones."""
        found = self.pool.newest(self._states[draft.sequence].scope, token, count)
        if len(found) < count:
            found += [phrase for phrase in draft.given.get(token, ()) if phrase not in found]
        return found[:count]

    def propose(self, asked: Sequences[OuroborosDraft]) -> list[DraftTree]:
        """Draft all chains, one forward for all of them at a time until one does not pay, and append their suffixes."""
        while steps := [step for draft in asked if (step := self._next_step(draft)) is not None]:
            logits = self._forward(steps)
            while walking := [step for step in steps if step.is_walking]:
                self._walk(walking, logits)
            for step in steps:
                learnt = self._states[step.draft.sequence].learnt
                learnt.forward_yield += _YIELD_WEIGHT * (step.num_drawn - learnt.forward_yield)
            going = [draft for draft in asked if draft.chain and self._has_room(draft)]
            if going and not self._is_paid(going):
                for draft in going:
                    draft.num_wanted = len(draft.chain)
            for step in steps:
                self._keep(step)
                self._advance_window(step, logits)
        return [self._finished(draft) for draft in asked]

    def _is_paid(self, going: list[OuroborosDraft]) -> bool:
        """Whether one forward more, of all these drafts, pays."""
        found = [draft.next_confidences(self._states[draft.sequence].learnt.forward_yield) for draft in going]
        return pays(going[0].worth, *map(np.concatenate, zip(*found, strict=True)))

    def _has_room(self, draft: OuroborosDraft) -> bool:
        """Whether it may go on: it is not done, and there is a position behind its chain."""
        return not draft.is_done and draft.sequence.length + len(draft.chain) <= self._max_positions

    def _next_step(self, draft: OuroborosDraft) -> _Step | None:
        if not self._has_room(draft):
            return None
        room = self._max_positions - draft.sequence.length - len(draft.chain)  # positions left after the chain
        state = self._states[draft.sequence]
        trie = TokenTrie()
        end = trie.add(ROOT, draft.chain)[-1] if draft.chain else ROOT
        last_token = draft.chain[-1] if draft.chain else int(draft.sequence.tokens[-1])
        wanted = {end}
        for phrase in self._phrases(draft, last_token, self._options.num_guesses):
            wanted.update(trie.add(end, phrase[:room]))
        ends = state.window.add_to(trie, end) if state.window.depth <= room else []
        return _Step(
            draft=draft,
            last_token=last_token,
            trie=trie,
            node=end,
            rows=dict.fromkeys(sorted({*wanted, *ends}), 0),
            ends=ends,
        )

    def _forward(self, steps: list[_Step]) -> torch.Tensor:
        """Compute the steps' trees and all pending tokens. Returns logits [rows, outputs] of the nodes in `rows`."""
        parts: list[SequenceRows] = []
        logit_rows: list[int] = []
        first_row = 0
        for step in steps:
            draft, (tokens, parents) = step.draft, step.trie.arrays()
            part = SequenceRows(
                sequence=draft.sequence,
                count=draft.sequence.num_pending,
                tree_tokens=tokens,
                tree_parents=parents,
                first_node=draft.num_computed,
            )
            first_node = first_row + part.count - part.first_node
            for node in step.rows:
                step.rows[node] = len(logit_rows)
                logit_rows.append(first_node + node)  # ROOT (-1) is the last token before the nodes
            parts.append(part)
            first_row += part.num_rows
        logits = self._runner.forward(pack(parts), np.asarray(logit_rows, dtype=np.int64))
        for part, step in zip(parts, steps, strict=True):
            part.sequence.computed(part.count, part.tree_tokens, part.tree_parents)
            step.draft.num_computed = len(step.draft.chain)
            step.draft.num_forwards += 1
        return logits

    def _walk(self, steps: list[_Step], logits: torch.Tensor) -> None:
        """Draw the next token of each draft, and follow it if its node has been computed."""
        positions = np.asarray([step.draft.sequence.length + len(step.draft.chain) for step in steps])
        paths = [np.asarray(step.draft.chain, dtype=np.int32) for step in steps]
        sampling = rows_for([step.draft.sequence.sampling for step in steps], np.arange(len(steps)), positions, paths)
        is_certain = [step.draft.sequence.is_rejection for step in steps]
        if any(is_certain):
            sampling = sampling.without_noise(np.array(is_certain))
        rows = [step.rows[step.node] for step in steps]
        tokens, shares = likeliest_tokens(logits[rows], sampling, 1, self._vocab_map)
        for step, token, share in zip(steps, tokens[:, 0].tolist(), shares[:, 0].tolist(), strict=True):
            draft = step.draft
            step.is_walking = False
            if not share > 0.0:  # all tokens are masked, or the logits are NaN
                draft.num_wanted = len(draft.chain)
                continue
            surprise = -math.log(min(share, 1.0))
            likely = math.exp(-surprise * self._states[draft.sequence].learnt.power)
            draft.chain.append(token)
            step.num_drawn += 1
            draft.surprises.append(surprise)
            draft.shares.append(likely)
            draft.confidence *= likely
            node = step.trie.children(step.node).get(token)
            if node in step.rows and len(draft.chain) < draft.max_nodes:
                step.node = node
                step.path.append(node)
                step.is_walking = True

    def _keep(self, step: _Step) -> None:
        """Move the KV of the followed nodes to the chain's slots, if the chain continues."""
        draft, sequence = step.draft, step.draft.sequence
        if not step.path or not self._has_room(draft):
            return  # the sequence keeps the whole last tree, and finds in it what the target accepts
        slots = sequence.slots(sequence.length, sequence.length + len(step.trie))
        first = draft.num_computed
        draft.num_computed += len(step.path)
        self._runner.kv.move(np.stack([slots[step.path], slots[first : draft.num_computed]]))

    def _advance_window(self, step: _Step, logits: torch.Tensor) -> None:
        if not step.ends:
            return
        state = self._states[step.draft.sequence]
        columns = logits[[step.rows[node] for node in step.ends]].argmax(dim=-1)
        behind = columns if self._vocab_map is None else self._vocab_map[columns]
        for token, phrase in state.window.advance(step.last_token, behind.tolist()):
            self.pool.insert(state.scope, token, phrase)

    def _finished(self, draft: OuroborosDraft) -> DraftTree:
        """The likeliest max_nodes nodes of the chain and its suffixes."""
        state = self._states[draft.sequence]
        chain = draft.chain[: draft.max_nodes]
        tree = GrowingTree(draft.max_nodes, draft.max_nodes, 1)
        for index, (token, share) in enumerate(zip(chain, draft.shares, strict=False)):
            tree.add(index - 1, token, share)
        suffixes = TokenTrie()
        if chain:
            for phrase in self._phrases(draft, chain[-1], self._options.num_suffixes):
                suffixes.add(ROOT, phrase)
        depths: list[int] = []
        for token, parent in zip(suffixes.tokens, suffixes.parents, strict=True):
            depths.append(0 if parent == ROOT else depths[parent] + 1)
            tree.add(len(chain) + parent, token, state.learnt.suffix_shares[depths[-1]])
        state.chain, state.surprises, state.suffixes = chain, draft.surprises, suffixes
        return tree.finished()
