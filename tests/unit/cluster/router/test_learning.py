"""What drafters learn (`cluster.router.teaching`): the contexts of verified rows with the target's predictions."""

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.draft_tree import DraftTree
from actors.drafters.contract import MAX_CONTEXT, CpuDrafter, DraftContext, VerifiedRows
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import (
    GenerationRequest,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    Successors,
    Verdict,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
)
from cluster.config import RouterConfig
from cluster.router.core import RouterCore
from cluster.router.learning import rows_of_prompt, successors_of
from paceline_testing.drafting import tree_to_verify
from paceline_testing.rounds import toy_core, toy_info, toy_request, toy_round
from paceline_testing.tiny_models import save_tiny_model

VOCAB = 50


class Pupil(CpuDrafter):
    """Drafts a fixed tree at every node and keeps all rows it is taught."""

    name = "pupil"
    num_successors = 3

    def __init__(self, token_ids: list[int] = (), parents: list[int] = ()) -> None:
        self.tree = DraftTree(
            np.array(token_ids, np.int32), np.array(parents, np.int32), np.full(len(token_ids), 0.9, np.float32)
        )
        self.taught: list[VerifiedRows] = []

    def propose(self, contexts: list[DraftContext]) -> list[DraftTree]:
        return [self.tree if context.max_nodes >= len(self.tree) else DraftTree.empty() for context in contexts]

    def remember(self, rows: VerifiedRows) -> None:
        self.taught.append(rows)


@pytest.fixture
def pupil():
    return Pupil()


def core_with(pupil: object, *requests: GenerationRequest, max_prefill_rows: int = 512) -> RouterCore:
    config = RouterConfig(max_prefill_rows=max_prefill_rows)
    return toy_core(toy_info(VOCAB, 1 << 14, 16), *requests, drafters={"pupil": pupil}, config=config)


def request(prompt: list[int], namespace: str = "a", request_id: str = "r") -> GenerationRequest:
    return toy_request(request_id, prompt, 20, namespace=namespace)


def test_every_prompt_token_is_a_context_of_the_next():
    rows = rows_of_prompt(np.array([7, 8, 9, 10, 11, 12], np.int32), 3, namespace="a", seq_id=1)
    assert rows.contexts.tolist() == [[-1, -1, -1, 7], [-1, -1, 7, 8], [-1, 7, 8, 9], [7, 8, 9, 10], [8, 9, 10, 11]]
    assert rows.token_ids[:, 0].tolist() == [8, 9, 10, 11, 12]
    assert rows.probs.tolist() == [[1.0, 0.0, 0.0]] * 5
    assert rows_of_prompt(np.array([7], np.int32), 3, namespace="a", seq_id=1).contexts.shape == (0, MAX_CONTEXT)


def test_the_rows_of_a_prompt_are_the_same_in_parts():
    prompt = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.int32)
    prompt.flags.writeable = False
    whole = rows_of_prompt(prompt, 3, namespace="a", seq_id=1)
    cuts = [0, 0, 1, 3, 4, 5, 20, 39]
    parts = [rows_of_prompt(prompt, 3, begin, end, namespace="a", seq_id=1) for begin, end in pairwise(cuts)]
    for name in ("contexts", "token_ids", "probs", "sequences"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    assert all(part.contexts.flags.writeable and part.contexts.flags.c_contiguous for part in parts)


def round_of(core: RouterCore, next_token: int, path: list[int], make) -> None:
    def verify(batch):
        assert batch.num_successors == 3
        verdicts = [
            Verdict(item.delta.seq_id, 0, item.max_rows, next_token, np.array(path, np.int32), 0, len(item.tree))
            for item in batch.items
        ]
        successors = make(len(batch.items), len(batch.items[0].tree))
        return VerifyResult(batch.round_id, verdicts, successors=successors)

    toy_round(core, verify)


def numbered(sequences: int, nodes: int) -> Successors:
    """Row r has successors 3 r, 3 r + 1, 3 r + 2, so that each row can be told from the others."""
    count = sequences * (1 + nodes) * 3
    return Successors(np.arange(count, dtype=np.int32), np.full(count, 0.25, np.float32), 3)


def test_rows_of_a_tree_have_the_path_to_them_as_context():
    pupil = Pupil([21, 22, 23], [-1, 0, 0])
    core = core_with(pupil, request([1, 2, 3, 4, 5]))
    round_of(core, 30, [0, 2], numbered)
    prompt, rows = pupil.taught
    assert prompt.token_ids[:, 0].tolist() == [2, 3, 4, 5]
    assert rows.namespace == "a"
    assert rows.contexts.tolist() == [[2, 3, 4, 5], [3, 4, 5, 21], [4, 5, 21, 22], [4, 5, 21, 23]]
    assert rows.token_ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert rows.sequences.tolist() == [prompt.sequences[0]] * 4
    round_of(core, 31, [], numbered)
    assert len(pupil.taught) == 3  # a prompt is taught once
    assert pupil.taught[2].contexts[0].tolist() == [5, 21, 23, 30]


def test_namespaces_are_taught_apart(pupil):
    core = core_with(pupil, request([1, 2, 3], "a", "one"), request([4, 5, 6], "b", "two"))
    round_of(core, 9, [], numbered)
    taught = {(rows.namespace, tuple(rows.contexts[-1].tolist())): rows for rows in pupil.taught}
    assert taught["a", (-1, 1, 2, 3)].token_ids.tolist() == [[0, 1, 2]]
    assert taught["b", (-1, 4, 5, 6)].token_ids.tolist() == [[3, 4, 5]]
    for namespace in "ab":
        seen = np.concatenate([rows.contexts.ravel() for rows in pupil.taught if rows.namespace == namespace])
        assert not set(seen.tolist()) & ({4, 5, 6} if namespace == "a" else {1, 2, 3})


def test_every_row_of_a_round_knows_the_row_of_its_parent_among_those_of_its_namespace():
    pupil = Pupil([21, 22, 23], [-1, 0, 0])
    core = core_with(pupil)
    for name, namespace in (("one", "a"), ("two", "b"), ("three", "a")):
        core.add(request([1, 2, 3], namespace, name), 0.0)
    round_of(core, 30, [], numbered)
    told = {rows.namespace: rows for rows in pupil.taught if len(rows.parents)}
    assert told["a"].parents.tolist() == [-1, 0, 1, 1, -1, 4, 5, 5]
    assert told["b"].parents.tolist() == [-1, 0, 1, 1]
    assert told["a"].sequences.tolist() == [
        one for one in dict.fromkeys(told["a"].sequences.tolist()) for _ in range(4)
    ]
    assert all(rows.namespace in told for rows in prompts_taught(pupil))  # whose rows have no parents


def test_only_rows_without_a_prompt_of_sequences_that_may_be_learnt_from_may_be_shared(pupil):
    core = core_with(pupil)
    for name in ("read", "read_write"):
        core.add(msgspec.structs.replace(request([1, 2, 3, 4, 5], "a", name), cache=name), 0.0)
    shared = []
    for token in range(30, 36):
        taught = len(pupil.taught)
        round_of(core, token, [], numbered)
        new = pupil.taught[taught:]
        assert sum(len(rows.contexts) for rows in new if len(rows.parents)) == 2
        shared.append([rows for rows in new if rows.may_share])
    assert [len(rows) for rows in shared] == [0, 0, 0, 0, 1, 1]
    (rows,) = shared[4]
    assert rows.contexts.tolist() == [[30, 31, 32, 33]]
    assert rows.parents.tolist() == [-1]
    assert not any(rows.may_share for rows in prompts_taught(pupil))


def prompts_taught(pupil: Pupil) -> list[VerifiedRows]:
    return [rows for rows in pupil.taught if (rows.probs[:, 0] == 1.0).all()]


def test_a_long_prompt_is_taught_in_parts_while_its_sequence_runs(pupil):
    prompt = np.random.default_rng(0).integers(0, VOCAB, 5000)
    core = core_with(pupil, request(prompt), request([1, 2, 3], "b", "short"), max_prefill_rows=1 << 14)
    counts = []
    for _ in range(5):
        first = len(prompts_taught(pupil))
        round_of(core, 9, [], numbered)
        counts.append(sum(len(rows.contexts) for rows in prompts_taught(pupil)[first:]))
    assert counts == [2048, 2048, 905, 0, 0]
    told = [rows for rows in prompts_taught(pupil) if rows.namespace == "a"]
    assert np.concatenate([rows.token_ids[:, 0] for rows in told]).tolist() == prompt[1:].tolist()
    assert np.concatenate([rows.contexts[:, -1] for rows in told]).tolist() == prompt[:-1].tolist()


def test_a_prompt_with_several_answers_is_taught_once(pupil):
    core = core_with(pupil)
    prompt = list(range(20))
    for answer in range(4):
        core.add(request(prompt, "a", f"answer {answer}"), 0.0)
    core.add(request([*prompt[:-1], 40], "a", "another prompt"), 0.0)
    core.add(request(prompt, "b", "another namespace"), 0.0)
    round_of(core, 9, [], numbered)
    core.add(request(prompt, "a", "late"), 0.0)
    round_of(core, 9, [], numbered)
    assert [(rows.namespace, len(rows.contexts)) for rows in prompts_taught(pupil)] == [("a", 19), ("a", 19), ("b", 19)]
    assert prompts_taught(pupil)[1].token_ids[-1, 0] == 40


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: msgspec.structs.replace(told, k=2),
        lambda told: msgspec.structs.replace(told, k=0),
        lambda told: msgspec.structs.replace(told, probs=told.probs[:-1]),
        lambda told: msgspec.structs.replace(told, token_ids=told.token_ids + VOCAB),
        lambda told: msgspec.structs.replace(told, token_ids=told.token_ids - 1),
        lambda told: msgspec.structs.replace(told, probs=told.probs * np.nan),
        lambda told: msgspec.structs.replace(told, probs=told.probs - 1),
        lambda told: msgspec.structs.replace(told, probs=told.probs + 1),
    ],
)
def test_successors_that_cannot_be_true_teach_nothing_and_the_round_goes_on(pupil, spoil):
    core = core_with(pupil, request([1, 2, 3]))
    round_of(core, 9, [], lambda *size: spoil(numbered(*size)))
    assert len(pupil.taught) == 1  # the prompt
    assert core.counters.emitted_tokens == 1


def test_negative_node_counts_are_refused():
    verdicts = [Verdict(1, 0, 1, 5, num_nodes=-1), Verdict(2, 0, 1, 5, num_nodes=1)]
    told = Successors(np.zeros(2, np.int32), np.zeros(2, np.float32), 1)
    assert successors_of(VerifyResult(1, verdicts, successors=told), VOCAB) is None


def test_a_drafter_that_cannot_learn_costs_nothing_else():
    class Failing(Pupil):
        def remember(self, rows: VerifiedRows) -> None:
            raise RuntimeError("no")

    core = core_with(Failing(), request([1, 2, 3]))
    round_of(core, 9, [], numbered)
    assert core.counters.emitted_tokens == 1
    assert core.counters.drafter_errors["pupil"] == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_row_of_a_round_is_told_what_the_unpatched_model_thinks_there(tmp_path: Path, temperature: float):
    """Two sequences, one with a tree: its root, accepted and rejected nodes, against `transformers` on each path."""
    save_tiny_model(tmp_path, "llama", 3, hidden_size=32, layers=2, heads=4, kv_heads=2, max_positions=128)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    engine = TargetEngine(AutoModelForCausalLM.from_pretrained(tmp_path), EngineOptions(64))
    begin = SequenceStart(SamplingParams(seed=5, temperature=temperature), 4)
    prompts = [[65, 66, 67, 68], [70, 71, 72]]
    tree, parents = [80, 81, 82, 83], [-1, -1, 0, 2]
    items = [
        VerifyItem(SequenceDelta(0, 0, np.array(prompts[0], np.int32)), 16, tree_to_verify(tree, parents), begin),
        VerifyItem(SequenceDelta(1, 0, np.array(prompts[1], np.int32)), 16, begin=begin),
    ]
    assert engine.verify(VerifyBatch(1, items)).successors is None
    result = engine.verify(VerifyBatch(1, items, num_successors=6))
    assert [verdict.num_nodes for verdict in result.verdicts] == [4, 0]
    token_ids, probs = successors_of(result, engine.vocab_size)
    paths = [prompts[0] + path for path in ([], [80], [81], [80, 82], [80, 82, 83])] + [prompts[1]]
    assert len(token_ids) == len(paths)
    for path, found_ids, found in zip(paths, token_ids, probs, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([path])).logits[0, -1].softmax(-1).numpy()
        np.testing.assert_allclose(found, np.sort(wanted)[::-1][:6], atol=1e-5)
        np.testing.assert_allclose(found, wanted[found_ids], atol=1e-5)
        assert len(set(found_ids.tolist())) == 6
