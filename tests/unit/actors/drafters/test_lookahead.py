"""Lookahead on the target against the algorithm written out, with a target that is a function of its last tokens
(`actors.drafters.lookahead`, `actors.lookahead.shares`)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters.contract import MAX_CONTEXT, DraftContext, Outcome, VerifiedRows
from actors.drafters.lookahead import LookaheadDrafter
from actors.drafters.registry import create_drafters
from actors.errors import InvalidRequest
from actors.messages import SamplingParams
from paceline_testing.drafting import Path, paths_of
from paceline_testing.integrity import check_integrity
from paceline_testing.toy_target import ToyTarget, Wheel

VOCAB = 23
SEED = 11
PROMPT = [4, 9, 4, 2, 7, 7, 1]


class Oracle:
    """Fu et al. 2024, algorithm 2, for one sequence: lists of rows, and a list of all phrases, oldest first."""

    def __init__(self, target: ToyTarget, window: int, level: int, guesses: int) -> None:
        self.target, self.level, self.guesses = target, level, guesses
        self.base = np.random.default_rng(SEED).choice(np.array(PROMPT), window + level - 3).tolist()
        self.rows: list[list[int]] = []
        self.phrases: list[tuple[int, Path]] = []
        self.num_read = 0

    def insert(self, key: int, phrase: Path) -> None:
        if (key, phrase) in self.phrases:
            self.phrases.remove((key, phrase))
        rivals = [entry for entry in self.phrases if entry[0] == key]
        if len(rivals) == self.guesses:
            self.phrases.remove(rivals[0])
        self.phrases.append((key, phrase))

    def read(self, text: list[int]) -> None:
        """Phrases that end in tokens which have not been read."""
        length = self.level - 1
        for end in range(max(self.num_read, length) + 1, len(text) + 1):
            if end - length - 1 >= 0:
                self.insert(text[end - length - 1], tuple(text[end - length : end]))
        self.num_read = len(text)

    def columns(self) -> list[Path]:
        """The path to each column's end; that of column 0 is empty until there are rows."""
        return [
            (*self.base[:column], *(row[column] for row in self.rows)) for column in range(len(self.base) + 1)
        ]  # fmt: skip

    def guessed(self, last: int) -> list[Path]:
        return [phrase for key, phrase in reversed(self.phrases) if key == last][: self.guesses]

    def step(self, text: list[int]) -> None:
        said = [self.target.next_token([*text, *path]) for path in self.columns()]
        if len(self.rows) < self.level - 2:
            self.rows = [row[1:] for row in [*self.rows, said]]
            self.base = self.base[1:]
            return
        grid = [*self.rows, said]
        for column, key in enumerate([text[-1], *self.base]):
            self.insert(key, tuple(row[column] for row in grid))
        self.base, self.rows = grid[0][1:], grid[1:]


def prefixes(paths: list[Path]) -> set[Path]:
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


def required_of(tree: DraftTree) -> set[Path]:
    if tree.required is None:
        return set()
    return {path for path, required in zip(paths_of(tree), tree.required.tolist(), strict=True) if required}


def context(seq_id: int, text: list[int], start: int, drafter: LookaheadDrafter, **fields) -> DraftContext:
    fields = {"max_nodes": 200, "max_required": drafter.most_required, "max_depth": 100} | fields
    max_nodes = fields.pop("max_nodes")
    sampling = SamplingParams(seed=SEED)
    return DraftContext(seq_id, np.array(text, np.int32), start, len(PROMPT), max_nodes, sampling, **fields)


def rows_of(target: ToyTarget, asked: list[tuple[int, list[int], DraftTree]], namespace: str = "") -> VerifiedRows:
    """What the router would tell of a round in which all these trees were computed."""
    contexts, said, sequences, parents = [], [], [], []
    for seq_id, text, tree in asked:
        first = len(said)
        for path in [(), *paths_of(tree)]:
            whole = [*text, *path]
            contexts.append(([-1] * MAX_CONTEXT + whole)[-MAX_CONTEXT:])
            said.append(target.next_token(whole))
            sequences.append(seq_id)
        parents += [-1, *(first + 1 + tree.parents).tolist()]
    return VerifiedRows(
        namespace,
        np.array(contexts, np.int32),
        np.array(said, np.int32)[:, None],
        np.ones((len(said), 1), np.float32),
        np.array(sequences),
        np.array(parents, np.int32),
    )


def walk(target: ToyTarget, text: list[int], tree: DraftTree) -> list[int]:
    """Tokens that a round emits."""
    paths, emitted = set(paths_of(tree)), []
    while True:
        emitted.append(target.next_token([*text, *emitted]))
        if tuple(emitted) not in paths:
            return emitted


shapes = st.tuples(st.integers(1, 6), st.integers(2, 5), st.integers(1, 4))


@given(shapes, st.integers(0, 99), st.integers(1, 3))
@settings(max_examples=60)
def test_window_and_phrases_are_those_of_the_written_algorithm_round_after_round(shape, seed, order):
    window, level, guesses = shape
    target = ToyTarget(VOCAB, order=order, seed=seed)
    options = {"window_size": window, "lookahead_level": level, "guess_set_size": guesses}
    drafter, oracle = LookaheadDrafter(**options), Oracle(target, window, level, guesses)
    text, known = list(PROMPT), 0
    for _ in range(25):
        (tree,) = drafter.propose([context(1, text, known, drafter)])
        assert tree.is_valid(VOCAB)
        assert (tree.required & (tree.confidence == 0.0)).sum() + (tree.confidence > 0.0).sum() == len(tree)
        oracle.read(text)
        assert required_of(tree) == prefixes(oracle.columns())
        guessed = {path for path, sure in zip(paths_of(tree), tree.confidence.tolist(), strict=True) if sure > 0.0}
        assert guessed == prefixes(oracle.guessed(text[-1]))
        assert tree.required.sum() <= drafter.most_required
        emitted = walk(target, text, tree)
        drafter.observe([Outcome(1, len(tree), len(emitted) - 1, np.array(emitted, np.int32))])
        drafter.remember(rows_of(target, [(1, text, tree)]))
        oracle.step(text)
        known = len(text)
        text += emitted
        for token in range(VOCAB):
            assert drafter._kept.newest("", token, 99) == oracle.guessed(token)
    check_integrity(drafter._kept)


def rounds_to_write(drafter: LookaheadDrafter, target: ToyTarget, count: int, seq_id: int = 1, **fields) -> int:
    text, known, rounds = list(PROMPT), 0, 0
    while len(text) < len(PROMPT) + count:
        (tree,) = drafter.propose([context(seq_id, text, known, drafter, **fields)])
        known, rounds = len(text), rounds + 1
        emitted = walk(target, text, tree)
        drafter.observe([Outcome(seq_id, len(tree), len(emitted) - 1, np.array(emitted, np.int32))])
        drafter.remember(rows_of(target, [(seq_id, text, tree)], fields.get("namespace", "")))
        text += emitted
    return rounds


def test_the_window_finds_phrases_before_the_text_has_said_them():
    target = Wheel(89)
    assert rounds_to_write(LookaheadDrafter(), target, 80, max_required=0) >= 80
    assert rounds_to_write(LookaheadDrafter(), target, 80) < 60


def test_pitfall_7_phrases_of_a_request_end_with_it_where_they_are_not_kept_and_never_leave_their_namespace():
    target = ToyTarget(400, order=1, seed=1)
    cold = rounds_to_write(LookaheadDrafter(), target, 20)
    kept = LookaheadDrafter()
    assert rounds_to_write(kept, target, 20, namespace="a") == cold
    assert rounds_to_write(kept, target, 20, seq_id=2, namespace="b") == cold
    assert rounds_to_write(kept, target, 20, seq_id=3, namespace="a") < cold
    separate = LookaheadDrafter(keep_phrases=False)
    for seq_id in range(3):
        assert rounds_to_write(separate, target, 20, seq_id=seq_id) == cold
        assert separate.memory_bytes() > 0
        separate.forget(seq_id)
        assert separate.memory_bytes() == 0


def test_pitfall_8_what_is_found_again_is_one_phrase_and_the_newest():
    target = ToyTarget(5, order=1, seed=3)
    drafter = LookaheadDrafter(guess_set_size=-1)
    rounds_to_write(drafter, target, 200)
    pool = drafter._kept
    check_integrity(pool)
    for token in range(5):
        found = pool.newest("", token, 10_000)
        assert len(set(found)) == len(found)


def test_a_batch_of_several_is_each_alone():
    target = ToyTarget(VOCAB, order=2, seed=5)
    texts = {1: list(PROMPT), 2: [3, *PROMPT], 3: [*PROMPT, 8, 8]}

    def trees(*seq_ids: int) -> list[list[set[Path]]]:
        drafter, found = LookaheadDrafter(keep_phrases=False), []
        now, known = {seq_id: list(texts[seq_id]) for seq_id in seq_ids}, dict.fromkeys(seq_ids, 0)
        for _ in range(12):
            made = drafter.propose([context(seq_id, now[seq_id], known[seq_id], drafter) for seq_id in seq_ids])
            found.append([set(paths_of(tree)) for tree in made])
            drafter.remember(rows_of(target, [(s, now[s], tree) for s, tree in zip(seq_ids, made, strict=True)][::-1]))
            for seq_id, tree in zip(seq_ids, made, strict=True):
                known[seq_id] = len(now[seq_id])
                now[seq_id] += walk(target, now[seq_id], tree)
        return found

    together = trees(1, 2, 3)
    for index, seq_id in enumerate(texts):
        assert [one for (one,) in trees(seq_id)] == [several[index] for several in together]


def test_a_window_whose_rows_were_not_computed_stays_and_one_that_starts_anew_begins_anew():
    target = ToyTarget(VOCAB, order=2, seed=5)
    drafter = LookaheadDrafter()
    (first,) = drafter.propose([context(1, PROMPT, 0, drafter)])
    (again,) = drafter.propose([context(1, PROMPT, len(PROMPT), drafter)])  # the round was lost
    assert required_of(again) == required_of(first)
    half = len(again) // 2  # the target had no room for more
    cut = DraftTree(again.token_ids[:half], again.parents[:half], again.confidence[:half])
    drafter.remember(rows_of(target, [(1, PROMPT, cut)]))
    longer = [*PROMPT, 3]
    (later,) = drafter.propose([context(1, longer, len(PROMPT), drafter)])
    assert required_of(later) == required_of(first)
    drafter.remember(rows_of(target, [(1, [*PROMPT, 5], later)]))  # rows behind another token
    drafter.remember(rows_of(target, [(2, longer, later)]))  # of a sequence that it does not know
    (later,) = drafter.propose([context(1, longer, len(longer), drafter)])
    assert required_of(later) == required_of(first)
    drafter.remember(rows_of(target, [(1, longer, later)]))
    (moved,) = drafter.propose([context(1, longer, len(longer), drafter)])
    assert required_of(moved) != required_of(first)
    (anew,) = drafter.propose([context(1, PROMPT, 0, drafter)])
    assert required_of(anew) == required_of(first)


def test_nothing_is_required_where_rows_or_positions_are_lacking():
    drafter = LookaheadDrafter(window_size=5, lookahead_level=5)
    for fields in ({"max_required": 0}, {"max_required": 18}, {"max_depth": 6}):
        (tree,) = drafter.propose([context(1, PROMPT * 3, 0, drafter, **fields)])
        assert tree.required is None
        assert len(tree)
    (tree,) = drafter.propose([context(1, PROMPT * 3, 0, drafter, max_depth=7)])
    assert tree.required.any()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 9), shapes)
@settings(max_examples=60)
def test_guesses_are_the_likeliest_and_no_more_than_asked_for(text, max_nodes, shape):
    drafter = LookaheadDrafter(window_size=shape[0], lookahead_level=shape[1], guess_set_size=shape[2])
    (tree,) = drafter.propose([context(1, text, 0, drafter, max_nodes=max_nodes)])
    (whole,) = drafter.propose([context(1, text, 0, drafter)])
    assert tree.is_valid(VOCAB)
    assert (~tree.required).sum() <= max_nodes
    sure = dict(zip(paths_of(whole), whole.confidence.tolist(), strict=True))
    kept = dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True))
    for path, confidence in kept.items():
        assert confidence <= kept.get(path[:-1], 1.0)
        assert confidence in (sure[path], 0.0)
    best = sorted((value for value in sure.values() if value > 0.0), reverse=True)[:max_nodes]
    assert sorted((value for value in kept.values() if value > 0.0), reverse=True) == best


def test_a_phrase_that_keeps_coming_true_earns_confidence_and_one_that_does_not_loses_it():
    def confidence(emitted: list[int]) -> np.ndarray:
        drafter = LookaheadDrafter(lookahead_level=4)
        text = [1, 2, 3, 4, 9, 1]
        for _ in range(100):
            (tree,) = drafter.propose([context(1, text, 0, drafter, max_required=0)])
            assert tree.token_ids.tolist() == [2, 3, 4]
            drafter.observe([Outcome(1, 3, 0, np.array(emitted, np.int32))])
        return tree.confidence

    assert (confidence([2, 3, 4, 5]) > 0.6).all()
    first, *further = confidence([2, 8])
    assert first > 0.8
    assert max(further) < 0.15
    assert confidence([7])[0] < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 0}, r"window_size is 0; it must be from 1 to 64"),
        ({"window_size": 65}, r"window_size is 65; it must be from 1 to 64"),
        ({"lookahead_level": 1}, r"lookahead_level is 1; it must be from 2 to 16"),
        ({"lookahead_level": 17}, r"lookahead_level is 17; it must be from 2 to 16"),
        ({"guess_set_size": 0}, r"guess_set_size is 0; it must be from 1 to 64, or -1"),
        ({"pool_phrases": 0}, r"pool_phrases is 0; it must be from 1 to 1048576"),
        ({"window": 7}, r"\.window is 7; there is no such option; there are window_size, lookahead_level"),
        ({"keep_phrases": "perhaps"}, r"\.keep_phrases is 'perhaps'; input should be a valid boolean"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_limit(options, message):
    with pytest.raises(InvalidRequest, match=r"^drafter_options\.lookahead.*" + message):
        create_drafters(("lookahead",), options={"lookahead": options})


def test_options_may_be_text_and_the_pool_is_bounded():
    options = {"window_size": "3", "guess_set_size": "-1", "keep_phrases": "false", "pool_phrases": "10"}
    drafter = create_drafters(("lookahead",), options={"lookahead": options})["lookahead"]
    drafter.propose([context(1, list(range(20)) * 5, 0, drafter)])
    assert len(drafter._states[1].pool) == 10
