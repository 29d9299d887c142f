"""Two ranks with a head give the tokens of one, and draft what one drafts, on the host and as on a device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.build import build_target_engine
from actors.draft_tree import DraftTree
from actors.eagle import head_drafter
from actors.engine import model_runner
from actors.engine.rank_group import LeadingRank, follow
from actors.errors import EngineBroken
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.source import ModelSource
from actors.options import MTP_HEAD, TargetGroupOptions
from paceline_testing import mtp_checkpoints, published_heads
from paceline_testing.integrity import check_integrity
from paceline_testing.plain_dflash import dflash_config, dflash_tensors, save_dflash
from paceline_testing.published_layouts import LAYOUTS
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work
from paceline_testing.tiny_models import make_tiny_model, save_eagle_head, save_knowing_target, tiny_eagle_tensors

VOCAB = 131  # ranks have 66 and 65
PROMPTS = ([5, 9, 33, 2], list(range(40, 52)))
SAMPLINGS = (SamplingParams(1, temperature=0.0), SamplingParams(2, temperature=0.7, top_p=0.9))
ROUNDS = 3  # the first two of them for the longer prompt
# EAGLE-1 has the target's output layer; the last has an embedding of its own, so it computes without the other rank.
HEADS = {"eagle": {}, "eagle3": {}, "eagle3 reduced": {"draft_vocab_size": 70}, "eagle3 alone": {}}
ONE_PASS = ("p-eagle", "dflash")  # DFlash has the target's embeddings and output layer
MASK = 3
MTP_FAMILIES = ("mimo", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")  # from the fourth on, chains
QUICK_LAYOUT = "EAGLE-3 for a larger target"  # with a width, an embedding and a vocabulary of its own


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    model = make_tiny_model("llama", 4, VOCAB, 3, 48, 4, 2)
    model.save_pretrained(path)
    for name, options in HEADS.items():
        tensors = tiny_eagle_tensors(model.config, name.split()[0], 9, **options)
        if name == "eagle3 alone":
            tensors["embed_tokens.weight"] = torch.randn(VOCAB, 48)
        save_eagle_head(path / name, model.config, tensors)
    tensors = tiny_eagle_tensors(model.config, "eagle3", 9) | {"mask_hidden": torch.randn(1, 1, 3 * 48)}
    config = save_eagle_head(path / "p-eagle", model.config, tensors) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ptd_token_id": MASK}))
    dflash = dflash_config(48, VOCAB, MASK, [0, 1], num_target_layers=3)
    save_dflash(path / "dflash", dflash, dflash_tensors(48, 2))
    return path


@pytest.fixture(scope="module")
def knowing_dir(tmp_path_factory) -> Path:
    """A target that looks at nothing but its last token, with a head that knows what it says."""
    path = tmp_path_factory.mktemp("knowing")
    model = make_tiny_model("llama", 4, VOCAB, 2, 48, 4, 2)
    save_knowing_target(path, model)
    return path


@pytest.fixture(scope="module")
def published_dir(tmp_path_factory) -> Path:
    """A target that the published layouts are for."""
    path = tmp_path_factory.mktemp("published")
    size, layers = published_heads.TARGET_SIZE, published_heads.LAYERS
    make_tiny_model("llama", 3, published_heads.VOCAB, layers, size, 4, 2).save_pretrained(path)
    return path


def options_of(path: Path, head: str, ranks: int, depth: int = 2) -> TargetGroupOptions:
    directory = str(path / head) if head else "none"
    return TargetGroupOptions(
        device="cpu", dtype="float32", kv_cache_tokens=512, block_size=4, tensor_parallel=ranks,
        eagle_head=MTP_HEAD if head == MTP_HEAD else directory, eagle_depth=depth, eagle_top_k=3,
    )  # fmt: skip


def decode(engine, levels: int | None = None) -> tuple[list[list[int]], list[tuple[list[int], list[int]]], int]:
    """Texts, the trees of all rounds (tokens and parents) and the number of accepted nodes. Each round verifies what
    the head has drafted after the one before; the longer prompt comes in chunks. levels: told to a head on a
    device."""
    texts, known = [list(prompt) for prompt in PROMPTS], [0, 0]
    trees: list[DraftTree] = [DraftTree.empty()] * len(PROMPTS)
    drafted, accepted = [], 0
    for number in range(ROUNDS):
        items = []
        for index, text in enumerate(texts):
            begin = SequenceStart(SAMPLINGS[index], len(PROMPTS[index])) if known[index] == 0 else None
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            items.append(VerifyItem(delta, 12, trees[index], begin, 7, head_levels=levels))
            known[index] = len(text)
        result = engine.answer(VerifyBatch(number, items))
        for verdict in result.verdicts:
            index = verdict.seq_id - 1
            if verdict.next_token >= 0:
                texts[index] += [int(trees[index].token_ids[node]) for node in verdict.path] + [verdict.next_token]
                accepted += len(verdict.path)
        trees = [DraftTree.empty()] * len(PROMPTS)
        for seq_id, tree in zip(result.drafted_seq_ids, result.drafts, strict=True):
            trees[seq_id - 1] = tree
            drafted.append((tree.token_ids.tolist(), tree.parents.tolist()))
    return texts, drafted, accepted


def run_rank(rank: int, ring, answers, path: Path, head: str, attention: str, fails: bool, levels: int | None) -> None:
    model_runner.choose_attention = head_drafter.choose_attention = lambda device: attention
    engine = build_target_engine(ModelSource("tiny", "tiny", path), options_of(path, head, 2), rank=rank)
    own: list[DraftTree] = []
    plain = engine.eagle_head.propose

    def propose(asked):
        if fails and rank == 1 and own:
            raise RuntimeError("injected")
        own.extend(trees := plain(asked))
        return trees

    engine.eagle_head.propose = propose
    if rank == 1:
        if fails:
            with pytest.raises(RuntimeError, match="injected"):
                follow(engine, ring)
            return  # which ends the process, and with it the group
        follow(engine, ring)
        answers.put(("drafts", [(tree.token_ids.tolist(), tree.parents.tolist()) for tree in own if len(tree)]))
    else:
        leading = LeadingRank(engine, ring)
        if fails:
            with pytest.raises(EngineBroken, match="RuntimeError"):
                decode(leading)
            return
        answers.put(("said", decode(leading, levels)))
        leading.stop()
    check_integrity(engine)


def on_two_ranks(path: Path, head: str, attention: str, fails: bool = False, levels: int | None = None) -> dict:
    with ranks_at_work(2, run_rank, path, head, attention, fails, levels) as answers:
        return {} if fails else dict(answers.get(timeout=ANSWER_WITHIN_S) for _ in range(2))


ATTENTION = ("padded", "triton_tree")
QUICK = (("eagle", "padded"), ("eagle3 reduced", "padded"), ("eagle3", "padded"))


@pytest.mark.parametrize(
    ("head", "attention"),
    [
        # The others are slow together.
        pytest.param(head, attention, marks=[] if (head, attention) in QUICK else pytest.mark.slow)
        for head in (*HEADS, *ONE_PASS)
        for attention in ATTENTION
    ],
)
def test_two_ranks_with_a_head_give_the_tokens_of_one_without(model_dir, head, attention):
    assert_two_ranks_are_as_one(model_dir, head, attention)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *(pytest.param(n, "padded", marks=[] if n == QUICK_LAYOUT else pytest.mark.slow) for n in LAYOUTS),
        *(pytest.param(n, "triton_tree", marks=pytest.mark.slow) for n in (QUICK_LAYOUT, "EAGLE-3.1")),
    ],
)
def test_two_ranks_with_a_head_as_published_give_the_tokens_of_one_without(published_dir, name, attention):
    LAYOUTS[name][0]().save(published_dir / name)
    assert_two_ranks_are_as_one(published_dir, name, attention)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "mimo" else pytest.mark.slow) for f in MTP_FAMILIES]
)
def test_two_ranks_with_an_mtp_head_give_the_tokens_of_one_without(tmp_path, family):
    getattr(mtp_checkpoints, family)().save(tmp_path)
    assert_two_ranks_are_as_one(tmp_path, MTP_HEAD, "padded")


def assert_two_ranks_are_as_one(path: Path, head: str, attention: str) -> None:
    source = ModelSource("tiny", "tiny", path)
    wanted, drafted, _ = decode(build_target_engine(source, options_of(path, head, 1)))
    said = on_two_ranks(path, head, attention)
    texts, trees, _ = said["said"]
    assert texts == wanted
    plain, nothing, _ = decode(build_target_engine(source, options_of(path, "", 1)))
    assert nothing == []
    assert [text[: len(own)] for text, own in zip(texts, plain, strict=True)] == plain
    assert trees == drafted
    assert len(trees) >= 2 * ROUNDS - 2
    assert said["drafts"] == trees, "the other rank drafts something else"


@pytest.mark.parametrize("attention", ["padded", pytest.param("triton_tree", marks=pytest.mark.slow)])
def test_two_ranks_accept_what_a_knowing_head_drafts(knowing_dir, attention):
    alone = build_target_engine(ModelSource("tiny", "tiny", knowing_dir), options_of(knowing_dir, "head", 1))
    wanted = decode(alone)
    assert wanted[2] > ROUNDS
    assert on_two_ranks(knowing_dir, "head", attention)["said"] == wanted


@pytest.mark.slow
def test_two_ranks_expand_the_same_levels_where_not_all_pay(model_dir):
    source = ModelSource("tiny", "tiny", model_dir)
    wanted, drafted, _ = decode(build_target_engine(source, options_of(model_dir, "eagle3", 1, depth=1)))
    said = on_two_ranks(model_dir, "eagle3", "triton_tree", levels=1)
    texts, trees, _ = said["said"]
    assert (texts, trees) == (wanted, drafted)
    assert said["drafts"] == trees


def test_a_head_that_fails_on_one_rank_ends_the_group(model_dir):
    on_two_ranks(model_dir, "eagle", "padded", fails=True)
