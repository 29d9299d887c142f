"""Refuses models whose layers the engine would compute wrongly, by what it lacks for them."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel

from actors.errors import ModelError
from actors.models.layer_types import ATTENDING, RECURRENT, layer_types
from actors.options import Exactness

_OF_CHOSEN_KEYS = (
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
)
_LACKED = {
    **dict.fromkeys(RECURRENT, "a recurrent state"),
    **dict.fromkeys(_OF_CHOSEN_KEYS, "attention to chosen keys"),
}


def check_layers(model: PreTrainedModel, exact: Exactness, computed: Collection[str] = ATTENDING) -> None:
    """Raises ModelError for types of layers, positions and experts that are not supported. computed: types of layers
    that are."""
    config = model.config.get_text_config()
    others = sorted(set(layer_types(config)) - {*computed})
    if others:
        named = ", ".join(f"{name} ({_LACKED[name]})" if name in _LACKED else name for name in others)
        raise ModelError(f"{config.model_type} has layers of type {named}; {', '.join(ATTENDING)} are computed")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.base_model.modules()):
        raise ModelError(f"{config.model_type} counts positions from its padding token on; they must begin at 0")
    experts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if exact == "bitwise" and any(experts):
        raise ModelError(
            f"exact is 'bitwise' and {config.model_type} has experts, whose rows are multiplied with whatever other "
            "rows chose the same one; it needs a model without"
        )
