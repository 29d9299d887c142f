"""The retrieval drafter: what it drafts from corpora, its knobs, its walks, and that it is nothing without a corpus
(`actors.drafters.retrieval`, `actors.drafters._tree_growth`)."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters._match_options import MatchOptions
from actors.drafters.contract import DraftContext
from actors.drafters.registry import check_options, create_drafter
from actors.drafters.retrieval import RetrievalDrafter, open_corpora
from actors.errors import InvalidRequest, ModelError
from actors.messages import SamplingParams
from cache_service.automata.corpus_index import CorpusHeader, write_index
from cache_service.automata.static_automaton import StaticAutomaton
from paceline_testing.automata import static_of
from paceline_testing.drafting import paths_of

BIG = 200_018
texts = st.lists(st.integers(0, 3) | st.sampled_from([BIG]), min_size=1, max_size=30)


def index_at(directory: Path, *docs: list[int], tokenizer: str = "t") -> Path:
    directory.mkdir()
    write_index(directory, CorpusHeader("m", tokenizer, BIG + 1, len(docs), sum(map(len, docs))), static_of(docs))
    return directory


def draft(
    drafter: RetrievalDrafter, tokens: list[int], start: int = 0, max_nodes: int = 16, seq_id: int = 1
) -> DraftTree:
    array = np.array(tokens, np.int32)
    array.flags.writeable = False
    (tree,) = drafter.propose([DraftContext(seq_id, array, start, len(tokens), max_nodes, SamplingParams(seed=1))])
    return tree


def content(tree: DraftTree) -> tuple[list[int], list[int], list[float]]:
    return tree.token_ids.tolist(), tree.parents.tolist(), tree.confidence.tolist()


def test_without_a_corpus_it_proposes_nothing_and_keeps_nothing() -> None:
    drafter = create_drafter("retrieval")
    tokens = np.array([1, 2, 1, 2], np.int32)
    trees = drafter.propose([DraftContext(i, tokens, 0, 4, 16, SamplingParams(seed=1)) for i in range(3)])
    assert [len(tree) for tree in trees] == [0, 0, 0]
    assert drafter.memory_bytes() == 0


def test_it_drafts_what_followed_in_the_corpus_most_often(tmp_path: Path) -> None:
    corpus = index_at(tmp_path / "a", [1, 2, BIG, 4], [5, 1, 2, BIG, 6], [1, 2, 7, 8])
    tree = draft(create_drafter("retrieval", automata=open_corpora([corpus])), [9, 9, 1, 2])
    assert tree.is_valid(BIG + 1)
    assert paths_of(tree)[:2] == [(BIG,), (7,)]
    assert {(BIG, 4), (BIG, 6)} <= set(paths_of(tree))
    assert tree.confidence[0] > tree.confidence[1]


def test_the_corpus_with_the_longest_match_comes_first_and_others_make_up_for_little() -> None:
    short, long = static_of([[1, 2, 7, 7, 7]]), static_of([[3, 1, 2, 8]])
    for automata in ([short, long], [long, short]):
        paths = paths_of(draft(RetrievalDrafter(automata), [3, 1, 2]))
        assert paths[0] == (8,)
        assert (7, 7) in paths
    (only,) = paths_of(draft(RetrievalDrafter([short, long], min_continuation=0), [3, 1, 2]))
    assert only == (8,)


@given(st.lists(texts, max_size=3), st.lists(texts, max_size=3), texts, st.integers(0, 20))
@settings(max_examples=150)
def test_every_draft_is_a_valid_tree_within_its_budget(
    first: list[list[int]], second: list[list[int]], tokens: list[int], max_nodes: int
) -> None:
    tree = draft(RetrievalDrafter([static_of(first), static_of(second)], floor=0.0), tokens, max_nodes=max_nodes)
    assert tree.is_valid(BIG + 1)
    assert len(tree) <= max_nodes
    assert (tree.token_ids.dtype, tree.parents.dtype, tree.confidence.dtype) == (np.int32, np.int32, np.float32)
    for node, parent in enumerate(tree.parents):
        assert parent < 0 or tree.confidence[node] <= tree.confidence[parent]
    assert tree.confidence[tree.parents < 0].sum() <= 1 + 1e-5


@given(st.lists(texts, min_size=1, max_size=3), texts, st.lists(st.integers(1, 5), max_size=20))
@settings(max_examples=100)
def test_catching_up_in_steps_and_beside_others_gives_the_draft_of_a_fresh_drafter(
    docs: list[list[int]], tokens: list[int], steps: list[int]
) -> None:
    automaton = static_of(docs)
    drafter = RetrievalDrafter([automaton])
    known = 0
    for step in [*steps, len(tokens)]:
        upto = min(known + step, len(tokens))
        if upto > known:
            draft(drafter, tokens[::-1], seq_id=2)
            tree = draft(drafter, tokens[:upto], start=known)
            assert content(tree) == content(draft(RetrievalDrafter([automaton]), tokens[:upto]))
            known = upto


def test_only_new_tokens_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []
    advance = StaticAutomaton.advance

    def counted(self, cursor, tokens):
        walked.append(len(tokens))
        return advance(self, cursor, tokens)

    monkeypatch.setattr(StaticAutomaton, "advance", counted)
    drafter = RetrievalDrafter([static_of([[1, 2, 3, 4]])])
    walked.clear()
    draft(drafter, [1, 2, 1])
    draft(drafter, [1, 2, 1, 2, 3], start=3)
    assert walked == [3, 2]
    draft(drafter, [1, 2, 1, 2, 3], start=4)  # not what it knows: the sequence was restarted
    assert walked == [3, 2, 5]


def test_sequences_are_forgotten() -> None:
    drafter = RetrievalDrafter([static_of([[1, 2, 3]])])
    draft(drafter, [1, 2])
    assert drafter.memory_bytes() > 0
    drafter.forget(1)
    drafter.forget(1)
    assert (drafter.memory_bytes(), len(draft(drafter, [2, 1]))) == (0, 0)


def test_knobs_bound_what_a_match_drafts(tmp_path: Path) -> None:
    corpus = index_at(tmp_path / "a", list(range(40)), [1, 2, 30, 31], [1, 2, 32, 33])

    automata = open_corpora([corpus])

    def nodes(*match: int, **options: object) -> int:
        return len(draft(create_drafter("retrieval", automata=automata, floor=0.0, **options), list(match), 0, 30))

    assert nodes(3, 4) == 30
    assert nodes(3, 4, n_predicts=5) == 5
    assert nodes(3, 4, 5, alpha=2.5) == 8
    assert nodes(3, 4, 5, alpha=2.5, len_bias=1) == 6
    assert nodes(3, 4, len_threshold=3) == 0
    assert nodes(3, 4, 5, len_threshold=3) == 30
    assert nodes(3, 4, 5, len_threshold=3, len_bias=1) == 0
    assert nodes(3) == 0  # a match of one token says too little by default
    assert nodes(3, len_threshold=1) == 30
    tree = draft(create_drafter("retrieval", automata=automata, floor=0.0, top_k=2), [1, 2], 0, 30)
    assert len([path for path in paths_of(tree) if len(path) == 1]) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"len_threshold": 0}, "len_threshold is 0; it must be from 1 to 1000000"),
        ({"len_bias": -1}, "len_bias is -1; it must be from 0 to 1000000"),
        ({"n_predicts": 0}, "n_predicts is 0; it must be from 1 to 1000000"),
        ({"alpha": -0.5}, "alpha is -0.5; it must be from 0 to 1000000"),
        ({"alpha": float("nan")}, "alpha is NaN"),
        ({"alpha": float("inf")}, "alpha is Infinity; it must be from 0 to 1000000"),
        ({"top_k": 9}, "top_k is 9; it must be from 1 to 8"),
    ],
)
def test_knobs_out_of_range_are_refused(options: dict[str, float], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        check_options(["retrieval"], {"retrieval": options})


def test_room_grows_with_the_match() -> None:
    options = MatchOptions(len_threshold=2, len_bias=1, n_predicts=10, alpha=1.5)
    assert [options.room_for(length, 16) for length in (1, 2, 3, 4, 5, 20)] == [0, 0, 4, 5, 7, 10]
    assert (options.room_for(20, 3), options.room_for(20, -1)) == (3, 0)


def test_corpora_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such directory"):
        open_corpora([tmp_path / "none"])
    corpus = index_at(tmp_path / "a", [1, 2], tokenizer="theirs")
    with pytest.raises(ModelError, match=r"^corpus .*theirs.*ours"):
        open_corpora([corpus], "ours")
    assert len(open_corpora([corpus], "theirs")) == 1
