"""The soft n-gram table against a model of dictionaries, its bounds, its bytes, and the drafter that learns with it."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters.contract import MAX_CONTEXT, CpuDrafter, DraftContext, Outcome, VerifiedRows
from actors.drafters.registry import create_drafter, create_drafters
from actors.drafters.soft_ngram import SoftNgramDrafter
from actors.errors import InvalidRequest
from actors.messages import SamplingParams
from cache_service.counts import soft_ngram
from cache_service.counts.soft_ngram import (
    _EVICTED,
    _HESITATION,
    _WINDOW,
    MAX_ORDER,
    MAX_SUCCESSORS,
    MIN_BYTES,
    Entries,
    SoftNgramTable,
    at_most,
    decode_entries,
    encode_entries,
)
from cache_service.counts.soft_ngram import _UNIT as UNIT

ROOMY = 512 * MIN_BYTES
SAMPLING = SamplingParams(seed=1)

Row = tuple[list[int], list[tuple[int, float]]]  # a context, oldest token first; its successors


class Model:
    """What the table promises while nothing is evicted, in dictionaries."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.contexts: dict[tuple[int, ...], tuple[int, dict[int, int]]] = {}

    def learn(self, context: list[int], successors: list[tuple[int, float]], units: int = UNIT) -> None:
        left, masses = units, []
        for token, prob in successors:
            masses.append((token, min(int(np.float32(prob) * units + 0.5), left)))
            left -= masses[-1][1]
        for length in range(min(self.order, len(context)) + 1):
            key = tuple(context[len(context) - length :])
            was_known = key in self.contexts
            count, named = self.contexts.get(key, (0, {}))
            keep = int(_WINDOW[length]) * UNIT - units
            if count > keep:
                named = {token: mass * keep // count for token, mass in named.items() if mass * keep >= count}
                count = keep
            for token, mass in masses:
                if token in named:
                    named[token] += mass
                elif mass and len(named) < MAX_SUCCESSORS:
                    named[token] = mass
                elif mass:
                    least = min(named, key=lambda held: (named[held], -held))
                    if (mass, -token) > (named[least], -least):
                        del named[least]
                        named[token] = mass
            self.contexts[key] = count + units, named
            if not was_known and length:
                break

    def predict(self, tokens: list[int]) -> dict[int, float]:
        chances: dict[int, float] = {}
        left = 1.0
        for length in range(min(self.order, len(tokens)), -1, -1):
            count, named = self.contexts.get(tuple(tokens[len(tokens) - length :]), (0, {}))
            if count:
                share = left / (count + float(_HESITATION[length]) * UNIT)
                left -= share * count
                for token, mass in named.items():
                    chances[token] = chances.get(token, 0.0) + share * mass
        return chances

    def most_probable(self, tokens: list[int], max_nodes: int, floor: float) -> list[float]:
        """Path probabilities of the best tree, best first."""
        candidates, best = [(1.0, tokens)], []
        while candidates and len(best) < max_nodes + 1:
            chance, path = max(candidates, key=lambda candidate: candidate[0])
            candidates.remove((chance, path))
            best.append(chance)
            for token, prob in self.predict(path).items():
                if chance * prob >= floor:
                    candidates.append((chance * prob, [*path, token]))
        return best[1:]


def rows_in(namespace: str, *rows: Row, width: int = MAX_SUCCESSORS, may_share: bool = False) -> VerifiedRows:
    contexts = np.full((len(rows), MAX_CONTEXT), -1, np.int32)
    token_ids = np.zeros((len(rows), width), np.int32)
    probs = np.zeros((len(rows), width), np.float32)
    for i, (context, successors) in enumerate(rows):
        last = context[-MAX_CONTEXT:]
        contexts[i, MAX_CONTEXT - len(last) :] = last
        token_ids[i, : len(successors)] = [token for token, _ in successors]
        probs[i, : len(successors)] = [prob for _, prob in successors]
    return VerifiedRows(namespace, contexts, token_ids, probs, may_share=may_share)


def learn(table: SoftNgramTable, rows: list[Row], weight: float = 1.0) -> None:
    given = rows_in("", *rows)
    table.learn(given.contexts, given.token_ids, given.probs, weight)


def chances(table: SoftNgramTable, tokens: list[int]) -> dict[int, float]:
    """First tokens of a draft."""
    token_ids, parents, confidence = table.draft(np.array(tokens, np.int32), 100)
    return {int(t): float(c) for t, p, c in zip(token_ids, parents, confidence, strict=True) if p < 0}


def contents(table: SoftNgramTable) -> dict[int, tuple[list[int], dict[int, int]]]:
    keys, tokens, masses, use = table.entries()
    return {
        int(keys[i]): (use[i].tolist(), {int(t): int(m) for t, m in zip(tokens[i], masses[i], strict=True) if m})
        for i in range(len(keys))
    }


def delta_of(table: SoftNgramTable) -> Entries:
    delta = table.take_delta()
    assert delta is not None
    return delta.entries()


def assert_sound(table: SoftNgramTable) -> None:
    """Each context is held once, in the bucket that its hash names, and another table would take it."""
    slots = np.flatnonzero(table._keys)
    keys = table._keys[slots].tolist()
    assert len(slots) == len(set(keys)) == len(table)
    assert [(key >> 32) * (table.num_slots // 8) >> 32 for key in keys] == (slots // 8).tolist()
    decode_entries(encode_entries(table.order, table.entries()), table.order)


def random_rows(rng: np.random.Generator, count: int, vocab: int, width: int = MAX_SUCCESSORS) -> list[Row]:
    rows = []
    for _ in range(count):
        probs = np.sort(rng.dirichlet(np.full(width, 0.4)))[::-1]
        successors = zip(rng.permutation(vocab)[:width].tolist(), probs.tolist(), strict=True)
        rows.append((rng.integers(0, vocab, MAX_CONTEXT).tolist(), list(successors)))
    return rows


@st.composite
def rows_of(draw: st.DrawFn, vocab: int) -> Row:
    context = draw(st.lists(st.integers(0, 2), max_size=MAX_CONTEXT))
    token_ids = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=MAX_SUCCESSORS, unique=True))
    parts = draw(st.lists(st.integers(0, 9), min_size=len(token_ids), max_size=len(token_ids)))
    total = max(sum(parts), 1) * draw(st.sampled_from([1.0, 1.3]))
    return context, [(t, part / total) for t, part in zip(token_ids, sorted(parts, reverse=True), strict=True)]


@given(st.integers(1, MAX_ORDER), st.sampled_from([4, 14]), st.data())
@settings(max_examples=150)
def test_drafts_are_the_best_trees_of_the_mixture(order: int, vocab: int, data: st.DataObject) -> None:
    table, model = SoftNgramTable(ROOMY, order), Model(order)
    for rows in data.draw(st.lists(st.lists(rows_of(vocab), max_size=6), max_size=6)):
        learn(table, rows)
        for context, successors in rows:
            model.learn(context, successors)
    tokens = data.draw(st.lists(st.integers(0, 3), max_size=6))
    max_nodes, floor = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([0.0003, 0.05, 0.3]))
    token_ids, parents, confidence = table.draft(np.array(tokens, np.int32), max_nodes, floor)

    assert DraftTree(token_ids, parents, confidence).is_valid(vocab)
    np.testing.assert_allclose(confidence, model.most_probable(tokens, max_nodes, floor), rtol=1e-4)
    paths: list[list[int]] = []
    for token, parent, chance in zip(token_ids.tolist(), parents.tolist(), confidence.tolist(), strict=True):
        before = paths[parent] if parent >= 0 else tokens
        above = confidence[parent] if parent >= 0 else 1.0
        assert chance == pytest.approx(above * model.predict(before)[token], rel=1e-4)
        paths.append([*before, token])
    assert len(table) == len(model.contexts)
    assert_sound(table)


def test_masses_of_faded_contexts_are_those_of_the_model() -> None:
    rng = np.random.default_rng(0)
    table, model = SoftNgramTable(ROOMY, 2), Model(2)
    for context, successors in random_rows(rng, 1500, 12):
        short = [context[-1] % 3]
        learn(table, [(short, successors)])
        model.learn(short, successors)
    held = sorted((count, sorted(named.items())) for count, named in model.contexts.values())
    assert sorted((use[0], sorted(named.items())) for use, named in contents(table).values()) == held
    assert_sound(table)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
@settings(max_examples=30)
def test_a_full_table_stays_within_its_bytes_and_whole(seed: int, buckets: int) -> None:
    rng = np.random.default_rng(seed)
    table = SoftNgramTable(buckets * MIN_BYTES)
    size = table.memory_bytes
    for _ in range(10):
        learn(table, random_rows(rng, 40, 30))
        table.credit(rng.integers(0, 30, 9), int(rng.integers(-1, 12)))
        assert_sound(table)
        token_ids, parents, confidence = table.draft(rng.integers(0, 30, 4), 16)
        assert DraftTree(token_ids, parents, confidence).is_valid(30)
    assert table.memory_bytes == size <= buckets * MIN_BYTES + 64
    assert len(table) <= table.num_slots == 8 * buckets
    assert table._counters[_EVICTED] > 0


def test_contexts_whose_drafts_were_accepted_are_the_last_to_make_room() -> None:
    table = SoftNgramTable(MIN_BYTES, 1)
    learn(table, [([token], [(token + 100, 1.0)]) for token in range(7)])
    table.credit(np.array([3, 103]), 1)
    learn(table, [([token], [(token + 100, 1.0)]) for token in range(10, 20)])
    assert chances(table, [3])[103] > 0.4
    assert sum(chances(table, [token]).get(token + 100, 0.0) > 0.4 for token in range(7)) == 1


def test_contexts_that_are_no_longer_of_use_make_room_after_all() -> None:
    table = SoftNgramTable(MIN_BYTES, 1)
    learn(table, [([1], [(101, 1.0)])])
    table.credit(np.array([1, 101]), 1)
    for token in range(10, 100):
        learn(table, [([token], [(token + 100, 1.0)])])
    assert chances(table, [1]).get(101, 0.0) < 0.4


def test_credit_is_for_the_accepted_tokens_alone() -> None:
    table = SoftNgramTable(ROOMY, 1)
    learn(table, [([1], [(2, 1.0)]), ([2], [(3, 1.0)]), ([3], [(4, 1.0)])])
    table.credit(np.array([1, 2, 3, 4]), 2)
    earned = {next(iter(named)): use[1] for use, named in contents(table).values() if len(named) == 1}
    assert earned == {2: 0, 3: 1, 4: 1}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_deltas_in_any_order_make_the_same_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replica = SoftNgramTable(2 * ROOMY, delta_bytes=ROOMY)
    deltas = []
    for _ in range(4):
        learn(replica, random_rows(rng, 2, 5, width=4))  # so few that nothing fades
        deltas.append(delta_of(replica))
    assert replica.take_delta() is None, "nothing since"
    for order in (range(4), rng.permutation(4).tolist()):
        other = SoftNgramTable(ROOMY)
        for index in order:
            other.merge_entries(deltas[index])
        assert contents(other) == contents(replica)
        assert_sound(other)


@pytest.mark.whole
@given(st.integers(0, 2**32 - 1), st.sampled_from([20, 3000]))
@settings(max_examples=20)
def test_two_tables_merge_to_the_same_whichever_takes_the_other(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 2 * count, 12)
    merged = []
    for mine, yours in ((rows[:count], rows[count:]), (rows[count:], rows[:count])):
        table, other = SoftNgramTable(ROOMY, 1), SoftNgramTable(2 * ROOMY, 1, delta_bytes=ROOMY)
        learn(table, mine)
        learn(other, yours)
        table.merge_entries(delta_of(other))
        assert_sound(table)
        merged.append(contents(table))
    assert merged[0] == merged[1]


def test_a_table_that_exports_nothing_has_no_delta() -> None:
    table = SoftNgramTable(ROOMY)
    learn(table, [([1], [(2, 1.0)])])
    assert table.take_delta() is None


def test_ids_beyond_sixteen_bits_survive_deltas() -> None:
    table = SoftNgramTable(2 * ROOMY, 1, delta_bytes=ROOMY)
    # What 16 bits would take for each other: the contexts 134,474 and 3,402, the successors 200,018 and 3,410.
    learn(table, [([134_474], [(200_018, 1.0)]), ([3_402], [(3_410, 1.0)])] * 50)
    merged = SoftNgramTable(ROOMY, 1)
    merged.merge_entries(decode_entries(encode_entries(1, delta_of(table)), 1))
    for one in (table, merged):
        assert chances(one, [134_474])[200_018] > 0.9 > 0.1 > chances(one, [134_474]).get(3_410, 0.0)
        assert chances(one, [3_402])[3_410] > 0.9


def test_a_smaller_table_takes_what_was_of_most_use() -> None:
    table = SoftNgramTable(ROOMY, 1)
    learn(table, [([token], [(token + 100, 1.0)]) for token in range(60)])
    learn(table, [([7], [(107, 1.0)])] * 20)
    small = SoftNgramTable(MIN_BYTES, 1)
    small.merge_entries(table.entries())
    assert len(small) == 8
    assert chances(small, [7])[107] > 0.9
    assert_sound(small)


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_bytes_that_are_no_export_are_refused(data: bytes) -> None:
    for garbage in (data, b"PACENGRM" + data):
        with pytest.raises(ValueError, match=r"^delta: "):
            decode_entries(garbage, 3)


@pytest.mark.parametrize(
    ("key", "tokens", "masses", "use", "fault"),
    [
        (0, [1], [9], (512, 0), "no hash"),
        (7, [-1], [9], (512, 0), "below 0"),
        (7, [1], [0], (0, 0), "never learnt"),
        (7, [1], [513], (512, 0), "more than all"),
        (7, [1, 1], [9, 9], (512, 0), "twice"),
    ],
)
def test_a_whole_export_of_what_no_table_holds_is_refused(key, tokens, masses, use, fault) -> None:
    padding = [0] * (MAX_SUCCESSORS - len(tokens))
    body = struct.pack("<Q8i8H2H", key, *tokens, *padding, *masses, *padding, *use)
    data = struct.pack("<8sIIQI", b"PACENGRM", 1, 3, 1, zlib.crc32(body)) + body
    with pytest.raises(ValueError, match=fault):
        decode_entries(data, 3)


def test_another_version_or_order_is_refused_by_name() -> None:
    data = encode_entries(2, SoftNgramTable(ROOMY, 2).entries())
    with pytest.raises(ValueError, match=r"a part: order is 2; this table's is 3"):
        decode_entries(data, 3, "a part")
    with pytest.raises(ValueError, match="version is 9; this program reads version 1"):
        decode_entries(data.replace(struct.pack("<I", 1), struct.pack("<I", 9), 1), 2)


def test_read_only_strided_and_wide_arrays_are_taken_as_they_are() -> None:
    table = SoftNgramTable(ROOMY)
    contexts = np.array([[1, 0, 2, 0], [1, 0, 2, 0]], np.int64)[:, ::2]
    token_ids, probs = np.array([[5, 6], [5, 6]], np.int64), np.array([[0.7, 0.2], [0.7, 0.2]])
    for array in (contexts, token_ids, probs):
        array.flags.writeable = False
    table.learn(contexts, token_ids, probs)
    assert chances(table, [1, 2]).keys() == {5, 6}
    tokens = np.array([1, 9, 2, 9], np.int64)[::2]
    tokens.flags.writeable = False
    assert table.draft(tokens, 4)[0].tolist()[:2] == [5, 6]
    table.credit(tokens, 1)


def test_probabilities_that_cannot_be_true_never_make_a_sum_above_one() -> None:
    table = SoftNgramTable(ROOMY)
    contexts = np.full((4, MAX_CONTEXT), 3, np.int32)
    token_ids = np.array([[1, 2], [1, 1], [-5, 2], [1, 2]], np.int32)
    probs = np.array([[1.001, 0.9], [0.8, 0.9], [0.5, np.nan], [-1.0, np.inf]], np.float32)
    table.learn(contexts, token_ids, probs)
    found = chances(table, [3, 3, 3])
    assert found.keys() <= {1, 2}
    assert 0.0 < sum(found.values()) <= 1.0
    assert_sound(table)


def test_no_rows_no_tokens_and_no_room_are_nothing() -> None:
    table = SoftNgramTable(ROOMY)
    learn(table, [])
    assert [len(part) for part in table.draft(np.empty(0, np.int32), 8)] == [0, 0, 0]
    learn(table, [([1], [(2, 1.0)])])
    assert [len(part) for part in table.draft(np.array([1]), 0)] == [0, 0, 0]
    assert [len(part) for part in table.draft(np.array([1]), -3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": 511}, "budget_bytes is 511"),
        ({"budget_bytes": 1000, "delta_bytes": 600}, "budget_bytes is 1000; less 600 delta_bytes"),
        ({"budget_bytes": 1000, "delta_bytes": 8}, "delta_bytes is 8"),
        ({"budget_bytes": 1000, "order": 0}, "order is 0"),
        ({"budget_bytes": 1000, "order": 5}, "order is 5"),
    ],
)
def test_sizes_that_make_no_table_are_refused_by_name(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftNgramTable(**options)


def test_rows_whose_shapes_differ_or_whose_weight_is_none_are_refused() -> None:
    table = SoftNgramTable(ROOMY)
    rows = np.zeros((2, 4), np.int32), np.zeros((2, 8), np.int32), np.zeros((2, 8), np.float32)
    for contexts, token_ids, probs in (
        (rows[0][:1], *rows[1:]),
        (rows[0], rows[1][:, :3], rows[2]),
        (rows[0][0], *rows[1:]),
    ):
        with pytest.raises(ValueError, match="they must be"):
            table.learn(contexts, token_ids, probs)
    for weight in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="weight is"):
            table.learn(*rows, weight)
    assert len(table) == 0


def drafts(
    drafter: CpuDrafter, tokens: list[int], namespace: str = "", seq_id: int = 1, max_nodes: int = 16
) -> DraftTree:
    context = DraftContext(seq_id, np.array(tokens, np.int32), 0, len(tokens), max_nodes, SAMPLING, namespace)
    (tree,) = drafter.propose([context])
    return tree


SOFT: Row = ([1, 2], [(3, 0.7), (4, 0.2)])


def test_the_drafter_learns_and_drafts_nothing_before() -> None:
    drafter = create_drafter("soft_ngram")
    assert (drafter.num_successors, len(drafts(drafter, [1, 2]))) == (MAX_SUCCESSORS, 0)
    assert drafter.memory_bytes() == 0
    drafter.remember(rows_in("", SOFT, SOFT))
    tree = drafts(drafter, [9, 1, 2])
    assert tree.token_ids[:2].tolist() == [3, 4]
    assert tree.is_valid(10)
    assert len(drafts(drafter, [9, 1, 2], max_nodes=1)) == 1


def test_no_namespace_drafts_from_another_ones_text() -> None:
    drafter = SoftNgramDrafter()
    drafter.remember(rows_in("a", SOFT))
    drafter.remember(rows_in("b", ([1, 2], [(8, 0.9)])))
    assert set(drafts(drafter, [1, 2], "a").token_ids.tolist()) == {3, 4}
    assert (set(drafts(drafter, [1, 2], "b").token_ids.tolist()), len(drafts(drafter, [1, 2], ""))) == ({8}, 0)


def test_the_namespace_longest_unused_makes_room_and_bytes_are_bounded() -> None:
    drafter = SoftNgramDrafter(budget_bytes=2 * ROOMY, table_bytes=ROOMY)
    drafter.remember(rows_in("a", SOFT))
    drafter.remember(rows_in("b", SOFT))
    assert len(drafts(drafter, [1, 2], "a"))  # now b is the longest unused
    drafter.remember(rows_in("c", SOFT))
    assert (drafter.namespaces, len(drafts(drafter, [1, 2], "b"))) == (["a", "c"], 0)
    assert 0 < drafter.memory_bytes() <= 2 * ROOMY


def test_many_namespaces_in_turn_all_keep_what_they_learnt() -> None:
    drafter = SoftNgramDrafter()
    names = [str(index) for index in range(200)]
    for index, name in enumerate(names):
        drafter.remember(rows_in(name, ([1, 2], [(index, 0.9)])))
    for index, name in enumerate(names):
        assert set(drafts(drafter, [1, 2], name).token_ids.tolist()) == {index}
    assert drafter.memory_bytes() <= 256 << 20


def test_a_namespace_with_much_text_gets_a_larger_table_until_the_budget_is_spent() -> None:
    drafter = SoftNgramDrafter(budget_bytes=4 << 20, table_bytes=4 << 20)
    for name in ("old", "small"):
        drafter.remember(rows_in(name, SOFT))
    sizes = []
    for first in range(0, 60_000, 2000):
        drafter.remember(rows_in("large", *[([first + i], [(first + i + 1, 1.0), (0, 0.1)]) for i in range(2000)]))
        sizes.append(drafter._tables["large"].memory_bytes)
        assert drafter.memory_bytes() <= 4 << 20
    assert sorted(set(sizes)) == [size << 20 for size in (1, 2, 3, 4)]  # 3: from one to two
    assert sizes[-1] == 4 << 20
    assert drafter.namespaces == ["large"]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_table_that_grows_beside_its_work_holds_what_one_does_that_was_large_from_the_start(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(soft_ngram, "_MOVED_AT_ONCE", 64)  # of 1024
    monkeypatch.setattr(soft_ngram, "_MOVED_BY_ROW", 0)
    rng = np.random.default_rng(seed)
    grown, large = (SoftNgramTable(size * MIN_BYTES, 2) for size in (128, 256))
    others = SoftNgramTable(16 * MIN_BYTES, 2)
    steps = 0
    for step in range(40):
        rows = rng.integers(0, 12, (8, 2)), rng.integers(0, 60, (8, 3)), rng.random((8, 3)) / 3
        if step == 10:
            grown.grow()
        if step % 3 == 2:
            others.learn(*rows)
        for table in (grown, large):
            if step % 3 == 2:
                table.merge_entries(others.entries())
            else:
                table.learn(*rows)
            table.credit(np.concatenate([rows[0][0], rows[1][0]]), 1)
        steps += grown.is_growing
        assert (contents(grown), len(grown)) == (contents(large), len(large))
        assert_sound(grown)
        drafted = [[array.tolist() for array in table.draft(np.array([1, 2]), 16)] for table in (grown, large)]
        assert drafted[0] == drafted[1]
    assert steps == 15
    assert (grown.num_slots, grown.memory_bytes) == (large.num_slots, large.memory_bytes)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_table_that_grows_with_any_number_of_rows_holds_what_one_does_that_has_grown_at_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(soft_ngram, "_MOVED_AT_ONCE", 8)  # of 128, and 4 with every row
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 10, (70, 2)), rng.integers(0, 60, (70, 3)), rng.random((70, 3)) / 3
    slow, at_once = (SoftNgramTable(16 * MIN_BYTES, 2) for _ in range(2))
    for table in (slow, at_once):
        for _ in range(3):
            table.learn(*rows)
        assume(not table._counters[_EVICTED])
        table.grow()
    at_once.finish_growth()
    while slow.is_growing:
        some = rng.integers(0, 70, 7)  # all of known contexts
        for table in (slow, at_once):
            table.learn(*(array[some] for array in rows))
    assert (contents(slow), len(slow)) == (contents(at_once), len(at_once))
    assert_sound(slow)


@pytest.mark.parametrize(("merged_rows", "first"), [(1.0, 7), (32.0, 3)])
def test_what_others_are_sure_of_is_soon_outweighed_by_what_is_learnt_here(merged_rows: float, first: int) -> None:
    liar = SoftNgramDrafter(delta_bytes=MIN_BYTES * 64)
    one = SoftNgramDrafter(merged_rows=merged_rows)
    liar.remember(rows_in("", *[([1, 2], [(3, 0.95)])] * 8, may_share=True))
    one.merge_entries("", delta_of(liar.table_of("")))
    assert drafts(one, [1, 2]).token_ids[0] == 3
    for _ in range(2):
        one.remember(rows_in("", ([1, 2], [(7, 0.95)])))
    assert drafts(one, [1, 2]).token_ids[0] == first


@given(st.floats(0.001, 32.0), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_contexts_of_few_rows_stay_as_they_are_and_others_keep_their_shares(num_rows: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = SoftNgramTable(64 * MIN_BYTES, 2)
    table.learn(rng.integers(0, 9, (200, 2)), rng.integers(0, 60, (200, 3)), rng.random((200, 3)) / 3)
    whole = table.entries()
    part = at_most(whole, num_rows)
    most = max(1, round(num_rows * UNIT))
    assert part.use[:, 0].tolist() == np.minimum(whole.use[:, 0].astype(int), most).tolist()
    few = whole.use[:, 0].astype(int) <= most
    assert (part.masses[few] == whole.masses[few]).all()
    shares = part.masses / part.use[:, :1]
    assert (np.abs(shares - whole.masses / whole.use[:, :1]) <= 1 / part.use[:, :1] + 1e-9).all()
    SoftNgramTable(64 * MIN_BYTES, 2).merge_entries(part)


def test_prompt_rows_count_less_than_the_targets_own() -> None:
    told = ([1, 2], [(5, 1.0)])
    chance = {}
    for weight in (0.0, 0.05, 1.0):
        drafter = SoftNgramDrafter(prompt_weight=weight)
        drafter.remember(rows_in("", SOFT))
        drafter.remember(rows_in("", told))
        tree = drafts(drafter, [1, 2])
        chance[weight] = max(
            (float(c) for t, c in zip(tree.token_ids, tree.confidence, strict=True) if t == 5), default=0.0
        )
    assert chance[0.0] == 0.0 < chance[0.05] < chance[1.0] / 3


def test_a_sure_row_of_the_target_beside_others_counts_in_full() -> None:
    drafter = SoftNgramDrafter()
    drafter.remember(rows_in("", ([7], [(5, 1.0)]), SOFT))
    assert drafts(drafter, [7]).confidence[0] > 0.4


def test_accepted_drafts_earn_their_contexts_a_place() -> None:
    drafter = SoftNgramDrafter(budget_bytes=ROOMY)
    drafter.remember(rows_in("", SOFT, ([2, 3], [(6, 0.9)])))

    def earned() -> int:
        return sum(use[1] for use, _ in contents(drafter._table("")).values())

    drafts(drafter, [1, 2], seq_id=4)
    drafter.observe([Outcome(4, 2, 0, np.array([9], np.int32)), Outcome(5, 2, 2, np.array([3, 6, 9], np.int32))])
    assert earned() == 0  # nothing accepted; a sequence never asked about
    drafter.observe([Outcome(4, 2, 2, np.array([3, 6, 9], np.int32))])
    before = earned()
    assert before >= 2
    drafter.forget(4)
    drafter.observe([Outcome(4, 2, 2, np.array([3, 6, 9], np.int32))])
    assert earned() == before


def test_rows_with_more_successors_than_wanted_are_cut() -> None:
    drafter = SoftNgramDrafter(successors=1)
    drafter.remember(rows_in("", SOFT))
    assert drafts(drafter, [1, 2]).token_ids.tolist()[:1] == [3]
    assert 4 not in drafts(drafter, [1, 2]).token_ids


def test_what_may_not_be_shared_is_learnt_and_not_exported() -> None:
    one, other = SoftNgramDrafter(delta_bytes=MIN_BYTES * 64), SoftNgramDrafter()
    one.remember(rows_in("a", SOFT))
    one.remember(rows_in("a", ([5, 6], [(7, 0.9)]), may_share=True))
    other.merge_entries("a", delta_of(one.table_of("a")))
    assert 3 in drafts(one, [1, 2], "a").token_ids
    assert 7 in drafts(other, [5, 6], "a").token_ids
    assert 3 not in drafts(other, [1, 2], "a").token_ids


def test_a_table_that_is_shared_is_not_drafted_from_by_who_reads_no_shared_cache() -> None:
    for delta_bytes in (0, MIN_BYTES * 64):
        one = SoftNgramDrafter(delta_bytes=delta_bytes)
        one.remember(rows_in("", SOFT))
        context = DraftContext(1, np.array([1, 2], np.int32), 0, 1, 4, SamplingParams(seed=0), "", reads_cache=False)
        (tree,) = one.propose([context])
        assert bool(len(tree)) == (delta_bytes == 0)


def test_a_namespace_that_is_dropped_is_forgotten_and_a_merge_is_no_use_of_one() -> None:
    one = SoftNgramDrafter(delta_bytes=MIN_BYTES * 64)
    for namespace in ("a", "b"):
        one.remember(rows_in(namespace, SOFT, may_share=True))
    delta = one.table_of("a").take_delta()
    assert one.table_of("a").take_delta() is None
    one.merge_entries("a", delta.entries())
    assert one.namespaces == ["a", "b"]
    one.drop_namespace("a")
    assert one.table_of("a") is None
    assert not len(drafts(one, [1, 2], "a").token_ids)


def test_what_accepted_drafts_earn_travels_with_the_delta() -> None:
    one, other = SoftNgramDrafter(delta_bytes=MIN_BYTES * 64), SoftNgramDrafter()
    one.remember(rows_in("", SOFT, ([2, 3], [(6, 0.9)]), may_share=True))
    drafts(one, [1, 2], seq_id=4)
    one.observe([Outcome(4, 2, 2, np.array([3, 6, 9], np.int32))])
    other.merge_entries("", delta_of(one.table_of("")))
    assert sum(use[1] for use, _ in contents(other.table_of("")).values()) >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"order": 0}, {"order": 5}, {"successors": 0}, {"successors": 9}, {"table_bytes": 511}, {"budget_bytes": 511},
        {"delta_bytes": -1}, {"floor": 1.5}, {"floor": -0.1}, {"prompt_weight": -0.1},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(InvalidRequest, match=rf"{name} is .*(it must be|takes at least)"):
        create_drafters(["soft_ngram"], options={"soft_ngram": options})
