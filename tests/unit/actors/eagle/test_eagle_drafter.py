"""What a head drafts from the engine's caches is what the written algorithm gives when everything is computed anew.

Covers `actors.engine.feature_tap` and `actors.engine.hidden_state_drafter`, too.
"""

import math
from collections.abc import Hashable
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from actors.draft_tree import DraftTree
from actors.eagle import head_drafter
from actors.eagle.device_growth import level_tier, num_nodes
from actors.eagle.eagle_drafter import EagleDrafter
from actors.eagle.head_loading import load_eagle_head
from actors.engine import model_runner
from actors.engine.hidden_state_drafter import HeadRows
from actors.engine.options import EngineOptions
from actors.engine.recorded_launches import RecordedLaunches
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.options import AttentionBackend, EagleOptions
from paceline_testing.drafting import paths_of
from paceline_testing.head_trees import likeliest_tree
from paceline_testing.integrity import check_integrity
from paceline_testing.op_graph import OpGraphs
from paceline_testing.plain_rotation import rotated
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model, save_eagle_head, tiny_eagle_tensors
from tests.gpu.launches import counted

VOCAB, SIZE, HEADS, EPS = 61, 32, 4, 1e-5
HEAD_KINDS = {"eagle": ("eagle", {}), "eagle3": ("eagle3", {}), "eagle3 reduced": ("eagle3", {"draft_vocab_size": 23})}
GREEDY = SamplingParams(seed=1, temperature=0.0)
PLACES = ("padded", "triton_tree")


def target_model(kind: str = "llama", layers: int = 4) -> PreTrainedModel:
    return make_tiny_model(kind, 3, VOCAB, layers, SIZE, HEADS, 2, sliding_window=6)


def head_tensors(name: str, model: PreTrainedModel, seed: int = 11) -> dict[str, torch.Tensor]:
    kind, options = HEAD_KINDS[name]
    return tiny_eagle_tensors(model.config, kind, seed, **options)


class Place(NamedTuple):
    """How a head attends, and where it and its target are."""

    attention: AttentionBackend = "padded"
    device: str = "cpu"


HOST = Place()


# Interpreted kernels take seconds: one kind of head stands for the others there.
SOME_ON_DEVICES = pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name, place, marks=pytest.mark.slow if place == "triton_tree" and name in ("eagle", "eagle3") else ()
        )
        for name in HEAD_KINDS
        for place in PLACES
    ],
    indirect=["place"],
)


@pytest.fixture(params=PLACES)
def place(request, triton_device) -> Place:
    """With Triton the head's trees grow on the device."""
    return HOST if request.param == "padded" else Place(request.param, str(triton_device))


def make_engine(
    path, name: str, kind: str = "llama", exact: str = "default", place: Place = HOST, **head: int
) -> TargetEngine:
    model = target_model(kind)
    save_eagle_head(path, model.config, head_tensors(name, model))
    # Compiling for a GPU would take longer than a test.
    options = EngineOptions(200, 4, exact=exact, is_eager=place.device != "cpu")
    loaded = load_eagle_head(path, model.config, device=place.device)
    return with_head(model.to(place.device), loaded, options, EagleOptions(**head), place.attention)


def with_head(
    model, head, options: EngineOptions, head_options: EagleOptions, attention: AttentionBackend = "padded"
) -> TargetEngine:
    engine = TargetEngine(model, options)
    engine.attach_head(EagleDrafter(model, head, options.num_slots, head_options, attention))
    return engine


# The reference: plain torch, one row list, full recomputation for every node.


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def causal_attention(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    query = rotated((x @ w["self_attn.q_proj.weight"].T).view(len(x), HEADS, -1))
    key = rotated((x @ w["self_attn.k_proj.weight"].T).view(len(x), 1, -1))
    value = x @ w["self_attn.v_proj.weight"].T
    scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    mixed = torch.einsum("hqk,kd->qhd", scores.softmax(-1), value)
    return mixed.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T


class Reference:
    """A head on one text: `rows` are inputs so far, each computed from nothing whenever it is asked for."""

    def __init__(self, name: str, kind: str = "llama") -> None:
        self.model = model = target_model(kind)
        self.tensors = tensors = head_tensors(name, model)
        self.is_eagle3 = "norm.weight" in tensors
        prefix = "midlayer." if self.is_eagle3 else "layers.0."
        self.w = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        self.embed = model.get_input_embeddings()
        self.head = tensors["lm_head.weight"] if self.is_eagle3 else model.get_output_embeddings().weight

    def features(self, tokens: list[int]) -> torch.Tensor:
        output = self.model(torch.tensor([tokens]), output_hidden_states=True)
        states = output.hidden_states  # the input of layer i is states[i]; the last one is normed
        if not self.is_eagle3:
            return states[-1][0]
        layers = self.model.config.num_hidden_layers
        return (
            torch.cat([states[2][0], states[layers // 2][0], states[layers - 3][0]], dim=-1)
            @ self.tensors["fc.weight"].T
        )

    def hidden(self, features: torch.Tensor, following: list[int]) -> torch.Tensor:
        """Hidden state of the last row. features [rows, h] as the layer takes them; following: the token after each."""
        embedded = self.embed(torch.tensor(following))
        w = self.w
        if self.is_eagle3:
            x = features
            wide = torch.cat(
                [normed(embedded, w["input_layernorm.weight"]), normed(x, w["hidden_norm.weight"])], dim=-1
            )
            x = x + causal_attention(w, wide)
        else:
            x = torch.cat([embedded, features], dim=-1) @ self.tensors["fc.weight"].T + self.tensors["fc.bias"]
            x = x + causal_attention(w, x)
        inner = normed(x, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inner @ w["mlp.gate_proj.weight"].T)
        return (x + (gate * (inner @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T)[-1]

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Over the target's vocabulary, -inf where the head has no column."""
        if self.is_eagle3:
            hidden = normed(hidden, self.tensors["norm.weight"])
        scores = (hidden @ self.head.T).log_softmax(-1)
        if "d2t" not in self.tensors:
            return scores
        whole = torch.full((VOCAB,), -math.inf)
        whole[self.tensors["d2t"] + torch.arange(len(scores))] = scores
        return whole

    def tree(
        self, tokens: list[int], depth: int, top_k: int, max_nodes: int, min_confidence: float = 0.0
    ) -> dict[tuple[int, ...], float]:
        """Paths of the tree behind `tokens`, with their probabilities."""
        base = self.features(tokens[:-1])

        def expand(path: tuple[int, ...], hiddens: tuple[torch.Tensor, ...]):
            features = torch.cat([base, *(hidden[None] for hidden in hiddens)])
            hidden = self.hidden(features, tokens[1:] + list(path))
            return hidden, self.log_probs(hidden)

        return likeliest_tree(expand, depth, top_k, max_nodes, min_confidence)


def likely_paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    assert tree.is_valid(VOCAB)
    assert (np.diff(tree.confidence) <= 0).all()  # every beginning is a tree of the likeliest nodes
    return dict(zip(paths_of(tree), tree.confidence.tolist(), strict=True))


class Text:
    """A sequence as a router keeps it: feeds the engine, collects tokens and the head's tree."""

    def __init__(self, seq_id: int, prompt: list[int], nodes: int = 12) -> None:
        self.seq_id, self.tokens, self.known, self.nodes = seq_id, list(prompt), 0, nodes
        self.num_prompt = len(prompt)
        self.computed = 0
        self.tree: DraftTree | None = None
        self.accepted = 0

    def item(self, max_rows: int = 1000, draft: DraftTree | None = None, sampling: SamplingParams = GREEDY):
        delta = SequenceDelta(self.seq_id, self.known, np.array(self.tokens[self.known :], np.int32))
        begin = SequenceStart(sampling, self.num_prompt) if self.known == 0 else None
        self.known = len(self.tokens)
        self.sent = draft
        return VerifyItem(delta, max_rows, draft, begin, self.nodes)

    def take(self, verdict) -> None:
        if verdict.next_token >= 0:
            self.accepted += len(verdict.path)
            self.tokens += [int(self.sent.token_ids[node]) for node in verdict.path] + [verdict.next_token]


def run(engine: TargetEngine, texts: list[Text], *items: VerifyItem, finished: list[int] = []):  # noqa: B006
    result = engine.verify(VerifyBatch(1, list(items), finished))
    check_integrity(engine)
    by_id = {text.seq_id: text for text in texts}
    for verdict in result.verdicts:
        by_id[verdict.seq_id].take(verdict)
        by_id[verdict.seq_id].tree = None
    for seq_id, tree in zip(result.drafted_seq_ids, result.drafts, strict=True):
        by_id[seq_id].tree = tree
    return result


def assert_tree(text: Text, reference: Reference, depth: int, top_k: int) -> None:
    wanted = reference.tree(text.tokens, depth, top_k, text.nodes)
    got = likely_paths(text.tree)
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, rel=1e-2, abs=1e-6)  # logits of random heads are large


def true_tree(model: PreTrainedModel, tokens: list[int], depth: int = 2) -> DraftTree:
    """A draft whose second branch is what the target will say, so that its path is accepted and has to move."""
    greedy = list(tokens)
    for _ in range(depth):
        greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    wrong = (greedy[len(tokens)] + 1) % VOCAB
    ids = [wrong, *greedy[len(tokens) :]]
    return DraftTree(
        np.array(ids, np.int32), np.array([-1, -1, *range(1, depth)], np.int32), np.ones(len(ids), np.float32)
    )


@pytest.mark.parametrize(
    ("name", "kind", "place"),
    [
        *((name, kind, "padded") for name in HEAD_KINDS for kind in TINY_KINDS),
        *(
            pytest.param(name, "llama", "triton_tree", marks=() if name == "eagle3 reduced" else pytest.mark.slow)
            for name in HEAD_KINDS
        ),
    ],
    indirect=["place"],
)
def test_the_tree_is_that_of_the_written_algorithm_round_after_round(tmp_path, name, kind, place):
    depth, top_k = 3, 4
    engine = make_engine(tmp_path, name, kind, place=place, depth=depth, top_k=top_k)
    reference = Reference(name, kind)
    text = Text(1, [5, 9, 33, 2, 9, 33, 7])
    run(engine, [text], text.item())
    assert_tree(text, reference, depth, top_k)
    for round in range(4):
        draft = true_tree(reference.model, text.tokens) if round % 2 else text.tree
        run(engine, [text], text.item(draft=draft))
        assert_tree(text, reference, depth, top_k)
    assert text.accepted >= 4


@SOME_ON_DEVICES
def test_batches_chunked_prompts_and_other_limits_change_no_tree(tmp_path, name, place):
    depth, top_k = 3, 5
    engine = make_engine(tmp_path, name, place=place, depth=depth, top_k=top_k)
    reference = Reference(name)
    rng = np.random.default_rng(0)
    texts = [
        Text(seq, rng.integers(0, VOCAB, size).tolist(), nodes)
        for seq, size, nodes in ((1, 3, 5), (2, 17, 30), (3, 26, 1), (4, 1, 12))
    ]
    for _ in range(6):  # the long prompts take several rounds, 7 rows at a time
        run(engine, texts, *(text.item(7, text.tree if text.seq_id != 2 else None) for text in texts))
        for text in texts:
            if text.tree is not None:
                assert_tree(text, reference, depth, top_k)
    assert all(len(text.tokens) > text.num_prompt and text.tree is not None for text in texts)


@pytest.mark.parametrize("name", HEAD_KINDS)
@pytest.mark.parametrize("min_confidence", [0.02, 0.3, 1.0])
def test_nodes_below_the_least_confidence_are_not_drafted_behind(tmp_path, name, min_confidence, monkeypatch):
    engine = make_engine(tmp_path, name, depth=5, top_k=4)
    reference = Reference(name)
    levels = []
    compute = EagleDrafter._forward
    monkeypatch.setattr(EagleDrafter, "_forward", lambda *given: (levels.append(1), compute(*given))[1])
    text = Text(1, [5, 9, 33, 2, 9, 33, 7], nodes=30)
    for _ in range(4):
        levels.clear()
        item = msgspec.structs.replace(text.item(draft=text.tree), head_min_confidence=min_confidence)
        result = run(engine, [text], item)
        wanted = reference.tree(text.tokens, 5, 4, 30, min_confidence)
        assert likely_paths(text.tree) == pytest.approx(wanted, rel=1e-2, abs=1e-6)
        assert len(levels) == max(map(len, wanted))  # no forward but for nodes that come out
        assert result.head_forwards == len(levels)
    levels.clear()
    nothing = np.array([0.0, 1.0, 0.0, 0.9], np.float32)  # a sure node brings less than the price of a level
    run(engine, [text], msgspec.structs.replace(text.item(draft=text.tree), head_worth=nothing))
    assert len(levels) == 1


@pytest.mark.parametrize("depth", range(1, 33))
def test_levels_that_pay_are_rounded_up_to_few_different_numbers(depth):
    tiers = [level_tier(levels, depth) for levels in range(2 * depth)]
    assert tiers == sorted(tiers)
    assert tiers[0] >= 1  # what follows right tokens is learnt in any case
    assert all(min(levels, depth) <= tier <= max(2 * levels, tiers[0]) for levels, tier in enumerate(tiers))
    assert tiers[-1] == level_tier(None, depth) == depth
    assert len(set(tiers)) <= 4


def test_a_device_expands_as_many_levels_as_it_is_told_and_drafts_the_beginning_of_the_full_tree(
    tmp_path, triton_device
):
    depth, top_k = 4, 2
    place = Place("triton_tree", str(triton_device))
    engine = make_engine(tmp_path, "eagle3 reduced", place=place, depth=depth, top_k=top_k)
    reference = Reference("eagle3 reduced")
    drafted = {}
    for levels in (None, 0, 2, 3, 9):  # some of them with the keys and values of a deeper tree in the scratch slots
        text = Text(1, [5, 9, 33, 2, 9, 33, 7], num_nodes(depth, top_k))
        run(engine, [text], msgspec.structs.replace(text.item(), head_levels=levels), finished=[1])
        draft = true_tree(reference.model, text.tokens)
        result = run(engine, [text], msgspec.structs.replace(text.item(draft=draft), head_levels=levels))
        expanded = level_tier(levels, depth)
        assert result.head_forwards == 1 + expanded
        assert_tree(text, reference, expanded, top_k)
        drafted[levels] = likely_paths(text.tree)
    assert drafted[None] == drafted[3] == drafted[9]
    for levels in (0, 2):
        most = 1 + level_tier(levels, depth)
        assert drafted[levels] == pytest.approx(
            {path: share for path, share in drafted[None].items() if len(path) <= most}, rel=1e-5
        )


def test_trees_grow_in_several_goes_when_there_are_many(tmp_path, monkeypatch, place):
    monkeypatch.setattr("actors.eagle.head_drafter.SCRATCH_SLOTS", 40)  # room for two trees of 4 levels
    engine = make_engine(tmp_path, "eagle3", place=place, depth=4, top_k=5)
    texts = [Text(seq, [seq, 2 * seq, 7], nodes=9) for seq in range(1, 6)]
    run(engine, texts, *(text.item() for text in texts))
    for text in texts:
        assert_tree(text, Reference("eagle3"), 4, 5)


def test_a_cached_prefix_keeps_what_the_head_knows_of_it(tmp_path):
    engine = make_engine(tmp_path, "eagle", depth=2, top_k=3)
    prompt = [5, 9, 33, 2, 9, 33, 7, 1, 1, 8, 20]
    first, second = Text(1, prompt), Text(2, prompt)
    run(engine, [first], first.item())
    result = run(engine, [second], second.item(), finished=[1])
    assert result.verdicts[0].num_cached == 8
    assert_tree(second, Reference("eagle"), 2, 3)


@SOME_ON_DEVICES
def test_rows_that_the_head_did_not_see_are_a_gap_and_cost_neither_tokens_nor_errors(tmp_path, name, place):
    engine = make_engine(tmp_path, name, place=place)
    plain = TargetEngine(target_model(), EngineOptions(200, 4))
    prompt = [5, 9, 33, 2, 9, 33, 7, 1, 1, 8, 20]
    texts = {engine: Text(1, prompt), plain: Text(1, prompt)}
    for round in range(6):
        for one, text in texts.items():
            text.nodes = 12 if round in (1, 2, 5) else -1
            result = run(one, [text], text.item())
            assert (text.tree is not None) == (one is engine and text.nodes > 0)
            assert (result.head_s > 0) == (text.tree is not None)
    assert texts[engine].tokens == texts[plain].tokens
    assert engine.eagle_head._is_known.sum() == 3  # prompt and rounds without the head: nothing


def test_rows_that_the_head_only_saw_are_no_gap(tmp_path):
    engine = make_engine(tmp_path, "eagle3", depth=2, top_k=3)
    text = Text(1, [5, 9, 33, 2, 9, 33, 7])
    for nodes in (0, 0, 12):
        text.nodes = nodes
        run(engine, [text], text.item(max_rows=5))
        assert (text.tree is not None) == (nodes > 0)
    assert_tree(text, Reference("eagle3"), 2, 3)


def test_a_head_in_bitwise_mode_sees_the_same_features(tmp_path):
    engine = make_engine(tmp_path, "eagle3", exact="bitwise", depth=2, top_k=3)
    text = Text(1, list(range(40)))  # three tiles of rows
    run(engine, [text], text.item())
    run(engine, [text], text.item(draft=text.tree))
    assert_tree(text, Reference("eagle3"), 2, 3)


def test_an_embedding_of_the_heads_own_is_used_and_a_copy_of_the_targets_is_shared(tmp_path):
    model = target_model()
    tensors = head_tensors("eagle3", model)
    trees = []
    for name, weight in (
        ("none", None),
        ("copy", model.get_input_embeddings().weight.clone()),
        ("own", torch.randn(VOCAB, SIZE)),
    ):
        saved = tensors if weight is None else {**tensors, "embed_tokens.weight": weight}
        save_eagle_head(tmp_path / name, model.config, saved)
        head = load_eagle_head(tmp_path / name, model.config)
        target = target_model()
        engine = with_head(target, head, EngineOptions(40, 4), EagleOptions())
        assert (engine.eagle_head._embedding is target.get_input_embeddings()) == (name != "own")
        text = Text(1, [5, 9, 33, 2])
        run(engine, [text], text.item())
        trees.append(likely_paths(text.tree))
    assert trees[0] == trees[1] != trees[2]


def test_more_expanded_nodes_than_a_word_has_bits_and_more_children_than_outputs(tmp_path, place):
    engine = make_engine(tmp_path, "eagle3 reduced", place=place, depth=4, top_k=30)
    text = Text(1, [5, 9, 33, 2, 9, 33, 7], nodes=120)
    run(engine, [text], text.item())
    assert_tree(text, Reference("eagle3 reduced"), 4, 30)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_tree_on_a_device_takes_one_copy_up_and_one_down_whatever_its_depth(tmp_path, depth):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    model = target_model()
    save_eagle_head(tmp_path, model.config, head_tensors("eagle3", model))
    head = load_eagle_head(tmp_path, model.config)
    drafter = EagleDrafter(
        model.to("meta"), head.to("meta"), 64, EagleOptions(depth=depth, top_k=4), attention="triton_tree"
    )
    slots = np.arange(9)
    for _ in range(2):  # the first time constants go up, too
        drafter.tap.open()
        with torch.inference_mode():
            model(torch.zeros((1, 9), dtype=torch.int64, device="meta"), paged_plan=None)
        with counted() as mode, torch.inference_mode():
            drafter.propose([HeadRows(0, slots + 1, slots, slots, max_nodes=8)] * 2)
    assert mode.counts["copies up"] == 1
    assert mode.counts["copies back"] == 1
    assert mode.counts["waits"] == 0


class Keys(RecordedLaunches):
    """Records nothing, and keeps what would be recorded."""

    def __init__(self) -> None:
        super().__init__(OpGraphs())
        self.launched: list[Hashable] = []

    def run(self, key, launch):
        self.launched.append(key)
        return launch()


def test_launches_have_as_many_shapes_as_there_are_tiers_whatever_pays(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    model = target_model()
    save_eagle_head(tmp_path, model.config, head_tensors("eagle3", model))
    head = load_eagle_head(tmp_path, model.config)
    options = EagleOptions(depth=7, top_k=4)
    drafter = EagleDrafter(model.to("meta"), head.to("meta"), 64, options, attention="triton_tree")
    drafter.launches = keys = Keys()
    slots, kernels = np.arange(9), {}
    for levels in (None, *range(10), 3, 0):
        drafter.tap.open()
        with torch.inference_mode():
            model(torch.zeros((1, 9), dtype=torch.int64, device="meta"), paged_plan=None)
        with counted() as mode, torch.inference_mode():
            drafter.propose([HeadRows(0, slots + 1, slots, slots, max_nodes=8, levels=levels)] * 2)
        kernels[levels] = mode.counts["kernels"]
    by_levels = dict(zip((None, *range(10)), keys.launched, strict=False))
    assert len(set(keys.launched)) == 4
    assert {levels for levels, key in by_levels.items() if key == by_levels[None]} == {None, *range(5, 10)}
    assert kernels[1] < kernels[2] < kernels[4] < kernels[7]
    # A level takes as many launches as any other.
    assert (kernels[2] - kernels[1]) * 3 == kernels[7] - kernels[4]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "eagle3" else pytest.mark.slow) for name in HEAD_KINDS]
)
def test_recorded_drafts_are_those_that_are_launched(tmp_path, monkeypatch, triton_device, name):
    """Two texts that come, go on with trees of any size, and end; the head's launches are replayed beside the
    target's."""
    for module in (model_runner, head_drafter):  # the CPU's own kernels are no operations of torch
        monkeypatch.setattr(module, "replace_linears", lambda model: False)
    monkeypatch.setattr(model_runner, "replace_norms", lambda model: None)
    model = target_model()
    save_eagle_head(tmp_path, model.config, head_tensors(name, model))
    recorder, said = OpGraphs(), []
    for is_recorded in (False, True):
        model = target_model().to(triton_device)
        # Compiled layers are no operations of torch either.
        options = EngineOptions(200, 4, attention="triton_tree", is_eager=triton_device.type == "cuda")
        head = load_eagle_head(tmp_path, model.config, device=str(triton_device))
        engine = TargetEngine(model, options)
        engine._runner._launches = RecordedLaunches(OpGraphs()) if is_recorded else None
        engine.attach_head(EagleDrafter(model, head, options.num_slots, EagleOptions(depth=2, top_k=3), "triton_tree"))
        assert (engine.eagle_head.launches is not None) == is_recorded
        if is_recorded:
            engine.eagle_head.launches = RecordedLaunches(recorder)  # which counts
        rng = np.random.default_rng(3)
        texts = [Text(number, rng.integers(0, VOCAB, 5 + number).tolist(), nodes=7) for number in (1, 2)]
        rounds, are_new = [], []
        for number in range(9):
            drafts = [text.tree if text.tree is None or number % 3 else text.tree.first(4) for text in texts]
            # Few levels and many, so that each is recorded.
            items = [text.item(draft=draft) for text, draft in zip(texts, drafts, strict=True)]
            levels = 1 if number % 2 else None
            items = [msgspec.structs.replace(item, head_levels=levels) for item in items]
            are_new.append(run(engine, texts, *items).head_is_new_shape)
            rounds.append([(text.tokens[:], likely_paths(text.tree)) for text in texts])
        said.append(rounds)
        assert (any(are_new), all(are_new)) == (is_recorded, False)
    assert said[0] == said[1]
    assert recorder.replays >= 3


def test_a_head_that_fails_costs_its_drafts_and_nothing_else(tmp_path, monkeypatch, caplog):
    engine = make_engine(tmp_path, "eagle")
    texts = [Text(1, [5, 9, 33]), Text(2, [5, 9, 33])]
    run(engine, texts, texts[0].item())
    monkeypatch.setattr(engine.eagle_head, "_grow", lambda *_: 1 / 0)
    run(engine, texts, texts[0].item(), texts[1].item())
    assert [text.tree for text in texts] == [None, None]
    assert texts[0].tokens[:4] == texts[1].tokens
    assert "the draft head failed" in caplog.text
    monkeypatch.undo()
    run(engine, texts, texts[0].item())
    assert texts[0].tree is not None


def test_a_head_that_fails_before_it_reads_what_was_captured_leaves_nothing_of_it(tmp_path, monkeypatch):
    engine = make_engine(tmp_path, "eagle")
    texts = [Text(1, [5, 9, 33])]
    monkeypatch.setattr(engine.eagle_head, "propose", lambda _: 1 / 0)
    run(engine, texts, texts[0].item())
    assert not engine.eagle_head.tap.is_open
    assert engine.eagle_head.tap.kept == {}


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": 33}, {"top_k": 65}])
def test_options_have_limits(options):
    with pytest.raises(ValidationError, match=rf"{next(iter(options))}\n.*than or equal to"):
        EagleOptions(**options)
