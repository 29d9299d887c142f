"""What tests ask of the automata that no drafter needs."""

import numpy as np

from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import SEPARATOR, SuffixAutomaton
from cache_service.automata.tree_options import TreeOptions


def static_of(docs):
    automaton = SuffixAutomaton()
    for doc in docs:
        automaton.extend(np.array([*doc, SEPARATOR], np.int32))
    return StaticAutomaton.freeze(automaton)


def drafted(automaton, cursor, room):
    """The most frequent continuation of the matched string, at most `room` tokens."""
    ids, parents, confidence = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32)
    options = TreeOptions(np.ones(1, np.float32), floor=0.0, width=1)
    size = automaton.grow_tree(cursor, options, token_ids=ids, parents=parents, confidence=confidence, count=0)
    return ids[:size].tolist()


def assert_sound(automaton):
    """Suffix links lead to shorter strings, transitions to longer ones that end with their token, each found once."""
    text, links, clone_links, clone_lengths = automaton.states()

    def lengths(states):
        return np.where(states >= 0, states, np.append(clone_lengths, 0)[~np.minimum(states, -1)])

    assert (lengths(links[1:]) < np.arange(1, len(links))).all()
    assert (lengths(clone_links) < clone_lengths).all()
    sources, tokens, targets = automaton.transitions()
    assert (lengths(targets) > lengths(sources)).all()
    assert len(set(zip(sources.tolist(), tokens.tolist(), strict=True))) == len(sources)
    prefixes = targets > 0
    assert (text[targets[prefixes] - 1] == tokens[prefixes]).all()


def occurrences(automaton, cursor):
    """How often the matched string occurs in the text of a static automaton; 0 for the empty one."""
    if cursor.state >= 0:
        return int(cursor.state > 0)
    return int(automaton.arrays["clones"][~cursor.state, 2])


def continuations(automaton, cursor):
    """Tokens that followed the matched string, and how often, in the order of a static automaton."""
    arrays, state = automaton.arrays, cursor.state
    if state >= 0:
        following = [token for token in arrays["text"][state : state + 1].tolist() if state and token >= 0]
        return following, [1] * len(following)
    edges = arrays["edges"][arrays["clones"][~state, 3] : arrays["clones"][~state + 1, 3]].tolist()
    return [token for token, _ in edges], [arrays["clones"][~to, 2] if to < 0 else 1 for _, to in edges]
