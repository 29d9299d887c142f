"""What a round sent ahead becomes (`pick`), against a slow reference that writes out every text of a tree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.messages import (
    AheadItem,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    Verdict,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    decode_message,
    encode_message,
)
from actors.round_ahead import foresee, guesses_of, is_carried_out, pick

NUM_TOKENS = 4  # so few that texts meet


@st.composite
def trees(draw, most_nodes=14):
    """Siblings differ and probabilities never rise from parent to child, as in merged trees."""
    tokens, parents, confidence = [], [], []
    for node in range(draw(st.integers(0, most_nodes))):
        parent = draw(st.integers(-1, node - 1))
        used = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        free = sorted(set(range(NUM_TOKENS)) - used)
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
        before = confidence[parent] if parent >= 0 else 1.0
        confidence.append(np.float32(before) * np.float32(draw(st.sampled_from([0.0, 0.125, 0.5, 0.5, 1.0]))))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))


def texts_of(tree):
    """The text that each node ends."""
    texts = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        texts.append(((*texts[parent],) if parent >= 0 else ()) + (token,))
    return texts


def foreseen(tree, token_ids, max_nodes, least_confidence):
    """(text of the root or None, {text behind it: probability behind it}), by trying every node."""
    texts = texts_of(tree)
    emitted = tuple(token_ids)
    if emitted not in texts:
        return None, {}
    root = texts.index(emitted)
    sure = float(tree.confidence[root])
    behind = []
    for node, text in enumerate(texts):
        if len(text) > len(emitted) and text[: len(emitted)] == emitted:
            probability = float(tree.confidence[node])
            if probability >= least_confidence * sure:
                behind.append((-probability, node))
    kept = sorted(behind)[:max_nodes]
    return emitted, {texts[node][len(emitted) :]: min(1.0, -minus / max(sure, 1e-9)) for minus, node in kept}


bounds = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])


@given(trees(), st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=4), st.integers(0, 8), bounds)
def test_the_nodes_are_those_that_a_search_over_all_texts_finds(tree, token_ids, max_nodes, least_confidence):
    ahead = VerifyAhead(8, 7, [AheadItem(1, tree, max_nodes)], least_confidence=least_confidence)
    found = foresee(guesses_of(ahead.items), np.array(token_ids, np.int32), np.array([0, len(token_ids)]), ahead)
    text, behind = foreseen(tree, token_ids, max_nodes, least_confidence)
    assert (texts_of(tree)[found.roots[0]] if found.roots[0] >= 0 else None) == text
    draft = DraftTree(found.tokens, found.parents, found.confidence)
    assert dict(zip(texts_of(draft), draft.confidence.tolist(), strict=True)) == behind
    assert draft.is_valid(NUM_TOKENS)
    assert found.offsets.tolist() == [0, len(found.nodes)]
    assert np.all(np.diff(found.nodes) > 0)


@st.composite
def rounds(draw):
    """A round, its result, and the next one as it was sent ahead, over some of the same sequences."""
    items, verdicts, ahead_items = [], [], []
    for seq_id in range(draw(st.integers(1, 4))):
        tree = draw(trees(5))
        start, token_ids = draw(st.integers(0, 9)), np.zeros(draw(st.integers(1, 3)), np.int32)
        items.append(VerifyItem(SequenceDelta(seq_id, start, token_ids), 1, tree if len(tree) else None))
        path = []
        while children := [node for node in range(len(tree)) if tree.parents[node] == (path[-1] if path else -1)]:
            if draw(st.booleans()):
                break
            path.append(draw(st.sampled_from(children)))
        if draw(st.integers(0, 5)):
            path = draw(st.sampled_from([path] * 5 + [[99], [-1]]))
            next_token = draw(st.integers(-1, NUM_TOKENS - 1))
            verdicts.append(Verdict(seq_id, start, 1, next_token, np.array(path, np.int32)))
        if draw(st.integers(0, 5)):
            guess = draw(st.none() | trees())
            gain = draw(st.sampled_from([0.0, 0.5, 2.0]))
            ahead_items.append(AheadItem(seq_id, guess, draw(st.integers(0, 6)), gain))
    finished = draw(st.lists(st.integers(0, 5), max_size=2, unique=True))
    after = draw(st.sampled_from([7, 7, 7, 7, 6]))
    most_lost = draw(st.sampled_from([0.0, 0.5, 9.0]))
    ahead = VerifyAhead(8, after, ahead_items, finished, 3, draw(bounds), most_lost, draw(bounds))
    return ahead, VerifyBatch(7, items), VerifyResult(7, verdicts)


def reference(ahead, batch, result):
    """{sequence: (start, token ids, draft)}, or None."""
    if ahead.after != 7:
        return None
    taken, lost = {}, 0.0
    for item in ahead.items:
        of_batch = [other for other in batch.items if other.delta.seq_id == item.seq_id]
        of_result = [verdict for verdict in result.verdicts if verdict.seq_id == item.seq_id]
        if not of_batch or not of_result or item.seq_id in ahead.finished or of_result[0].next_token < 0:
            continue
        path, tree = of_result[0].path.tolist(), of_batch[0].tree
        if any(not 0 <= node < len(tree) for node in path):
            continue
        token_ids = [int(tree.token_ids[node]) for node in path] + [of_result[0].next_token]
        guess = DraftTree.empty() if item.tree is None else item.tree
        draft = foreseen(guess, token_ids, item.max_nodes, ahead.least_confidence)[1]
        lost += max(0.0, item.gain - min(len(draft), ahead.trust * sum(draft.values())))
        taken[item.seq_id] = of_batch[0].delta.start + len(of_batch[0].delta.token_ids), token_ids, draft
    return taken if taken and lost <= ahead.most_lost else None


@given(rounds())
def test_a_round_is_carried_out_or_declined_as_a_slow_reference_says(sent):
    ahead, batch, result = sent
    picked, expected = pick(ahead, batch, result), reference(ahead, batch, result)
    assert is_carried_out(ahead, picked) == (expected is not None)
    if expected is None:
        return
    assert (picked.batch.round_id, picked.batch.finished, picked.batch.num_successors) == (8, ahead.finished, 3)
    assert {
        item.delta.seq_id: (
            item.delta.start,
            item.delta.token_ids.tolist(),
            dict(zip(texts_of(item.tree), item.tree.confidence.tolist(), strict=True)),
        )
        for item in picked.batch.items
    } == expected
    assert all((item.max_rows, item.begin) == (1, None) for item in picked.batch.items)


@given(rounds())
def test_both_ends_of_a_link_pick_the_same(sent):
    """The worker has the router's messages off the wire, the router has the worker's result off the wire."""
    ahead, batch, result = sent
    at_worker = pick(over_wire(ahead), over_wire(batch), result)
    at_router = pick(ahead, batch, over_wire(result))
    assert (at_worker is None) == (at_router is None)
    if at_worker is not None:
        assert encode_message(at_worker.batch) == encode_message(at_router.batch)


def over_wire(message):
    return decode_message(encode_message(message))


def item_of(seq_id: int, length: int, tree: DraftTree) -> VerifyItem:
    delta = SequenceDelta(seq_id, length - 1, np.zeros(1, np.int32))
    return VerifyItem(delta, 1, tree, SequenceStart(SamplingParams(0), 3))


def chain(*tokens: int) -> DraftTree:
    return DraftTree.chain(np.array(tokens, np.int32), np.full(len(tokens), 0.9, np.float32))


def ahead_of(tree: DraftTree | None, **changes) -> VerifyAhead:
    items = [AheadItem(1, tree, max_nodes=8, gain=changes.pop("gain", 0.0))]
    return VerifyAhead(8, changes.pop("after", 7), items, **changes)


def test_the_batch_goes_on_after_the_emitted_tokens():
    batch = VerifyBatch(7, [item_of(1, 10, chain(5, 6))])
    verdict = Verdict(seq_id=1, num_computed=10, rows=3, next_token=9, path=np.array([0], np.int32))
    result = VerifyResult(7, [verdict])
    picked = pick(ahead_of(chain(5, 9, 4, 3), finished=[2], num_successors=3), batch, result)
    item = picked.batch.items[0]
    assert (picked.batch.round_id, picked.batch.finished, picked.batch.num_successors) == (8, [2], 3)
    assert (item.delta.seq_id, item.delta.start, item.delta.token_ids.tolist()) == (1, 10, [5, 9])
    assert item.tree.token_ids.tolist() == [4, 3]
    # Not foreseen: no draft.
    assert pick(ahead_of(chain(5, 8)), batch, result).batch.items[0].draft is None
    assert pick(ahead_of(None), batch, result).batch.items[0].draft is None


def test_rounds_are_declined_where_they_do_not_follow_or_would_lose_too_much():
    batch = VerifyBatch(7, [item_of(1, 10, chain(5))])
    verdict = Verdict(seq_id=1, num_computed=10, rows=2, next_token=9, path=np.zeros(0, np.int32))
    result = VerifyResult(7, [verdict])
    assert pick(ahead_of(chain(9, 4)), batch, result) is not None
    assert pick(ahead_of(chain(9, 4), after=6), batch, result) is None
    assert pick(ahead_of(chain(9, 4), finished=[1]), batch, result) is None
    assert pick(ahead_of(chain(8, 4), gain=2.0), batch, result).lost == 2.0
    assert pick(ahead_of(chain(9, 4), gain=2.0, trust=0.5), batch, result).lost == 1.5
    for most_lost in (1.9, 2.0):
        ahead = ahead_of(chain(8, 4), gain=2.0, most_lost=most_lost)
        assert is_carried_out(ahead, pick(ahead, batch, result)) == (most_lost == 2.0)
    unfinished = Verdict(seq_id=1, num_computed=4, rows=2, next_token=-1, path=np.zeros(0, np.int32))
    assert pick(ahead_of(chain(9, 4)), batch, VerifyResult(7, [unfinished])) is None
    wrong = Verdict(seq_id=1, num_computed=10, rows=2, next_token=9, path=np.array([3], np.int32))
    assert pick(ahead_of(chain(9, 4)), batch, VerifyResult(7, [wrong])) is None
