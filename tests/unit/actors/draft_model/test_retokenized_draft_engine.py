"""The engine around a draft model of another vocabulary: the rules of every draft engine, and its own limits."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.build import build_draft_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.draft_worth import no_worth
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, DraftResult, SamplingParams, SequenceDelta, SequenceStart
from actors.models.source import ModelSource
from actors.models.token_text import TokenText
from actors.options import DraftOptions
from cluster.router.rejection_chain import is_chain
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import TEXT, merging_tokenizer, save_renumbered_pair
from paceline_testing.tiny_models import make_byte_tokenizer, make_tiny_model

TARGET = TokenText(make_byte_tokenizer(), "target")
DRAFT = TokenText(merging_tokenizer(), "draft")
SAMPLED = SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.2)


def engine(num_blocks: int = 64, max_len: int = 1024) -> RetokenizedDraftEngine:
    model = make_tiny_model("llama", seed=3, vocab_size=len(DRAFT), hidden_size=32, layers=1, max_positions=max_len)
    return RetokenizedDraftEngine(DraftEngine(model, EngineOptions(num_blocks, 4)), TARGET, DRAFT)


def item(seq_id: int, text: str, start: int = 0, nodes: int = 8, depth: int = 4, params: SamplingParams = SAMPLED):
    token_ids = np.array(TARGET.encode(text), np.int32)
    begin = SequenceStart(params, len(token_ids)) if start == 0 else None
    return DraftItem(SequenceDelta(seq_id, start, token_ids), nodes, begin, depth, 2)


def ask(engine: RetokenizedDraftEngine, *items: DraftItem, finished: tuple[int, ...] = ()) -> DraftResult:
    result = engine.draft(DraftBatch(1, list(items), list(finished)))
    check_integrity(engine)
    for seq_id, tree in zip(result.seq_ids, result.trees, strict=True):
        asked = next(item for item in items if item.delta.seq_id == seq_id)
        assert tree.is_valid(len(TARGET))
        assert len(tree.token_ids) <= asked.max_nodes
        assert (np.diff(tree.confidence) <= 0.0).all()
    return result


def chains(result: DraftResult) -> dict[int, list[int]]:
    return {seq_id: tree.token_ids.tolist() for seq_id, tree in zip(result.seq_ids, result.trees, strict=True)}


def test_guesses_do_not_depend_on_how_the_text_arrived_nor_on_the_company():
    parts = ["the cat", " an", "d the d", "og sat", " on"]
    whole = chains(ask(engine(), item(1, "".join(parts))))[1]
    grown, known = engine(), 0
    for index, part in enumerate(parts):
        others = [item(10 + index, TEXT[index : index + 40])]
        answer = ask(grown, item(1, part, known), *others)
        known += len(part)
    assert chains(answer)[1] == whole
    assert whole


def test_stale_unknown_finished_and_restarted_sequences():
    drafting = engine()
    assert ask(drafting, item(1, "the", start=5)).stale_seq_ids == [1]
    first = chains(ask(drafting, item(1, "the cat"), item(2, "the dog")))
    assert list(first) == [1, 2]
    assert ask(drafting, item(1, " sat", start=6)).stale_seq_ids == [1]
    assert ask(drafting, item(1, " sat", start=7)).stale_seq_ids == [1]  # forgotten by the answer before
    assert chains(ask(drafting, item(1, "the cat"))) == {1: first[1]}
    assert ask(drafting, item(2, " sat", start=7), finished=(1,)).stale_seq_ids == []
    assert ask(drafting, item(1, " sat", start=7)).stale_seq_ids == [1]
    assert ask(drafting, item(3, "")).stale_seq_ids == [3]
    assert chains(ask(drafting, item(1, "the cat"), item(1, "the rain"))) == {1: first[1]}  # the first one counts
    ask(drafting, finished=(1, 2, 3))
    assert drafting.pool.num_free == drafting.pool.num_blocks
    ask(drafting, item(1, "the cat"))
    drafting.clear()
    assert ask(drafting, item(1, " sat", start=7)).stale_seq_ids == [1]


def test_asked_again_without_news_it_guesses_the_same():
    drafting = engine()
    first = chains(ask(drafting, item(1, "the cat and")))
    assert first[1]
    assert chains(ask(drafting, item(1, "", start=11))) == first
    quiet = engine()
    assert chains(ask(quiet, item(1, "the cat and", nodes=0))) == {1: []}
    assert chains(ask(quiet, item(1, "", start=11))) == first


def test_a_character_that_has_only_begun_is_no_news():
    drafting = engine()
    emoji = np.array(TARGET.encode("\U0001f642"), np.int32)
    ask(drafting, item(1, "the cat "))
    for count in range(3):
        delta = SequenceDelta(1, 8 + count, emoji[count : count + 1])
        assert ask(drafting, DraftItem(delta, 8)).stale_seq_ids == []
    assert ask(drafting, DraftItem(SequenceDelta(1, 11, emoji[3:]), 8)).stale_seq_ids == []
    whole = chains(ask(drafting, item(2, "the cat \U0001f642"), DraftItem(SequenceDelta(1, 12, emoji[:0]), 8, None, 4)))
    assert whole[1] == whole[2]
    assert ask(drafting, DraftItem(SequenceDelta(3, 0, emoji[:2]), 8, SequenceStart(SAMPLED, 2))).stale_seq_ids == []


def test_without_room_there_is_no_draft_and_with_room_again_there_is_one():
    drafting = engine(num_blocks=8)
    assert chains(ask(drafting, item(1, TEXT)))[1] == []
    room = chains(ask(drafting, item(2, "the cat and")))
    assert room[2]
    assert ask(drafting, item(1, " the", start=len(TARGET.encode(TEXT)))).stale_seq_ids == []
    ask(drafting, finished=(1, 2))
    assert drafting.pool.num_free == drafting.pool.num_blocks
    assert chains(ask(drafting, item(2, "the cat and"))) == room


def test_beyond_the_draft_models_positions_there_is_no_draft_and_no_error():
    drafting = engine(max_len=24)
    known = 0
    lengths = []
    for word in ["the cat", *[" and the cat"] * 10]:
        lengths.append(len(chains(ask(drafting, item(1, word, known)))[1]))
        known += len(word)
    assert lengths[0] > 0
    assert lengths[-1] == 0
    assert drafting.pool.num_free == drafting.pool.num_blocks


def test_a_token_that_the_draft_model_has_no_row_for_costs_the_drafts_of_its_sequence():
    end = DRAFT.encode("</s>")[0]
    last = max(DRAFT.encode("the cat"))
    inner = DraftEngine(
        make_tiny_model("llama", seed=3, vocab_size=last, hidden_size=32, layers=1), EngineOptions(64, 4)
    )
    drafting = RetokenizedDraftEngine(inner, TARGET, DRAFT)
    assert end < last
    result = chains(ask(drafting, item(1, "the cat"), item(2, "</s>", nodes=2)))
    assert result[1] == []
    assert 2 in result


def test_after_a_failure_of_the_model_everything_begins_anew(monkeypatch):
    drafting = engine()
    wanted = chains(ask(engine(), item(1, "the cat and")))
    ask(drafting, item(1, "the cat"))
    inner = drafting._inner
    forward = inner._runner.forward

    def failing(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(inner._runner, "forward", failing)
    with pytest.raises(RuntimeError):
        drafting.draft(DraftBatch(1, [item(1, " and", start=7)]))
    monkeypatch.setattr(inner._runner, "forward", forward)
    drafting.clear()
    assert ask(drafting, item(1, " on", start=11)).stale_seq_ids == [1]
    assert chains(ask(drafting, item(1, "the cat and"))) == wanted


def test_under_rejection_each_token_has_all_the_mass_of_its_distribution():
    params = SamplingParams(seed=3, temperature=0.8, acceptance="rejection")
    tree = ask(engine(), item(1, "the cat and", params=params)).trees[0]
    assert 0 < len(tree.token_ids) <= 4
    assert is_chain(tree, len(TARGET))
    assert tree.probs.k == 1
    assert tree.probs.token_ids.tolist() == tree.token_ids.tolist()
    assert tree.probs.probs.tolist() == [1.0] * len(tree.token_ids)
    assert ask(engine(), item(1, "the cat and")).trees[0].probs is None
    by_lookahead = msgspec.structs.replace(item(1, "the cat and", params=params), method="lookahead")
    (certain,) = ask(engine(), by_lookahead).trees
    assert (certain.token_ids.tolist(), certain.probs) == (tree.token_ids.tolist(), None)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0, 8.0, 30.0])
def test_a_forward_is_made_where_the_target_tokens_that_it_brings_pay(share):
    texts, num_levels = ["sat on the mat, and", "er cat went "], 8

    def drafts(worth, **options):
        items = [item(index, text, nodes=40, depth=16, **options) for index, text in enumerate(texts)]
        return engine().draft(DraftBatch(1, items, worth=worth))

    inner, greedy = engine()._inner, SamplingParams(seed=0, temperature=0.0)
    draft_ids = [np.array(DRAFT.encode(text), np.int32) for text in texts]
    begun = [SequenceStart(greedy, len(ids)) for ids in draft_ids]
    asked = [
        DraftItem(SequenceDelta(index, 0, ids), num_levels, begin)
        for index, (ids, begin) in enumerate(zip(draft_ids, begun, strict=True))
    ]
    chains_of_draft_tokens = inner.draft(DraftBatch(1, asked)).trees
    bytes_a_token = sum(map(len, texts)) / sum(map(len, draft_ids))
    assert bytes_a_token > 1.2
    paid = share * bytes_a_token * sum(tree.confidence for tree in chains_of_draft_tokens)
    worth = np.array([0.0, 1.0, 0.0, share], np.float32)  # a target token brings `share` times its confidence
    full, cut = drafts(no_worth()), drafts(worth)
    wanted = next((level for level in range(1, num_levels) if paid[level - 1] < 1.0), None)
    assert full.num_forwards >= num_levels
    assert cut.num_forwards == (wanted or full.num_forwards)
    assert max(map(len, full.trees)) > 10
    for short, whole in zip(cut.trees, full.trees, strict=True):
        assert short.token_ids.tolist() == whole.token_ids[: len(short)].tolist()
    rejection = SamplingParams(seed=3, acceptance="rejection")  # its time must not depend on its tokens
    assert drafts(worth, params=rejection).num_forwards == drafts(no_worth(), params=rejection).num_forwards


def test_guesses_after_a_less_likely_text_are_not_made():
    asked = item(1, "er cat went ", nodes=40, depth=16)
    full = engine().draft(DraftBatch(1, [asked]))
    least = float(full.trees[0].confidence[4])
    cut = engine().draft(DraftBatch(1, [msgspec.structs.replace(asked, min_confidence=least)]))
    assert cut.num_forwards < full.num_forwards
    assert chains(cut)[1] == chains(full)[1][: len(cut.trees[0])]
    assert len(cut.trees[0]) >= 4


def test_guesses_that_cannot_be_realigned_give_no_draft():
    drafting = engine()
    emoji = np.array(TARGET.encode("\U0001f642"), np.int32)
    drafts = []
    for seq_id in range(4):  # what this model guesses is hardly ever that character
        ask(drafting, item(seq_id, "the cat "))
        drafts += ask(drafting, DraftItem(SequenceDelta(seq_id, 8, emoji[:2]), 8)).trees
    assert any(len(tree) == 0 for tree in drafts)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(-1, 1), st.booleans(), st.integers(0, 8)),
        max_size=25,
    )
)
@settings(max_examples=25)
def test_any_order_of_deltas_keeps_both_sides_whole(steps):
    drafting = engine(num_blocks=24)
    texts = {seq_id: TARGET.encode(TEXT[seq_id * 7 :]) for seq_id in range(4)}
    known = dict.fromkeys(texts, 0)
    for seq_id, count, slip, ends, nodes in steps:
        start = max(0, known[seq_id] + slip)
        token_ids = np.array(texts[seq_id][start : start + count], np.int32)
        begin = SequenceStart(SAMPLED, count) if start == 0 else None
        asked = DraftItem(SequenceDelta(seq_id, start, token_ids), nodes, begin)
        result = ask(drafting, asked, finished=(3 - seq_id,) if ends else ())
        if ends:
            known[3 - seq_id] = 0
        assert result.seq_ids + result.stale_seq_ids == [seq_id]
        is_right = (start == 0 and count > 0) or (0 < start == known[seq_id])
        assert (result.seq_ids == [seq_id]) == is_right
        known[seq_id] = start + len(token_ids) if is_right else 0
    ask(drafting, finished=(0, 1, 2, 3))
    assert drafting.pool.num_free == drafting.pool.num_blocks


def test_the_same_model_behind_other_numbers_guesses_what_the_target_says(tmp_path):
    target, draft = (ModelSource(path.name, path.name, path) for path in save_renumbered_pair(tmp_path))
    options = DraftOptions(device="cpu", kv_cache_tokens=1024)
    drafting = build_draft_engine(draft, options, target=target)
    assert isinstance(drafting, RetokenizedDraftEngine)
    plain = build_draft_engine(target, options, target=target)
    assert isinstance(plain, DraftEngine)
    greedy = SamplingParams(seed=0, temperature=0.0)
    for text in ("say oak and elm", "x", "0123 and 4567"):
        asked = item(1, text, params=greedy, nodes=4)
        chain = DraftItem(asked.delta, 4, asked.begin, 4, 1)
        wanted = chains(plain.draft(DraftBatch(1, [chain])))[1]
        guessed = chains(ask(drafting, chain))[1]
        assert guessed
        shared = min(len(guessed), len(wanted))
        assert guessed[:shared] == wanted[:shared]
