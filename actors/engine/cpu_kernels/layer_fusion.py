"""Finds decoder layers that run in one call on CPU, and tries each against the layer that it replaces."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engine.attention.interface import Scoring
from actors.engine.attention.padded import PaddedPlan
from actors.engine.batch import PackedBatch, SequenceRows, pack
from actors.engine.block_pool import BlockPool
from actors.engine.cpu_kernels.fused_layer import Attended, Chain, ChoosePanels, FusedLayer, LayerParts, Workspace
from actors.engine.cpu_kernels.panel_linear import PanelKernel
from actors.engine.cpu_kernels.threads import has_openmp
from actors.engine.cpu_kernels.weight_formats import PANEL
from actors.engine.decoder_layers import decoder_layers
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.sequence import Sequence
from actors.errors import ModelError
from actors.messages import SamplingParams, SequenceStart
from actors.models.loader import max_model_len
from actors.models.quantization import Int4Linear, Int8Linear

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
_TRIED_TOKENS = (70, 3)  # of two sequences: more than a block of keys, and few
_TRIED_PARENTS = np.array([-1, 0, 0, 2, -1, 4], dtype=np.int32)
_BLOCK_SIZE = 16
_TOLERANCE = 1e-4  # relative to the update that a layer adds, in float32
_PANELS = PanelKernel(in_blocks=False)  # which take long to find, and change no bit


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel, shapes: list[LayerShape], choose: ChoosePanels) -> int:
    """Replace layers of a CPU model in place by fused ones; the number of them.

    shapes: of the layers' keys and values. A layer stays if its modules have other code than Llama's and its kin, or if
    it gives other outputs in float32: constants and functions that the code names may differ.
    """
    if not has_openmp():
        logger.warning("layers run through torch's operators: torch's OpenMP runtime is missing")
        return 0
    try:
        layers = decoder_layers(model)
    except ModelError:
        return 0
    known = [index for index, layer in enumerate(layers) if parts_of(layer) is not None]
    if not known:
        logger.info("layers of %s run through torch's operators: their parts are not Llama's", type(model).__name__)
        return 0
    calls = _Calls(model, shapes)
    calls.record(layers)
    space, tried = Workspace(), Workspace()
    fused_layers: dict[int, FusedLayer] = {}
    for index in known:
        layer, attended = layers[index], calls.plan.attended.get(index)
        if attended is None or attended.head_dim % PANEL or not calls.agrees(layer, index, attended, tried):
            continue
        parts = parts_of(layer)
        assert parts is not None
        try:
            fused = FusedLayer(layer, parts, attended, space, choose)
        except RuntimeError as error:
            logger.debug("layer %d of %s is not fused: %s", index, type(model).__name__, error)
            continue
        if hasattr(layer, "attention_type"):  # read by models
            fused.attention_type = layer.attention_type
        layers[index] = fused_layers[index] = fused
    if _calls_layers_in_turn(model, layers):
        _chain_neighbours(fused_layers)
    return len(fused_layers)


def _calls_layers_in_turn(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Whether the calling module has the code of Llama or a relative: it runs all layers, and passes each the output of
    the one before."""
    callers = [module for module in model.modules() if any(child is layers for child in module.children())]
    return len(callers) == 1 and has_known_code(callers[0])


def _chain_neighbours(fused: Mapping[int, FusedLayer]) -> None:
    chain: list[FusedLayer] = []
    for index in range(max(fused, default=-1) + 2):
        if index in fused:
            chain.append(fused[index])
        else:
            if chain:
                Chain(chain)
            chain = []


class _TriedPlan(PaddedPlan):
    """Remembers how layers attend."""

    def __init__(self, batch: PackedBatch, kv: KvCache) -> None:
        super().__init__(batch, kv, torch.device("cpu"), batch.num_rows)
        self.attended: dict[int, Attended] = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        window = scoring.sliding_window or 0
        if window >= 0 and scoring.softcap is None and scoring.sinks is None and keys.shape[2] == values.shape[2]:
            _, heads, dim = query.shape
            self.attended[layer] = Attended(layer, heads, keys.shape[1], dim, scoring.scale, window)
        return super().attend(layer, query, keys, values, scoring)


class _Calls:
    """What each layer is called with in a forward of the model."""

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape]) -> None:
        self._model = model
        self._stored = shapes
        self._shapes = [shape._replace(dtype=torch.float32) for shape in shapes]
        config = model.config.get_text_config()
        self._batch = _tried_batch(int(config.vocab_size))
        # Far from the beginning, where layers that scale by position do so.
        self._first_position = max(0, max_model_len(config) - 2 * sum(_TRIED_TOKENS))
        self.plan = _TriedPlan(self._batch, self._cache(shapes))
        self._calls: dict[int, tuple[Tensor, Mapping[str, Any]]] = {}

    def record(self, layers: nn.ModuleList) -> None:
        def note(index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if len(args) < 2:
                self._calls[index] = args[0] if args else kwargs["hidden_states"], kwargs

        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs, index=index: note(index, args, kwargs), with_kwargs=True
            )
            for index, layer in enumerate(layers)
        ]
        try:
            self._model(
                input_ids=torch.from_numpy(self._batch.token_ids)[None],
                position_ids=torch.from_numpy(self._batch.positions)[None] + self._first_position,
                use_cache=False,
                logits_to_keep=1,
                paged_plan=self.plan,
            )
        finally:
            for hook in hooks:
                hook.remove()

    def agrees(self, layer: nn.Module, index: int, attended: Attended, space: Workspace) -> bool:
        """Whether a fused layer of the same weights in float32 gives the same outputs."""
        shape = attended.key_heads, attended.head_dim, attended.head_dim, next(layer.parameters()).dtype
        if index not in self._calls or self._stored[index] != LayerShape(*shape):
            return False
        hidden, kwargs = self._calls[index]
        angles = kwargs.get("position_embeddings")
        if not isinstance(angles, tuple) or len(angles) != 2 or angles[0].shape[-1] > attended.head_dim:
            return False
        hidden = hidden.float()
        layer = copy.deepcopy(layer).float()
        parts = parts_of(layer)
        assert parts is not None
        rest = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "paged_plan")}
        rest["position_embeddings"] = tuple(angle.float() for angle in angles)

        def outputs(one: nn.Module) -> Any:
            plan = PaddedPlan(self._batch, self._cache(self._shapes), hidden.device, hidden.shape[1])
            return one(hidden, **rest, paged_plan=plan)

        expected = outputs(layer)
        found = outputs(FusedLayer(layer, parts, attended, space, lambda *_: _PANELS))
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return False
        added = (expected - hidden).norm(dim=-1)
        # By rows, because one may be larger than all others by far. A layer that adds nothing shows nothing.
        return bool((added > 0.0).all() and ((found - expected).norm(dim=-1) <= _TOLERANCE * added).all())

    def _cache(self, shapes: list[LayerShape]) -> KvCache:
        slots = (int(self._batch.block_tables.max()) + 1) * _BLOCK_SIZE
        return KvCache(slots, torch.device("cpu"), shapes)


def _tried_batch(vocab_size: int) -> PackedBatch:
    rng = np.random.default_rng(0)
    pool = BlockPool(16, _BLOCK_SIZE, False)
    parts = []
    for number, count in enumerate(_TRIED_TOKENS):
        sequence = Sequence(number, SequenceStart(SamplingParams(seed=0, temperature=0.0), count), pool)
        sequence.extend(rng.integers(vocab_size, size=count, dtype=np.int32))
        parents = _TRIED_PARENTS if number == 0 else _TRIED_PARENTS[:1]
        sequence.reserve(count + len(parents))
        parts.append(
            SequenceRows(sequence, count, rng.integers(vocab_size, size=len(parents), dtype=np.int32), parents)
        )
    return pack(parts)


@lru_cache(maxsize=1)
def _known_code() -> frozenset[tuple[Any, ...]]:
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mistral import modeling_mistral as mistral
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    kinds = [
        *(llama.LlamaForCausalLM, mistral.MistralForCausalLM, qwen2.Qwen2ForCausalLM, qwen3.Qwen3ForCausalLM),
        *(llama.LlamaModel, mistral.MistralModel, qwen2.Qwen2Model, qwen3.Qwen3Model),
        *(llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm),
        *(mistral.MistralDecoderLayer, mistral.MistralAttention, mistral.MistralMLP, mistral.MistralRMSNorm),
        *(qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm),
        *(qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm),
    ]
    return frozenset(map(_code_of, kinds))


def has_known_code(module: nn.Module) -> bool:
    """Whether the forward of a module is Llama's or that of its kin."""
    return "forward" not in vars(module) and _code_of(type(module)) in _known_code()


def _code_of(kind: type[nn.Module]) -> tuple[Any, ...]:
    """What a forward does, whatever file it is in."""
    code = inspect.unwrap(kind.forward).__code__
    constants = [str(constant) for constant in code.co_consts if constant != kind.forward.__doc__]
    return code.co_code, code.co_names, code.co_varnames, tuple(constants)


def parts_of(layer: nn.Module) -> LayerParts | None:
    """None for a layer whose modules have other code than Llama's and its kin, or hooks."""
    if isinstance(layer, FusedLayer) or _code_of(type(layer)) not in _known_code():
        return None
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    if any(_code_of(type(one)) not in _known_code() for one in (attention, mlp, *norms, *head_norms)):
        return None
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    if any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in layer.modules()):
        return None
    parts = LayerParts(
        norms=norms,
        projections=[attention.q_proj, attention.k_proj, attention.v_proj],
        output=attention.o_proj,
        gates=[mlp.gate_proj, mlp.up_proj],
        down=mlp.down_proj,
        head_norms=head_norms,
    )
    return parts if _are_plain(parts) else None


def _are_plain(parts: LayerParts) -> bool:
    groups = [parts.projections, [parts.output], parts.gates, [parts.down]]
    linears = [linear for group in groups for linear in group]
    for group in groups:
        if len({(type(linear), linear.bias is None) for linear in group}) > 1:
            return False
    if any(
        type(linear) not in (nn.Linear, Int8Linear, Int4Linear) or getattr(linear, "product", None)
        for linear in linears
    ):
        return False
    norms = [*parts.norms, *parts.head_norms]
    eps = [getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms]
    if not all(isinstance(one, float) for one in eps) or any(getattr(norm, "weight", None) is None for norm in norms):
        return False
    computed = [linear.weight for linear in linears if type(linear) is nn.Linear] + [norm.weight for norm in norms]
    dtypes = {weight.dtype for weight in computed}
    stored = [linear.weight for linear in linears] + computed
    return (
        len(dtypes) == 1
        and dtypes <= set(_DTYPES)
        and all(type(weight.data) is Tensor and weight.device.type == "cpu" for weight in stored)
    )
