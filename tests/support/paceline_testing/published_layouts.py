"""The layouts of `published_heads` that are read."""

from __future__ import annotations

from collections.abc import Callable

from paceline_testing.published_heads import (
    TARGET_SIZE,
    VOCAB,
    Published,
    eagle,
    eagle3,
    eagle31,
    for_larger_target,
    norm_before_fc,
    speculators,
    whole_vocabulary,
)


def modelopt(norm_before_fc: bool = False) -> Published:
    """As NVIDIA's ModelOpt writes them: with `eagle_config`, and null where it has nothing to say."""
    head = eagle3(
        architectures=["LlamaForCausalLMEagle3"], attention_bias=False, mlp_bias=False, rope_scaling=None,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
        },
    )  # fmt: skip
    if norm_before_fc:
        head.config["eagle_config"]["norm_before_fc"] = True
        head.shapes["input_norm.weight"] = (3 * TARGET_SIZE,)
    return head


# Each layout with the layers whose inputs it reads, as indices of `output_hidden_states`.
LAYOUTS: dict[str, tuple[Callable[[], Published], tuple[int, ...]]] = {
    "EAGLE-1 with a bias, .bin": (lambda: eagle(file="pytorch_model.bin"), ()),
    "EAGLE-2 without a bias": (lambda: eagle(bias=False), ()),
    "EAGLE-1 of two layers": (lambda: eagle(layers=2), ()),
    "EAGLE-3": (eagle3, (2, 3, 3)),
    "EAGLE-3 for a larger target": (for_larger_target, (2, 3, 3)),
    "EAGLE-3 of two layers": (lambda: eagle3("layers.0.", layers=2), (2, 3, 3)),
    "EAGLE-3 with layers by their outputs": (lambda: eagle3(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), (2, 4, 6)),
    "EAGLE-3 with layers by their inputs": (lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), (2, 4, 5)),
    "EAGLE-3 with two layers in eagle_config": (
        lambda: eagle3(
            num_features=2, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4], "use_aux_hidden_state": True}
        ),
        (0, 4),
    ),
    "speculators": (speculators, (2, 3, 3)),
    "speculators, residual of the feature itself": (lambda: speculators(norm_before_residual=False), (2, 3, 3)),
    "EAGLE-3.1": (eagle31, (2, 3, 3)),
    "EAGLE-3 with a norm over all features": (norm_before_fc, (2, 3, 3)),
    "ModelOpt": (modelopt, (2, 4, 6)),
    "ModelOpt with a norm over all features": (lambda: modelopt(norm_before_fc=True), (2, 4, 6)),
    "EAGLE-3 with more tokens than the target": (lambda: whole_vocabulary(VOCAB + 3), (2, 3, 3)),
    "EAGLE-3 with fewer tokens than the target": (lambda: whole_vocabulary(VOCAB - 3), (2, 3, 3)),
}  # fmt: skip
