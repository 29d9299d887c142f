"""Drafts what the grammar of a constrained answer forces, and what the target has chosen before where it left a choice.

Forced tokens are always right (compare ToolSpec, arXiv 2604.13519). Elsewhere the set of allowed tokens tells where in
the structure an answer is: behind a key, between two members, inside a number. So what the target has drawn from a
set, after the same token, is what it is likely to draw again: its way of spacing, the order of optional keys, the
usual values.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters._options import Floor
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.grammar.matcher import FORCED, GrammarMatcher, Place
from actors.messages import GenerationRequest
from cache_service.store.fair_share import first_to_give_way

_EXPECTED = 0.8  # probability of the token that spells forced bytes, before any were drawn there
_PRIOR = 0.5  # draws that were something else, before any were seen
_BRANCHES = 2  # tokens proposed where there is a choice
_FLOOR = 0.05
_MOST_CHOICES = 1 << 11  # of a namespace; those not seen for the longest time are dropped
_MOST_NAMESPACES = 64
_MOST_DRAWN = 8  # distinct tokens remembered of a choice

_Drawn = dict[int, int]  # how often each token was drawn


@dataclass(slots=True)
class _Tree:
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, confidence: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(confidence)
        return len(self.tokens) - 1


class GrammarDrafter(CpuDrafter):
    """Needs `DraftContext.grammar`. Choices are learnt within a namespace."""

    name = "grammar"

    def __init__(self, *, floor: Floor = _FLOOR) -> None:
        """floor: lowest confidence of a node."""
        self._floor = floor
        self._choices: OrderedDict[str, OrderedDict[Place, _Drawn]] = OrderedDict()  # by namespace

    def may_draft_for(self, request: GenerationRequest) -> bool:
        return bool(request.grammar)

    def drop_namespace(self, namespace: str) -> None:
        self._choices.pop(namespace, None)

    def memory_bytes(self) -> int:
        return 1024 * sum(map(len, self._choices.values()))

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if context.grammar is None or context.max_nodes < 1:
            return DraftTree.empty()
        for place, token in context.grammar.take_choices():
            self._count(context.namespace, place, token)
        choices = self._choices.get(context.namespace, OrderedDict())
        output = context.tokens[context.num_prompt_tokens :]
        last = int(output[-1]) if len(output) else -1
        tree = _Tree()
        self._grow(tree, context.grammar.copy(), last, choices, context.max_nodes)
        if not tree.tokens:
            return DraftTree.empty()
        return DraftTree(
            np.array(tree.tokens, np.int32), np.array(tree.parents, np.int32), np.array(tree.confidence, np.float32)
        )

    def _count(self, namespace: str, place: Place, token: int) -> None:
        choices = self._choices.setdefault(namespace, OrderedDict())
        self._choices.move_to_end(namespace)
        if len(self._choices) > _MOST_NAMESPACES:
            del self._choices[first_to_give_way(list(self._choices))]
        for known in (place, place._replace(before=-1)):
            drawn = choices.setdefault(known, {})
            choices.move_to_end(known)
            drawn[token] = drawn.get(token, 0) + 1
            if len(drawn) > _MOST_DRAWN:
                del drawn[min(drawn, key=lambda other: (drawn[other], other == token))]
        while len(choices) > _MOST_CHOICES:
            choices.popitem(last=False)

    def _grow(
        self, tree: _Tree, matcher: GrammarMatcher, last: int, choices: OrderedDict[Place, _Drawn], room: int
    ) -> None:
        """The likeliest continuation, with alternatives where there was a choice."""
        parent, sure = -1, 1.0
        while len(tree.tokens) < room and matcher.has_time:
            forced = matcher.forced_tokens()[: room - len(tree.tokens)]
            for last in forced:
                sure *= FORCED
                parent = tree.add(last, parent, sure)
            if forced:
                matcher.follow(forced)
                continue
            if matcher.is_complete:
                return
            likely = _likely(choices, Place(last, matcher.hash_of_allowed()))
            if not likely and (expected := matcher.expected_token()) is not None:
                likely = [(expected, _EXPECTED)]
            added = [
                tree.add(token, parent, sure * share)
                for token, share in likely[: room - len(tree.tokens)]
                if sure * share >= self._floor
            ]
            if not added:
                return
            parent, sure = added[0], tree.confidence[added[0]]
            last = tree.tokens[parent]
            if not matcher.follow([last]):
                return


def _likely(choices: OrderedDict[Place, _Drawn], place: Place) -> list[tuple[int, float]]:
    """Tokens that were drawn there, with their probabilities, likeliest first. What was drawn after other tokens counts
    where this one is new."""
    for known in (place, place._replace(before=-1)):
        drawn = choices.get(known)
        if drawn:
            total = sum(drawn.values()) + _PRIOR
            ranked = sorted(drawn.items(), key=lambda item: -item[1])[:_BRANCHES]
            return [(token, count / total) for token, count in ranked]
    return []
