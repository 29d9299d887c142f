"""The classic mistakes of speculative decoders, each as one test on the whole path. What a part has a closer test of
its own for (distributions, processors, the automaton) is not repeated here."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.draft_tree import DraftTree, TopProbs
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.drafters.registry import create_drafter
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import (
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyItem,
    decode_message,
    encode_message,
    no_tokens,
)
from actors.sampling.processors import process_logits
from actors.sampling.sampler import SequenceSampling, draft_with_probs, rows_for, sample_tokens
from actors.sampling.verification import verify_rejections
from cluster.config import ClusterConfig, RouterConfig, SpeculationConfig
from cluster.offline.engine import LocalEngine
from cluster.router.core import RouterCore
from paceline_testing.integrity import check_integrity
from paceline_testing.rounds import serve, texts_of, toy_info, toy_request
from paceline_testing.tiny_models import make_byte_tokenizer, make_tiny_model, save_tiny_model
from paceline_testing.toy_target import ToyTarget

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 61
GREEDY = SamplingParams(seed=1, temperature=0.0)
SHAPE = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "max_positions": 256}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=2, **SHAPE)


@pytest.fixture(scope="module")
def engine(target_dir) -> LocalEngine:
    """All drafters at once; the draft model is the target, so that drafts are right nearly always."""
    return LocalEngine(str(target_dir), draft_model=str(target_dir), device="cpu", kv_cache_tokens=4096)


def target_engine(exact: str = "default", prefix_cache: bool = True) -> TargetEngine:
    model = make_tiny_model("llama", seed=3, vocab_size=VOCAB, layers=2)
    return TargetEngine(model, EngineOptions(64, 4, prefix_cache, exact))


def greedy_of(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


# 1: the end of sequence inside a draft


def test_an_end_token_ends_the_answer_wherever_it_falls_in_a_round(engine):
    prompt = list(b"one two three one two three one")
    options = {"temperature": 1.0, "seed": 4, "ignore_eos": True}
    whole = engine.generate([prompt], max_new_tokens=24, **options)[0].token_ids
    first_of = {token: index for index, token in reversed(list(enumerate(whole)))}
    assert len(first_of) > 8
    for token, index in first_of.items():  # index 0 is the first token of all, others lie in drafts or are bonus tokens
        ended = engine.generate([prompt], max_new_tokens=24, stop_token_ids=[token], **options)[0]
        assert (ended.token_ids, ended.finish_reason) == (whole[:index], "stop")


# 2: a full match yields the bonus token


def test_a_draft_that_is_right_to_its_last_node_yields_one_token_more():
    truth = greedy_of(make_tiny_model("llama", seed=3, vocab_size=VOCAB, layers=2), [7, 3, 9], 6)
    for depth in range(6):
        begin = SequenceStart(GREEDY, 3)
        delta = SequenceDelta(1, 0, np.array([7, 3, 9], np.int32))
        chain = DraftTree.chain(np.array(truth[:depth], np.int32), np.zeros(depth))
        item = VerifyItem(delta, 99, chain, begin)
        verdict = target_engine().verify(VerifyBatch(1, [item])).verdicts[0]
        assert [*(truth[node] for node in verdict.path), verdict.next_token] == truth[: depth + 1]


# 3: adversarial pairs of draft and target


class Liar(CpuDrafter):
    """Drafts what another table says: sometimes by chance the target's own."""

    name = "liar"

    def __init__(self, table: ToyTarget, rng: np.random.Generator) -> None:
        self.table, self.rng = table, rng

    def propose(self, contexts):
        return [self._tree(context.tokens.tolist(), context.max_nodes) for context in contexts]

    def _tree(self, tokens: list[int], max_nodes: int) -> DraftTree:
        nodes: dict[tuple[int, int], None] = {}
        texts = [tokens]
        for index in range(max_nodes):
            parent = int(self.rng.integers(-1, len(nodes))) if self.rng.random() < 0.3 else index - 1
            parent = min(parent, len(nodes) - 1)
            token = self.table.next_token(texts[parent + 1])
            if (parent, token) not in nodes:
                nodes[(parent, token)] = None
                texts.append([*texts[parent + 1], token])
        parents, ids = (np.array([node[side] for node in nodes], np.int32) for side in (0, 1))
        return DraftTree(ids, parents, np.full(len(nodes), 0.9, np.float32))


def test_two_hundred_pairs_of_random_tables_give_the_text_of_the_target_alone():
    rng = np.random.default_rng(0)
    accepted = drafted = 0
    for seed in range(200):
        vocab = int(rng.integers(2, 6))  # few tokens, so that wrong tables are often right
        target = ToyTarget(vocab, order=int(rng.integers(1, 3)), seed=seed, eos_token_id=0, mean_length=15)
        liar = Liar(ToyTarget(vocab, order=1, seed=int(rng.integers(0, 400)) if seed % 4 else seed), rng)
        core = RouterCore(
            toy_info(vocab, 256, 4), RouterConfig(), SpeculationConfig(drafters=("liar",)), {"liar": liar}
        )
        prompts = [rng.integers(0, vocab, length) for length in (1, 2)]
        requests = [toy_request(str(index), prompt, 30, stop_token_ids=(0,)) for index, prompt in enumerate(prompts)]
        for request in requests:
            core.add(request, 0.0)
        text = texts_of(serve(core, target.verify))
        for request in requests:
            assert text[request.request_id] == target.complete(request)[0]
        accepted += core.counters.accepted_tokens["liar"]
        drafted += core.counters.draft_tokens
    assert 0 < accepted < drafted


# 5: logits are shared and not for writing


def test_nobody_writes_into_the_logits_it_is_given():
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    for params in (
        SamplingParams(seed=1, temperature=0.0, repetition_penalty=1.5),
        SamplingParams(seed=1, temperature=0.6, top_k=9, top_p=0.8, min_p=0.01, frequency_penalty=1.0),
        SamplingParams(seed=1, temperature=1.0, logit_bias=((3, 5.0),), acceptance="rejection"),
    ):
        sampling = SequenceSampling(params, 2)
        sampling.extend(np.array([5, 6, 7], np.int32))
        paths = [np.arange(depth, dtype=np.int32) for depth in range(4)]
        rows = rows_for([sampling], np.zeros(4, np.int64), np.arange(3, 7), paths)
        sample_tokens(logits, rows)
        process_logits(logits, rows)
        _, ids, probs = draft_with_probs(logits, rows, 8)
        top = TopProbs(ids[:3].flatten().to(torch.int32).numpy(), probs[:3].flatten().numpy(), 8)
        verify_rejections(logits, rows, [np.arange(3, dtype=np.int32)], [top])
        assert torch.equal(logits, before)


# 6: what fills up a batch is no token


def test_token_zero_everywhere_is_a_word_like_any_other():
    model = make_tiny_model("llama", seed=3, vocab_size=VOCAB, layers=2)
    with torch.no_grad():  # what a text of zeros looks like inside is what makes it say zero
        inside = model.model(torch.zeros(1, 3, dtype=torch.int64)).last_hidden_state[0, -1]
        model.get_output_embeddings().weight[0] = inside * 20.0 / inside.square().sum()
    prompts = [[0] * length for length in (1, 2, 7, 12)]
    wanted = [greedy_of(model, prompt, 4) for prompt in prompts]
    engine = TargetEngine(model, EngineOptions(64, 4))
    items = []
    for seq_id, prompt in enumerate(prompts):  # ragged: drafts of 0 to 3 zeros in a chain
        nodes = seq_id % 4
        chain = DraftTree.chain(np.zeros(nodes, np.int32), np.zeros(nodes))
        delta = SequenceDelta(seq_id, 0, np.array(prompt, np.int32))
        items.append(VerifyItem(delta, 99, chain, SequenceStart(GREEDY, len(prompt))))
    verdicts = engine.verify(VerifyBatch(1, items)).verdicts
    assert any(len(verdict.path) for verdict in verdicts)
    for verdict, truth in zip(verdicts, wanted, strict=True):
        zeros = next((index for index, token in enumerate(truth) if token != 0), 4)
        assert len(verdict.path) == min(zeros, verdict.seq_id % 4)
        assert verdict.next_token == truth[len(verdict.path)]
    check_integrity(engine)


# 9: draft models unlike their target


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("gpt2", {"layers": 1, "hidden_size": 32, "heads": 2}),
        ("gemma3", {"layers": 3, "hidden_size": 64, "heads": 8, "kv_heads": 1, "sliding_window": 5}),
        ("qwen3", {"layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 2, "vocab_size": 384}),
    ],
)
def test_a_draft_model_of_another_shape_and_padded_vocabulary_changes_nothing(target_dir, tmp_path, kind, shape):
    draft = save_tiny_model(tmp_path, kind, 8, **shape)
    if "vocab_size" in shape:  # it likes to say what the target has no word for
        weights = load_file(draft / "model.safetensors")
        weights["lm_head.weight"][259:] *= 3.0
        save_file(weights, draft / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(target_dir).eval()
    prompts = [list(b"a prompt"), list(b"another one")]
    engine = LocalEngine(
        str(target_dir), draft_model=str(draft), drafters=("draft_model",), device="cpu", kv_cache_tokens=4096
    )
    answers = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == [greedy_of(reference, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaled_positions_and_heads_wider_than_the_model_are_kept(target_dir, tmp_path, drafts_pay, scaling):
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=24, max_position_embeddings=256, initializer_range=0.5,
        rope_parameters={"rope_theta": 10_000.0, **scaling}, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    prompts = [list(b"a prompt that is longer than forty tokens, so"), list(b"another one")]
    options = {"drafters": ("draft_model",), "branch": 1, "device": "cpu", "kv_cache_tokens": 4096}
    same = LocalEngine(str(tmp_path), draft_model=str(tmp_path), **options)
    answers = same.generate(prompts, max_new_tokens=24, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == [greedy_of(model, prompt, 24) for prompt in prompts]
    for answer in answers:  # what the draft model says is what it would say as a target
        assert answer.accepted_tokens["draft_model"] >= 0.9 * answer.draft_tokens > 9
    reference = AutoModelForCausalLM.from_pretrained(target_dir).eval()
    other = LocalEngine(str(target_dir), draft_model=str(tmp_path), **options)
    answers = other.generate(prompts, max_new_tokens=12, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == [greedy_of(reference, prompt, 12) for prompt in prompts]


# 10: large vocabularies


def test_ids_beyond_sixteen_bits_survive_drafters_and_wire():
    ids = np.array([70_000, 128_255, 151_935, 200_018] * 4, np.int32)
    item = VerifyItem(SequenceDelta(1, 0, ids), 1, DraftTree.chain(ids[:2], np.zeros(2)))
    received = decode_message(encode_message(VerifyBatch(1, [item])))
    assert isinstance(received, VerifyBatch)
    assert received.items[0].delta.token_ids.tolist() == ids.tolist()
    for name in ("prompt_lookup", "suffix"):  # those that need nothing but the sequence
        tree = create_drafter(name).propose([DraftContext(1, ids, 0, len(ids), 6, GREEDY)])[0]
        assert tree.token_ids[:4].tolist() == ids[:4].tolist()
    logits = torch.full((1, 200_064), -20.0)
    logits[0, 200_018] = 20.0
    for temperature in (0.0, 1.0):
        sampling = SequenceSampling(SamplingParams(seed=1, temperature=temperature, presence_penalty=0.1), 1)
        sampling.extend(ids)
        rows = rows_for([sampling], np.zeros(1, np.int64), np.array([16]), [no_tokens()])
        assert sample_tokens(logits, rows).tolist() == [200_018]


# 13: KV from chunks, drafts and the prefix cache


def test_bitwise_an_answer_is_the_same_from_chunks_from_the_prefix_cache_and_from_one_prefill():
    prompt = np.arange(30, dtype=np.int32)

    def logits_after(engine: TargetEngine, seq_id: int, max_rows: int) -> list[torch.Tensor]:
        """Logits of the last prompt row and of a node behind it."""
        runner = engine._runner
        seen: list[torch.Tensor] = []
        plain = runner.forward

        def keep(batch, logit_rows):
            seen.append(plain(batch, logit_rows))
            return seen[-1]

        runner.forward = keep
        start = 0
        while True:
            begin = SequenceStart(GREEDY, len(prompt)) if start == 0 else None
            delta = SequenceDelta(seq_id, start, prompt[start:])
            tree = DraftTree.chain(np.array([5]), np.zeros(1))
            verdict = engine.verify(VerifyBatch(1, [VerifyItem(delta, max_rows, tree, begin)])).verdicts[0]
            start = len(prompt)
            if verdict.next_token >= 0:
                runner.forward = plain
                return [row.clone() for row in seen[-1]]

    whole = logits_after(target_engine("bitwise", prefix_cache=False), 1, 99)
    assert len(whole) == 2
    for max_rows in (1, 7, 29):
        chunks = logits_after(target_engine("bitwise", prefix_cache=False), 1, max_rows)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(chunks[-2:], whole, strict=True))
    warm = target_engine("bitwise")
    logits_after(warm, 1, 7)
    warm.verify(VerifyBatch(2, [], [1]))
    cached = logits_after(warm, 2, 99)
    assert warm._table._sequences[2].num_cached == 28
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(cached, whole, strict=True))


# 14: memory does not grow with vocabulary times length


@pytest.mark.parametrize("exact", ["default", "bitwise"])
def test_a_long_prompt_asks_for_the_logits_of_its_last_row_only(exact):
    engine = target_engine(exact)
    head = engine._runner.model.get_output_embeddings()
    rows = []
    head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[-2]))
    prompt = np.arange(200, dtype=np.int32) % VOCAB
    engine.verify(VerifyBatch(1, [VerifyItem(SequenceDelta(1, 0, prompt), 999, begin=SequenceStart(GREEDY, 200))]))
    assert max(rows) <= 16


# 15: counts are of tokens


def test_counts_add_up_to_the_tokens_that_came_out(engine):
    prompts = [list("züri größe züri größe".encode()), list(b"abc abc abc")]
    for answer in engine.generate(prompts, max_new_tokens=20, ignore_eos=True):
        accepted = sum(answer.accepted_tokens.values())
        assert len(answer.token_ids) == 20 <= answer.rounds + accepted
        assert accepted <= answer.draft_tokens
        assert answer.target_rows == len(answer.prompt_token_ids) + answer.rounds - 1 + answer.draft_tokens
        assert answer.tokens_per_second == pytest.approx(20 / answer.seconds)


# 17: nothing that comes from outside is run


def test_no_module_unpickles_evaluates_or_trusts_remote_code():
    for path in [path for package in ("actors", "cluster", "cache_service") for path in (ROOT / package).rglob("*.py")]:
        name = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
                continue
            where = f"{name}:{node.lineno}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}, where
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    assert node.func.id not in {"eval", "exec", "compile"}, where
                constants = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    called = (node.func.value.id, node.func.attr)
                    assert called != ("yaml", "load"), where
                    # The only safe way to read the older checkpoints: tensors and plain containers, no code.
                    assert called != ("torch", "load") or constants.get("weights_only") is True, where
                if "trust_remote_code" in constants:
                    assert constants["trust_remote_code"] is False, where


POISON = 250  # a token whose embedding is not a number, as after an overflow


@pytest.fixture(scope="module", params=["fused", "unfused", "bitwise"])
def poisoned(request, target_dir, tmp_path_factory) -> LocalEngine:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("nan")
    path = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(target_dir, path, dirs_exist_ok=True)
    model.save_pretrained(path)
    config = ClusterConfig.model_validate({"target": {"enforce_eager": request.param == "unfused"}})
    exact = "bitwise" if request.param == "bitwise" else "default"
    return LocalEngine(
        str(path), config=config, draft_model="none", device="cpu", kv_cache_tokens=1024, batch_size=4, exact=exact
    )


def test_what_is_not_finite_stays_in_its_own_request(poisoned):
    """Weights of what a row does not see are zero, and zero times NaN is NaN: in the cache, in a batch, in a tree."""
    shared = list(range(30, 70))
    clean = [[5, 6, 9], shared[:30], [*shared, 11, 12], [8]]
    wanted = [answer.token_ids for answer in poisoned.generate(clean, max_new_tokens=12, ignore_eos=True)]
    assert all(len(set(tokens)) > 2 for tokens in wanted)
    bad = [[*shared, POISON, 11], [POISON], [3, POISON, 4], [9] * 20 + [POISON]]
    together = poisoned.generate([*bad, *clean], max_new_tokens=12, ignore_eos=True)
    after = poisoned.generate(clean, max_new_tokens=12, ignore_eos=True)
    assert [answer.token_ids for answer in together[len(bad) :]] == wanted
    assert [answer.token_ids for answer in after] == wanted
    predictions = [[*tokens[:2], POISON, *tokens[2:8], POISON, *tokens] for tokens in wanted]
    drafted = poisoned.generate(clean, max_new_tokens=12, ignore_eos=True, predictions=predictions)
    assert [answer.token_ids for answer in drafted] == wanted
