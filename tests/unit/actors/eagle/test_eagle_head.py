"""EAGLE checkpoints: both published formats are read, and what does not fit is refused with names and shapes."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from actors.eagle.head_loading import load_eagle_head
from actors.errors import ModelError
from paceline_testing.tiny_models import make_tiny_model, save_eagle_head, tiny_eagle_tensors

TARGET = make_tiny_model("llama", vocab_size=61, layers=4, hidden_size=32).config
HEADS = {
    "eagle": ("eagle", {}),
    "eagle without bias": ("eagle", {"has_bias": False}),
    "eagle3": ("eagle3", {}),
    "eagle3 reduced": ("eagle3", {"draft_vocab_size": 23}),
}


def tensors_of(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    kind, options = HEADS[name]
    return tiny_eagle_tensors(TARGET, kind, seed, **options)


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("name", HEADS)
def test_both_formats_give_the_tensors_that_were_saved(tmp_path, name, file_format):
    tensors = tensors_of(name)
    save_eagle_head(tmp_path, TARGET, tensors)
    if file_format == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save({**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    head = load_eagle_head(tmp_path, TARGET)
    prefix = "midlayer." if HEADS[name][0] == "eagle3" else "layers.0."
    loaded = {key.replace("layers.0.", prefix): value for key, value in head.state_dict().items()}
    assert loaded.keys() == tensors.keys() - {"d2t", "t2d"}
    assert all(torch.equal(value, tensors[key]) for key, value in loaded.items())
    assert head.kind == HEADS[name][0]
    assert head.feature_layers == ((2, 2, 1) if head.kind == "eagle3" else None)
    if "d2t" in tensors:
        assert head.draft_ids.tolist() == torch.nonzero(tensors["t2d"])[:, 0].tolist()
    else:
        assert head.draft_ids is None
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_dtype_attention_biases_own_embedding_and_rope_are_those_of_the_checkpoint(tmp_path):
    tensors = tensors_of("eagle3 reduced")
    tensors |= {
        f"midlayer.self_attn.{name}_proj.bias": torch.full((size,), 0.5) for name, size in (("q", 32), ("k", 8))
    }
    tensors["embed_tokens.weight"] = torch.ones(61, 32)
    save_eagle_head(tmp_path, TARGET, tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    head = load_eagle_head(tmp_path, TARGET, "bfloat16")
    assert {value.dtype for value in head.state_dict().values()} == {torch.bfloat16}
    assert head.layers[0].self_attn.q_proj.bias.tolist() == [0.5] * 32
    assert head.layers[0].self_attn.v_proj.bias is None
    assert head.embed_tokens.weight.shape == (61, 32)
    assert head.rotary_emb.inv_freq[1] == pytest.approx(5e5 ** (-2 / 8))
    assert head.kv_bytes_per_token() == 2 * 8 * 2


def broken(key: str, value: torch.Tensor | None, name: str = "eagle3 reduced"):
    tensors = tensors_of(name)
    if value is None:
        del tensors[key]
    else:
        tensors[key] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken("fc.weight", None), r"key 'fc.weight' of shape \[32, 96\] is missing"),
        (broken("fc.weight", torch.ones(32, 64)), r"rs: key 'fc.weight' has shape \[32, 64\]; expected \[32, 96\]"),
        (broken("fc.weight", torch.ones(32, 96, dtype=torch.int32)), "'fc.weight' is torch.int32; expected floating"),
        (broken("midlayer.hidden_norm.weight", None), r"'midlayer.hidden_norm.weight' of shape \[32\] is missing"),
        (
            broken("layers.0.self_attn.q_proj.weight", torch.ones(32, 64), "eagle"),
            r"'layers.0.self_attn.q_proj.weight' has shape \[32, 64\]; expected \[32, 32\]",
        ),
        (broken("layers.1.mlp.up_proj.weight", torch.ones(2), "eagle"), r"'layers.1.mlp.up_proj.weight' .* is unknown"),
        (broken("lm_head.weight", torch.ones(61, 32), "eagle"), r"key 'lm_head.weight' .* is unknown"),
        (broken("d2t", torch.zeros(23, dtype=torch.int64), "eagle"), "key 'd2t' belongs to EAGLE-3 alone"),
        (broken("d2t", None), "draft_vocab_size is 23 of 61; the checkpoint lacks the key 'd2t'"),
        (broken("d2t", torch.zeros(22, dtype=torch.int64)), r"'d2t' has shape \[22\] of torch.int64; expected \[23\]"),
        (broken("d2t", torch.zeros(23)), r"'d2t' has shape \[23\] of torch.float32; expected \[23\] of integers"),
        (broken("d2t", torch.full((23,), 50)), "'d2t' leads to tokens 50 to 72 of 61"),
        (broken("d2t", -torch.arange(23)), "'d2t' leads two columns to the same token"),
        (broken("t2d", torch.ones(61, dtype=torch.bool)), r"'t2d' of shape \[61\] does not mark the tokens of 'd2t'"),
        (broken("t2d", torch.ones(60, dtype=torch.bool)), r"'t2d' of shape \[60\] .* expected shape \[61\]"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_shape_is_refused_with_key_and_shapes(tmp_path, tensors, message):
    with pytest.raises(ModelError, match=message):
        load_eagle_head(save_eagle_head(tmp_path, TARGET, tensors), TARGET)


def test_directories_and_files_that_are_no_head_are_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no such directory"):
        load_eagle_head(tmp_path / "nowhere", TARGET)
    with pytest.raises(ModelError, match=r"config.json: there is no such file"):
        load_eagle_head(tmp_path, TARGET)
    save_eagle_head(tmp_path, TARGET, tensors_of("eagle"))
    with pytest.raises(ModelError, match=r"config.json: hidden_size is 32; the target's hidden_size is 64"):
        load_eagle_head(tmp_path, make_tiny_model("llama", vocab_size=61).config)
    with pytest.raises(ModelError, match=r"config.json: vocab_size is 61; the target's is 1086, and padding explains"):
        load_eagle_head(tmp_path, LlamaConfig(hidden_size=32, vocab_size=1086))
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read"):
        load_eagle_head(tmp_path, TARGET)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither a .safetensors file nor a pytorch_model.bin"):
        load_eagle_head(tmp_path, TARGET)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="something else than tensors by name"):
        load_eagle_head(tmp_path, TARGET)
    torch.save(tensors_of("eagle"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "vocab_size": 61, "num_attention_heads": 5}')
    with pytest.raises(ModelError, match=r"config.json"):
        load_eagle_head(tmp_path, TARGET)
    save_eagle_head(tmp_path / "deep", TARGET, tensors_of("eagle3"))
    with pytest.raises(ModelError, match="the target has 2 layers; EAGLE-3 reads the inputs of three"):
        load_eagle_head(tmp_path / "deep", make_tiny_model("llama", vocab_size=61, layers=2, hidden_size=32).config)


class _Planted:
    def __reduce__(self):
        return (print, ("this ran",))


def test_a_pickle_runs_no_code(tmp_path, capsys):
    save_eagle_head(tmp_path, TARGET, tensors_of("eagle"))
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({**weights, "fc.weight": _Planted()}))
    with pytest.raises(ModelError, match=r"pytorch_model.bin: cannot be read"):
        load_eagle_head(tmp_path, TARGET)
    torch.save({**weights, "fc.weight": _Planted()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: cannot be read"):
        load_eagle_head(tmp_path, TARGET)
    assert "this ran" not in capsys.readouterr().out
