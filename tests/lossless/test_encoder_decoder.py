"""Encoder-decoder targets against the unpatched model and against themselves without drafts.

Covers `actors.models.decoder_start`, too.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    LEDConfig,
    SeamlessM4TConfig,
    SwitchTransformersConfig,
    T5Config,
)

from actors.build import build_draft_engine, build_target_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.kv_bytes import kv_bytes_per_token
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.errors import InvalidRequest, ModelError
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.loader import load_config, read_model_info
from actors.models.source import ModelSource
from actors.options import TargetOptions
from cluster.offline.engine import LocalEngine
from cluster.router.draft_depth import DraftDepth
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import merging_tokenizer
from paceline_testing.tiny_models import TINY_ENCODER_DECODER_KINDS, make_tiny_model, save_tiny_model

NEW_TOKENS = 24
EOS = 256
FORCED = 7  # first token of every output of the mBART here
PROMPTS = ["say oak and oak and", "one two three one two three one", "x", "the ash tree stands by the elm tree"]
WAYS = [
    (),
    ("prompt_lookup",),
    ("suffix", "ngram_table"),
    ("draft_model",),
    ("draft_model", "lookahead", "suffix", "prompt_lookup", "soft_ngram", "token_recycling"),
]
SAMPLED = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 11}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory) -> dict[str, Path]:
    """A model of every kind, and a draft model for T5 that is right now and then."""
    root = tmp_path_factory.mktemp("encoder-decoder")
    found = {}
    for kind in TINY_ENCODER_DECODER_KINDS:
        forced = FORCED if kind == "mbart" else None
        found[kind] = save_tiny_model(root / kind, kind, 5, max_positions=256, forced_bos_token_id=forced)
    found["other t5"] = save_tiny_model(root / "other", "t5", 5, layers=1)
    found["llama"] = save_tiny_model(root / "llama", "llama", 5, layers=1)
    return found


def engine(directory: Path, drafters=(), draft: Path | None = None, **options) -> LocalEngine:
    return LocalEngine(
        str(directory), draft_model="none" if draft is None else str(draft), drafters=drafters or ("none",),
        device="cpu", kv_cache_tokens=4096, **options,
    )  # fmt: skip


@lru_cache(maxsize=8)
def unpatched(directory: Path, generation_config: str):
    """generation_config: what the file says, which a test may change."""
    return AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()


def transformers_greedy(directory: Path, prompt: list[int], count: int = NEW_TOKENS, **options) -> list[int]:
    """Without the token that the decoder begins with, and without the one that ended it."""
    ids = torch.tensor([prompt])
    output = unpatched(directory, (directory / "generation_config.json").read_text(encoding="utf-8")).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
    )  # fmt: skip
    return without_end(output[0, 1:].tolist(), options.get("eos_token_id", [EOS]))


def without_end(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[: min((tokens.index(end) for end in ends if end in tokens), default=len(tokens))]


# --- the same tokens as without drafts


@pytest.mark.parametrize(
    "kind",
    [
        # mbart and pegasus are built like bart; what they begin with, other tests here show.
        pytest.param(kind, marks=pytest.mark.slow if kind in ("mbart", "pegasus") else ())
        for kind in TINY_ENCODER_DECODER_KINDS
    ],
)
def test_greedy_answers_are_those_of_transformers(dirs, kind):
    draft = dirs["other t5" if kind == "t5" else kind]
    wanted = None
    ways = WAYS if kind == "t5" else WAYS[::4]
    for batch_size, drafters in zip((1, 4, 1, 4, 4)[-len(ways) :], ways, strict=True):
        local = engine(dirs[kind], drafters, draft, batch_size=batch_size)
        if wanted is None:
            wanted = [transformers_greedy(dirs[kind], local.tokenizer.encode(prompt)) for prompt in PROMPTS]
            assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS)
            assert kind != "mbart" or all(tokens[0] == FORCED for tokens in wanted)
        found = local.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        assert [answer.token_ids for answer in found] == wanted
        assert local.target.num_sequences == 0
        check_integrity(local.target)


@pytest.mark.parametrize("kind", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_a_seed_has_one_answer_whatever_drafts_there_are(dirs, kind):
    plain = engine(dirs[kind], batch_size=1)
    wanted = plain.generate(PROMPTS, max_new_tokens=NEW_TOKENS, **SAMPLED)
    other = plain.generate(PROMPTS, max_new_tokens=NEW_TOKENS, **SAMPLED | {"seed": 12})
    assert [answer.token_ids for answer in wanted] != [answer.token_ids for answer in other]
    for drafters, draft in ((WAYS[4], dirs[kind]), (("draft_model",), dirs["other t5"])):
        found = engine(dirs[kind], drafters, draft, branch=3).generate(PROMPTS, max_new_tokens=NEW_TOKENS, **SAMPLED)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]


def test_the_target_as_its_own_draft_model_saves_rounds(dirs, monkeypatch):
    # A draft forward takes as long as the target's: once that is measured, no drafts are asked for.
    monkeypatch.setattr(DraftDepth, "observe_answer", lambda *_, **__: None)
    local = engine(dirs["t5"], ("draft_model",), dirs["t5"])
    for sampling in ({}, SAMPLED):
        for answer in local.generate(PROMPTS, max_new_tokens=NEW_TOKENS, **sampling):
            assert answer.accepted_tokens.get("draft_model", 0) > 0
            assert answer.rounds < len(answer.token_ids)


@pytest.mark.parametrize(("target", "draft"), [("t5", "llama"), ("llama", "t5")])
def test_a_draft_model_may_be_of_the_other_kind(dirs, target, draft):
    drafted = engine(dirs[target], ("draft_model",), dirs[draft]).generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    plain = engine(dirs[target]).generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]


def test_text_begins_anew_and_streams_as_a_whole(dirs):
    local = engine(dirs["bart"], ("suffix",))
    pieces = list(local.stream(PROMPTS[0], max_new_tokens=NEW_TOKENS))
    (whole,) = local.generate(PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    assert "".join(piece.text for piece in pieces).rstrip("\ufffd") == whole.text.rstrip("\ufffd")
    assert pieces[-1].generation.token_ids == whole.token_ids


def test_tokens_that_the_model_must_or_must_not_say(tmp_path):
    """In a vocabulary that is sampled from by a race, in which tokens that are left out have no noise."""
    directory = save_tiny_model(tmp_path, "t5", 5, layers=1, vocab_size=2100, forced_bos_token_id=FORCED)
    prompt = [65, 66, 67]
    free = transformers_greedy(directory, prompt)
    config = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    config |= {"bad_words_ids": [[free[1]]], "suppress_tokens": [free[2]]}
    (directory / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    local = engine(directory, ("draft_model",), directory)
    (greedy,) = local.generate([prompt], max_new_tokens=NEW_TOKENS)
    assert greedy.token_ids == transformers_greedy(directory, prompt)
    assert greedy.token_ids[0] == free[0] == FORCED
    assert not {free[1], free[2]} & set(greedy.token_ids)
    for answer in local.generate([prompt] * 4, max_new_tokens=NEW_TOKENS, temperature=1.5, seed=0):
        assert answer.token_ids[0] == FORCED
        assert not {free[1], free[2]} & set(answer.token_ids)
    config |= {"bad_words_ids": [[1, 2]]}
    (directory / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="bad_words_ids of several tokens"):
        engine(directory)


# --- where answers end, what is refused


def test_answers_end_as_they_should(dirs):
    local = engine(dirs["t5"], ("draft_model", "suffix"), dirs["t5"])
    prompt = local.tokenizer.encode(PROMPTS[0])
    (long,) = local.generate([prompt], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert (long.finish_reason, len(long.token_ids)) == ("length", NEW_TOKENS)
    stop = long.token_ids[9]
    (short,) = local.generate([prompt], max_new_tokens=NEW_TOKENS, stop_token_ids=[stop])
    assert short.finish_reason == "stop"
    assert short.token_ids == without_end(long.token_ids, [stop])
    assert short.token_ids == transformers_greedy(dirs["t5"], prompt, eos_token_id=[EOS, stop])
    for count in (1, 2, 5):
        (answer,) = local.generate([prompt], max_new_tokens=count)
        assert answer.token_ids == long.token_ids[:count]


def test_prompts_that_do_not_fit_are_refused(dirs):
    local = engine(dirs["bart"])
    limit = local.info.max_side_len
    assert limit == 256
    assert len(local.generate([[65] * limit], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3
    assert len(local.generate([[65]], ignore_eos=True)[0].token_ids) == limit
    with pytest.raises(InvalidRequest, match="writes at most 256 tokens"):
        local.generate([[65]], max_new_tokens=limit + 1)
    with pytest.raises(InvalidRequest, match="takes at most 256 tokens"):
        local.generate([[65] * (limit + 1)], max_new_tokens=1)
    with pytest.raises(InvalidRequest, match="at least one token"):
        local.generate([[]], max_new_tokens=1)


@pytest.mark.parametrize("kind", ["bart", "pegasus"])
def test_an_answer_may_take_the_models_last_position(tmp_path, kind):
    directory = save_tiny_model(tmp_path, kind, 5, layers=1, max_positions=40)
    local = engine(directory, ("draft_model", "suffix"), directory)
    (answer,) = local.generate([[65] * 40], max_new_tokens=40, ignore_eos=True)
    assert answer.token_ids == transformers_greedy(directory, [65] * 40, 40, eos_token_id=[])
    assert answer.accepted_tokens


def test_beams_are_those_of_transformers(dirs):
    local = engine(dirs["mbart"])
    prompt = local.tokenizer.encode(PROMPTS[1])
    (found,) = local.beam_search([prompt], num_beams=3, max_new_tokens=12)
    wanted = transformers_greedy(dirs["mbart"], prompt, 12, num_beams=3)
    assert found.token_ids == wanted
    assert found.token_ids != local.generate([prompt], max_new_tokens=12)[0].token_ids
    greedy = transformers_greedy(dirs["mbart"], prompt, 12)
    assert local.generate([prompt], max_new_tokens=12)[0].token_ids == greedy


def test_what_needs_a_model_without_encoder_is_refused_by_name(dirs, tmp_path):
    source = ModelSource("t5", "t5", dirs["t5"])
    for options in ({"exact": "bitwise"}, {"tensor_parallel": 2}, {"quantization": "int8"}, {"eagle_head": "head"}):
        with pytest.raises(ModelError, match=r"'t5': t5 has an encoder; .* needs a model without"):
            build_target_engine(source, TargetOptions(device="cpu", **options))
    with pytest.raises(ModelError, match="drafter 'ouroboros' needs a model without"):
        engine(dirs["t5"], ("ouroboros",), dirs["t5"])
    renamed = save_tiny_model(tmp_path / "renamed", "t5", 5, merging_tokenizer(seed=1))
    with pytest.raises(ModelError, match="drafting for a model with another vocabulary needs a model without"):
        build_draft_engine(ModelSource("renamed", "renamed", renamed), target=source)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SwitchTransformersConfig(), "experts of limited capacity"),
        (SeamlessM4TConfig(), "not generate from text alone"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load_config(ModelSource("x", "x", tmp_path))


def test_a_model_that_does_not_say_how_it_begins_is_refused():
    model = make_tiny_model("bart")
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(ModelError, match="decoder_start_token_id None"):
        EncoderDecoderRunner(model)


def test_a_decoder_that_forgets_its_cache_is_refused():
    model = make_tiny_model("bart")
    forward = model.model.decoder.forward
    model.model.decoder.forward = lambda *args, past_key_values, **rest: forward(*args, **rest)
    with pytest.raises(ModelError, match=r"BartForConditionalGeneration (gives other logits|does not decode)"):
        EncoderDecoderRunner(model)


def test_model_info_says_so_and_knows_the_decoders_length(dirs, tmp_path):
    assert read_model_info(ModelSource("t5", "t5", dirs["t5"])).is_encoder_decoder
    assert not read_model_info(ModelSource("llama", "llama", dirs["llama"])).is_encoder_decoder
    LEDConfig(max_decoder_position_embeddings=77).save_pretrained(tmp_path / "led")
    info = read_model_info(ModelSource("led", "led", tmp_path / "led"))
    assert (info.max_side_len, info.max_model_len) == (77, 154)
    T5Config().save_pretrained(tmp_path / "t5")
    assert read_model_info(ModelSource("t5", "t5", tmp_path / "t5")).max_side_len == 2048


@pytest.mark.parametrize(
    "config",
    [
        T5Config(num_layers=3, num_decoder_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=16),
        BartConfig(
            d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=4
        ),
    ],
)
def test_the_cache_is_counted_as_large_as_it_is(config):
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.ones((1, 7), dtype=torch.int64)
    cache = model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
    for side in (cache.self_attention_cache, cache.cross_attention_cache):
        num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in side.layers)
        assert num_bytes == 7 * kv_bytes_per_token(model)


# --- trees


VOCAB = 41


@pytest.fixture(scope="module", params=["t5", "bart"])
def tiny(request):
    return make_tiny_model(request.param, 3, vocab_size=VOCAB, layers=1, hidden_size=32, max_positions=64)


@torch.inference_mode()
def next_token(model, prompt: list[int], output: list[int]) -> int:
    """The likeliest, from one whole forward without any cache."""
    decoder = torch.tensor([[VOCAB - 1, *output]])
    logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder, use_cache=False).logits
    return int(logits[0, -1].argmax())


@st.composite
def trees(draw) -> DraftTree:
    """Trees with few different tokens, so that some are right once `plant` has inserted the target's."""
    count = draw(st.integers(0, 9))
    parents = [draw(st.integers(-1, index - 1)) for index in range(count)]
    tokens: list[int] = []
    for index, parent in enumerate(parents):
        taken = {tokens[other] for other in range(index) if parents[other] == parent}
        tokens.append(draw(st.sampled_from([token for token in range(30) if token not in taken])))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(count, np.float32))


def plant(model, prompt: list[int], output: list[int], tree: DraftTree, wishes: list[bool]) -> None:
    """Make some first children what the model says there."""
    paths: dict[int, list[int]] = {-1: []}
    tokens, parents = tree.token_ids, tree.parents.tolist()
    for node, parent in enumerate(parents):
        siblings = {int(tokens[other]) for other, above in enumerate(parents) if above == parent and other != node}
        if wishes[node]:
            right = next_token(model, prompt, output + paths[parent])
            tokens[node] = right if right not in siblings else tokens[node]
        paths[node] = [*paths[parent], int(tokens[node])]


@settings(max_examples=10)
@given(st.data())
def test_of_any_trees_what_the_target_says_is_accepted(tiny, data):
    """Two sequences over several rounds, each with a tree; accepted path and next token are those of a walk by hand."""
    target = TargetEngine(tiny, EngineOptions(num_blocks=64, block_size=4))
    texts = {seq_id: data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=9)) for seq_id in (1, 2)}
    num_prompt = {seq_id: len(text) for seq_id, text in texts.items()}
    known = dict.fromkeys(texts, 0)
    for round_id in range(4):
        items, wanted = [], {}
        for seq_id, text in texts.items():
            prompt, output = text[: num_prompt[seq_id]], text[num_prompt[seq_id] :]
            tree = data.draw(trees())
            plant(tiny, prompt, output, tree, data.draw(st.lists(st.booleans(), min_size=9, max_size=9)))
            wanted[seq_id] = walk_by_hand(tiny, prompt, output, tree)
            begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), len(prompt)) if not known[seq_id] else None
            delta = SequenceDelta(seq_id, known[seq_id], np.array(text[known[seq_id] :], np.int32))
            items.append(VerifyItem(delta, 64, tree, begin))
            known[seq_id] = len(text)
        result = target.verify(VerifyBatch(round_id, items))
        for verdict in result.verdicts:
            path, token = wanted[verdict.seq_id]
            assert (verdict.path.tolist(), verdict.next_token) == (path, token)
            tree_tokens = next(item.tree.token_ids for item in items if item.delta.seq_id == verdict.seq_id)
            texts[verdict.seq_id] += [*tree_tokens[verdict.path].tolist(), token]
        check_integrity(target)
    target.clear()
    assert target.pool.num_free == target.pool.num_blocks


def walk_by_hand(model, prompt: list[int], output: list[int], tree: DraftTree) -> tuple[list[int], int]:
    path: list[int] = []
    while True:
        token = next_token(model, prompt, output + tree.token_ids[path].tolist())
        node = path[-1] if path else -1
        children = np.flatnonzero((tree.parents == node) & (tree.token_ids == token))
        if not len(children):
            return path, token
        path.append(int(children[0]))


def test_wide_trees_are_computed_in_parts_and_kept(tiny, monkeypatch):
    monkeypatch.setattr("actors.engine.encoder_decoder_runner._MAX_COPIED_TOKENS", 12)
    target = TargetEngine(tiny, EngineOptions(num_blocks=64, block_size=4))
    prompt = [3, 1, 4, 1, 5]
    right = [next_token(tiny, prompt, [])]
    right.append(next_token(tiny, prompt, right))
    firsts = np.array([*(token for token in range(20) if token != right[0]), right[0], right[1]], np.int32)
    parents = np.full(len(firsts), -1, np.int32)
    parents[-1] = len(firsts) - 2
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), len(prompt))
    item = VerifyItem(SequenceDelta(1, 0, np.array(prompt, np.int32)), 64, tree_to_verify(firsts, parents), begin)
    (verdict,) = target.verify(VerifyBatch(1, [item])).verdicts
    assert verdict.path.tolist() == [len(firsts) - 2, len(firsts) - 1]
    assert verdict.next_token == next_token(tiny, prompt, right)
    new = np.array([*right, verdict.next_token], np.int32)
    (verdict,) = target.verify(VerifyBatch(2, [VerifyItem(SequenceDelta(1, len(prompt), new), 1)])).verdicts
    assert verdict.next_token == next_token(tiny, prompt, new.tolist())


def test_a_prompt_is_read_when_all_of_it_may_be_computed(tiny):
    target = TargetEngine(tiny, EngineOptions(num_blocks=64, block_size=4))
    prompt = list(range(10))
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), len(prompt))
    first = VerifyItem(SequenceDelta(1, 0, np.array(prompt, np.int32)), 4, begin=begin)
    more = VerifyItem(SequenceDelta(1, len(prompt), np.empty(0, np.int32)), 4)
    verdicts = [target.verify(VerifyBatch(1, [item])).verdicts[0] for item in (first, more, more)]
    assert [verdict.next_token for verdict in verdicts] == [-1, -1, next_token(tiny, prompt, [])]
    assert [verdict.num_computed for verdict in verdicts] == [4, 8, 10]


def test_a_sequence_that_comes_again_with_its_output_goes_on_from_there(tiny):
    """As after a failover: part of the first tokens is output."""
    target = TargetEngine(tiny, EngineOptions(num_blocks=64, block_size=4))
    prompt, output = [9, 8, 7], [5, 6]
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), len(prompt))
    item = VerifyItem(SequenceDelta(1, 0, np.array(prompt + output, np.int32)), 64, begin=begin)
    (verdict,) = target.verify(VerifyBatch(1, [item])).verdicts
    assert verdict.next_token == next_token(tiny, prompt, output)


# --- the rejection rule


def test_under_rejection_a_draft_model_that_is_the_target_is_always_right(tiny):
    """q is not cut in so small a vocabulary, so q is p and every token drawn from it is accepted."""
    model = make_tiny_model("t5", 3, vocab_size=32, layers=1, hidden_size=32)
    target, draft = (TargetEngine(model, EngineOptions(64, 4)), DraftEngine(model, EngineOptions(64, 4)))
    for accepted, offered, _ in rejection_round(target, draft, range(20)):
        assert accepted == offered >= 1


def test_under_rejection_tokens_are_distributed_as_the_target_has_it():
    shape = {"vocab_size": 24, "layers": 1, "hidden_size": 32, "max_positions": 256}
    model, other = (make_tiny_model("bart", seed, **shape) for seed in (3, 4))
    target, draft = (TargetEngine(model, EngineOptions(256, 4)), DraftEngine(other, EngineOptions(256, 4)))
    count, together = 500, 50
    firsts = np.zeros(24)
    num_accepted = 0
    for seed in range(0, count, together):
        for accepted, _, tokens in rejection_round(target, draft, range(seed, seed + together), max_nodes=1):
            firsts[tokens[0]] += 1
            num_accepted += accepted
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([[23]])).logits[0, -1]
    expected = (logits / 1.5).softmax(-1).double().numpy() * count
    likely = expected >= 5
    observed, wanted = (
        np.append(firsts[likely], firsts[~likely].sum()),
        np.append(expected[likely], max(expected[~likely].sum(), 1e-9)),
    )
    assert 0 < num_accepted < count
    # 99.99 % of chi-square with at most 24 degrees of freedom is below 60.
    assert ((observed - wanted) ** 2 / np.maximum(wanted, 1.0)).sum() < 60


PROMPT = [3, 1, 4, 1, 5, 9]


def rejection_round(target, draft, seeds: range, max_nodes: int = 3) -> list[tuple[int, int, list[int]]]:
    """Nodes accepted, nodes offered and tokens emitted, of the first round of a new sequence for each seed."""
    starts = []
    for seed in seeds:
        sampling = SamplingParams(seed=seed, temperature=1.5, acceptance="rejection")
        delta = SequenceDelta(seed, 0, np.array(PROMPT, np.int32))
        starts.append((delta, SequenceStart(sampling, len(PROMPT))))
    drafted = draft.draft(DraftBatch(1, [DraftItem(delta, max_nodes, begin) for delta, begin in starts])).trees
    items = [VerifyItem(delta, 64, tree, begin) for (delta, begin), tree in zip(starts, drafted, strict=True)]
    verdicts = target.verify(VerifyBatch(1, items)).verdicts
    assert [verdict.seq_id for verdict in verdicts] == list(seeds)
    found = []
    for tree, verdict in zip(drafted, verdicts, strict=True):
        assert all(parent == node - 1 for node, parent in enumerate(tree.parents.tolist()))
        assert all(first < second for first, second in pairwise(verdict.path.tolist()))
        tokens = [*tree.token_ids[verdict.path].tolist(), verdict.next_token]
        found.append((len(verdict.path), len(tree.token_ids), tokens))
    draft.draft(DraftBatch(2, [], list(seeds)))
    target.verify(VerifyBatch(2, [], list(seeds)))
    return found
