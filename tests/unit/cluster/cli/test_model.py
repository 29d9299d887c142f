"""`paceline model check`."""

import json

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": [128001, 128008, 128009],
    "quantization_config": {"quant_method": "fp8"},
}


def test_a_directory_needs_no_weights(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert run("model", "check", tmp_path)[:2] == (0, "exact\n")


def test_layers_of_a_directory_are_its_own(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | {"model_type": "lfm2", "full_attn_idxs": [1]}))
    assert run("model", "check", tmp_path)[:2] == (0, "chain only\n")


def test_a_model_type_that_is_refused_ends_with_1_and_the_reason(run):
    status, out, _ = run("model", "check", "mamba2")
    assert status == 1
    assert out.startswith("refused: mamba2 has layers of type linear_attention (a recurrent state)")
    assert out.count("\n") == 1


def test_what_is_neither_a_model_type_nor_a_directory_is_named(refuse, tmp_path):
    assert refuse("model", "check", "llama9") == "transformers knows no model type 'llama9'"
    assert "config.json cannot be used" in refuse("model", "check", tmp_path)
