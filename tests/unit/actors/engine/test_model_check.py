"""The check of an architecture finds what an engine would compute wrongly, and refusals name what is missing.

That it finds all families right is in tests/lossless/test_model_families.py.
"""

import pytest
from transformers import CONFIG_MAPPING
from transformers.cache_utils import LinearAttentionLayer

from actors.engine import kv_bytes, model_check, model_runner
from actors.engine.kv_cache import KvCache
from actors.engine.layer_shapes import ShapeProbe
from actors.engine.model_check import ModelCheck, check_architecture, check_model_type
from actors.engine.recurrent.mixer_runs import MixerRun
from actors.engine.sequence import Sequence
from actors.models.tiny_config import config_of_type

# The attention of BERT's relatives is causal where they are decoders.
DECODER = {"is_decoder": True}


@pytest.mark.parametrize("model_type", ["llama", "stablelm", "nemotron", "llama4_text", "gptj", "bloom", "t5"])
def test_families_are_exact(model_type):
    assert check_model_type(model_type) == ModelCheck("exact")


@pytest.mark.parametrize(
    ("model_type", "options", "missing"),
    [
        ("mamba", {}, "recurrent state"),
        ("deepseek_v32", {}, "attention to chosen keys"),
        ("xglm", {}, "0 of 2 layers"),
        ("diffllama", {}, "attends more than once"),
        ("bert", {}, "later tokens"),
        ("roberta", DECODER, "counts positions from its padding token"),
        ("blt", {}, "no num_hidden_layers"),
        ("switch_transformers", {}, "experts of limited capacity"),
    ],
)
def test_what_is_missing_is_named(model_type, options, missing):
    result = check_architecture(CONFIG_MAPPING[model_type](**options))
    assert result.outcome == "refused"
    assert missing in result.reason


def test_an_encoders_family_is_exact_as_a_decoder():
    assert check_architecture(CONFIG_MAPPING["bert"](**DECODER)) == ModelCheck("exact")


def test_a_configuration_of_which_no_model_can_be_made_is_not_tried():
    result = check_architecture(CONFIG_MAPPING["llama"](hidden_act="none such"))
    assert result.outcome == "not tried"
    assert "none such" in result.reason


def test_wrong_positions_are_found(monkeypatch):
    for module in (kv_bytes, model_runner):
        monkeypatch.setattr(module, "check_layers", lambda *_: None)
    result = check_architecture(CONFIG_MAPPING["roberta"](**DECODER))
    assert (result.outcome, result.reason[:30]) == ("wrong", "logits of a part of a prompt d")


def test_keys_that_one_call_overwrites_for_another_are_found(monkeypatch):
    attend = ShapeProbe.attend
    monkeypatch.setattr(ShapeProbe, "attend", lambda probe, *a: (probe._shapes.clear(), attend(probe, *a))[1])
    monkeypatch.setattr(ShapeProbe, "shapes", lambda probe, count, *_: [*probe._shapes.values()] * count)
    assert check_model_type("diffllama").outcome == "wrong"


def test_a_cache_of_another_size_than_is_counted_is_found(monkeypatch):
    monkeypatch.setattr(model_check, "kv_bytes_per_token", lambda _: 7)
    result = check_model_type("llama")
    assert (result.outcome, result.reason[-13:]) == ("wrong", "7 are counted")


def test_accepted_drafts_that_are_not_moved_into_place_are_found(monkeypatch):
    monkeypatch.setattr(KvCache, "copy_slots", lambda *_: None)
    assert check_model_type("llama") == ModelCheck("wrong", "tokens of answers differ")


def test_a_recurrent_state_that_is_lost_between_rounds_is_found(monkeypatch):
    monkeypatch.setattr(MixerRun, "load", lambda *_: LinearAttentionLayer())
    result = check_model_type("lfm2")
    assert (result.outcome, result.reason[:22]) == ("wrong", "logits of a draft tree")


def test_a_prefix_cache_that_finds_nothing_is_found(monkeypatch):
    monkeypatch.setattr(Sequence, "reuse_prefix", lambda _: None)
    assert check_model_type("llama") == ModelCheck("wrong", "no cached prefix was found")


@pytest.mark.parametrize(
    ("owner", "method"),
    [(model_runner.ModelRunner, "run"), (model_check.TargetEngine, "verify")],
    ids=["run", "verify"],
)
def test_an_error_of_the_engine_is_a_result_and_no_traceback(monkeypatch, owner, method):
    def fail(*_):
        raise TypeError("forward() got an unexpected argument\n'bias'. Further sentences are left out")

    monkeypatch.setattr(owner, method, fail)
    assert str(check_model_type("llama")) == "wrong: TypeError: forward() got an unexpected argument 'bias'"


def test_a_model_whose_own_logits_are_no_numbers_is_not_tried():
    config = config_of_type("llama")
    config.rms_norm_eps = float("nan")
    assert check_architecture(config) == ModelCheck("not tried", "logits of the unpatched model are not finite")
