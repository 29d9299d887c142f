"""Models load as they are, and what cannot be served is refused before any weight is read."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config, ViTConfig, WhisperConfig

from actors.errors import ModelError
from actors.models.loader import (
    choose_device,
    load_config,
    load_draft_model,
    load_model,
    load_tokenizer,
    max_model_len,
    read_model_info,
)
from actors.models.random_model import random_model
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.training.seed_prompts import built_in_prompts, read_prompts
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model, save_tiny_model


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: ModelSource(kind, kind, save_tiny_model(root / kind, kind, seed=4)) for kind in TINY_KINDS}


@pytest.fixture
def copy_of(tmp_path, sources):
    """A copy of one tiny model that a test may spoil."""

    def make(kind="llama", name="copy"):
        return ModelSource(name, name, shutil.copytree(sources[kind].path, tmp_path / name))

    return make


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_tiny_model_survives_its_directory(sources, kind):
    model = load_model(sources[kind])
    fresh = make_tiny_model(kind, seed=4, vocab_size=259, eos_token_id=256)
    ids = torch.randint(0, 259, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(ids).logits, fresh(ids).logits)
    assert not torch.equal(fresh(ids).logits, make_tiny_model(kind, seed=5, vocab_size=259)(ids).logits)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"text_config": "x"},
        {"num_hidden_layers": None},
        {"eos_token_id": ["x"]},
    ],
    ids=str,
)
def test_values_of_a_configuration_that_have_a_wrong_type_are_refused(copy_of, values):
    source = copy_of()
    file = source.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    (source.path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=r"model 'copy': config\.json cannot be used: "):
        read_model_info(source)


def change_weights(source, *, without=(), extra=()):
    path = source.path / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if name not in without}
    save_file({**weights, **{name: torch.zeros(3) for name in extra}}, path, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("without", "extra", "told"),
    [
        ([UP], [], f"lacks {UP}"),
        ([UP], ["model.layers.1.mlp.odd"], f"lacks {UP}; it has, and its model has not, model.layers.1.mlp.odd"),
        ([], [f"model.layers.{i}.self_attn.q_proj.bias" for i in (0, 1)], "has not, model.layers.0.self_attn.q_proj"),
        ([], ["model.norm.bias"], "model.norm.bias"),
        ([f"model.layers.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in ("up", "gate")], [], "and 1 more"),
    ],
)
def test_weights_that_are_missing_and_ones_for_which_there_is_no_place_are_named(copy_of, without, extra, told):
    source = copy_of()
    change_weights(source, without=without, extra=extra)
    with pytest.raises(
        ModelError, match="model 'copy': its checkpoint (lacks|has).*" + re.escape(told.removeprefix("lacks "))
    ):
        load_model(source)


def test_a_checkpoint_may_have_more_layers_and_other_parts_than_the_model(copy_of):
    source = copy_of()
    extra = ["model.layers.2.mlp.up_proj.weight", "visual.blocks.0.mlp.weight", "mtp.fc.weight", "score.weight"]
    change_weights(source, extra=[*extra, "model.layers.0.self_attn.masked_bias"])
    load_model(source)


def without_prefix(source, prefix, extra):
    path = source.path / "model.safetensors"
    weights = {name.removeprefix(prefix): weight for name, weight in load_file(path).items()}
    save_file({**weights, **{name: torch.zeros(3) for name in extra}}, path, metadata={"format": "pt"})


def test_a_checkpoint_of_the_model_alone_has_unknown_weights_without_its_prefix(copy_of):
    source = copy_of()
    without_prefix(source, "model.", ["layers.2.mlp.up_proj.weight"])
    load_model(source)
    without_prefix(source, "model.", ["layers.1.self_attn.q_proj.bias"])
    with pytest.raises(ModelError, match=r"has, and its model has not, layers\.1\.self_attn\.q_proj\.bias"):
        load_model(source)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize(
    ("kind", "masks"),
    [("gptj", ["bias", "masked_bias"]), ("gpt2", ["bias", "masked_bias"]), ("codegen", ["causal_mask"])],
)
def test_causal_masks_that_are_stored_are_passed_over(tmp_path, kind, masks, prefix):
    random_model(tiny_config(config_of_type(kind))).save_pretrained(tmp_path)
    source = ModelSource(kind, kind, tmp_path)
    without_prefix(source, "transformer." if not prefix else "", [f"{prefix}h.0.attn.{mask}" for mask in masks])
    load_model(source)


def test_positions_that_transformers_computes_need_not_be_stored(tmp_path):
    """Published checkpoints of Pegasus have none."""
    random_model(tiny_config(config_of_type("pegasus"))).save_pretrained(tmp_path)
    source = ModelSource("pegasus", "pegasus", tmp_path)
    sides = ("encoder", "decoder")
    change_weights(source, without=[f"model.{side}.embed_positions.weight" for side in sides])
    model = load_model(source)
    for positions in (model.get_submodule(f"model.{side}.embed_positions") for side in sides):
        assert torch.equal(positions.weight, positions.create_weight())


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_model_is_described_without_its_weights(sources, kind):
    info = read_model_info(sources[kind], "served")
    assert (info.name, info.vocab_size, info.max_model_len, info.eos_token_ids) == ("served", 259, 1024, (256,))
    assert (info.num_layers, info.hidden_size) == (2, 64)
    assert load_model(sources[kind])(torch.tensor([[1]])).logits.shape[-1] == info.vocab_size


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("kind", "positions", "rope", "limit"),
    [
        (LlamaConfig, 4096, None, 4096),
        (GPT2Config, 512, None, 512),
        (Gemma3TextConfig, 131072, None, 131072),
        (LlamaConfig, 2048, {"rope_type": "linear", "factor": 4.0}, 8192),
        (LlamaConfig, 2048, {"rope_type": "dynamic", "factor": 2.0}, 2048),
        (Qwen3Config, 32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (Qwen3Config, 163840, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}, 163840),
        (LlamaConfig, 131072, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 131072),
        # Beyond 4096, every row of a batch would change with the longest.
        (LlamaConfig, 131072, {"rope_type": "longrope", "factor": 32.0, **LONGROPE}, 4096),
    ],
)
def test_rotary_scaling_stretches_the_longest_sequence_where_the_configuration_does_not_say_so(
    kind, positions, rope, limit
):
    options = {} if rope is None else {"rope_parameters": rope}
    assert max_model_len(kind(max_position_embeddings=positions, **options)) == limit


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 9], 5, (7, 9)), (7, 5, (7,)), (0, 5, (0,)), (None, [5, 6], (5, 6)), (None, None, (256,))],
)
def test_sequences_end_where_generate_would_end_them(copy_of, generation, config, expected):
    source = copy_of()
    (source.path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    data = source.read_json("config.json") | {"eos_token_id": config}
    (source.path / "config.json").write_text(json.dumps(data))
    assert read_model_info(source).eos_token_ids == expected


def test_fingerprints_agree_between_copies_and_differ_between_weights(sources, copy_of):
    here, there = sources["llama"], copy_of(name="elsewhere")
    assert here.weights_fingerprint() == there.weights_fingerprint()
    assert here.tokenizer_fingerprint() == there.tokenizer_fingerprint()
    file = there.path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3  # same shapes, same sizes
    save_file(weights, file, {"format": "pt"})
    assert here.weights_fingerprint() != there.weights_fingerprint()
    assert here.tokenizer_fingerprint() == there.tokenizer_fingerprint()
    (there.path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert here.tokenizer_fingerprint() != there.tokenizer_fingerprint()


@pytest.mark.parametrize("config", [WhisperConfig(), ViTConfig()], ids=["speech", "vision"])
def test_what_is_no_language_model_is_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=config.model_type):
        load_config(ModelSource("x", "x", tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "no_such_type"}'])
def test_a_configuration_that_says_nothing_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as error:
        read_model_info(ModelSource("x", "x", tmp_path))
    assert "\n" not in str(error.value)


def test_code_that_comes_with_a_model_is_never_run(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load_model(ModelSource("x", "x", tmp_path))
    assert not marker.exists()


def test_weights_that_are_cut_short_are_refused(copy_of):
    source = copy_of()
    file = source.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="weights cannot be loaded"):
        load_model(source)


def test_a_model_without_tokenizer_says_so(copy_of):
    source = copy_of()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source.path / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(source)


@pytest.mark.parametrize("device", ["tpu", "gpu", "cuda:99", "cpu:x", "meta", ""])
def test_a_device_that_torch_does_not_have_is_refused(device):
    with pytest.raises(ModelError, match="device is "):
        choose_device(device)


def test_settings_that_cannot_be_met_are_named(sources):
    with pytest.raises(ModelError, match="tensor_parallel is 2"):
        load_model(sources["llama"], tensor_parallel=2)
    if not torch.cuda.is_available():
        assert choose_device("auto") == "cpu"
        with pytest.raises(ModelError, match="cuda:3"):
            load_model(sources["llama"], device="cuda:3")


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_reduced_draft_model_says_what_the_whole_one_says_in_its_own_words(copy_of, kind):
    source = copy_of(kind)
    assert load_draft_model(source).token_ids is None
    token_ids = torch.tensor([3, 40, 41, 200, 258], dtype=torch.int32)
    save_file({"token_ids": token_ids}, source.path / VOCAB_MAP_FILE)
    draft = load_draft_model(source)
    ids = torch.randint(0, 259, (1, 20), generator=torch.Generator().manual_seed(0))
    whole = load_model(source)(ids).logits
    assert torch.equal(draft.token_ids, token_ids.long())
    torch.testing.assert_close(draft.model(ids).logits, whole[..., token_ids.long()])
    assert not draft.model.training
    assert not any(parameter.requires_grad for parameter in draft.model.parameters())


@pytest.mark.parametrize("token_ids", [[3, 2], [3, 3], [-1, 2], [2, 259], [], [[1, 2]]])
def test_a_vocabulary_map_that_is_no_rising_row_of_ids_is_refused(copy_of, token_ids):
    source = copy_of()
    save_file({"token_ids": torch.tensor(token_ids, dtype=torch.int64)}, source.path / VOCAB_MAP_FILE)
    with pytest.raises(ModelError, match="token_ids"):
        load_draft_model(source)


def test_a_vocabulary_map_that_is_no_map_is_refused(copy_of):
    source = copy_of()
    (source.path / VOCAB_MAP_FILE).write_bytes(b"garbage")
    with pytest.raises(ModelError, match="cannot be read"):
        load_draft_model(source)


def test_built_in_prompts_are_many_and_the_same_for_the_same_seed():
    def first(count, seed):
        stream = built_in_prompts(seed)
        return [next(stream) for _ in range(count)]

    prompts = first(600, 0)
    assert prompts == first(600, 0)
    assert prompts != first(600, 1)
    assert len(set(prompts)) > 450
    assert all(prompt.strip() and "{" not in prompt for prompt in prompts)


def test_prompts_come_from_lines_of_several_shapes(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"one"\n\n{"prompt": "two"}\n{"turns": ["three", "later"], "category": "x"}\n')
    assert read_prompts(path) == ["one", "two", "three"]


def test_prompts_may_hold_line_breaks_that_json_allows_and_follow_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"one\u2028more"\n"two\x85more"\r\n', encoding="utf-8-sig")
    assert read_prompts(path) == ["one\u2028more", "two\x85more"]


@pytest.mark.parametrize("text", ["", "not json", "[" * 100_000, "3", '{"text": "a"}', '{"turns": []}', '"  "'])
def test_lines_that_hold_no_prompt_are_refused_with_their_place(tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_text('"one"\n' * bool(text) + text)
    with pytest.raises(ModelError, match=r"p\.jsonl:2" if text else "holds no prompts"):
        read_prompts(path)
