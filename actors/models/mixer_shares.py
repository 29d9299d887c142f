"""Shares the heads of recurrent mixers out over ranks.

Each kind of mixer has a plan: which of its weights have outputs by head or channel, side by side, and which linears
take heads in and are summed over ranks. A rank keeps the weights, the convolution and the state of its heads alone.
Mixers are cut after loading, so each rank has read them whole. A mixer that cannot be divided stays whole on each rank:
one whose norm is over all heads, or whose heads the ranks do not divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.models.collectives import rank_of_group
from actors.models.shards import summed_rows


@dataclass(frozen=True, slots=True)
class MixerPlan:
    """How the heads of a kind of mixer are shared out. Names are paths from the mixer."""

    counts: tuple[str, ...]  # attributes of which each rank has its share
    # Modules, parameters and buffers by what their outputs are, side by side: sizes, which are attributes or products
    # of them; none: all outputs are one part
    parts: Mapping[str, tuple[str, ...]]
    summed: tuple[str, ...]  # linears whose inputs are shared out, and whose outputs are summed
    whole: tuple[str, ...] = ()  # parts that each rank has whole


_CHANNELS = ("conv.in_channels",)
_SHORT_CONVOLUTION = MixerPlan((), {"in_proj": _CHANNELS * 3, "conv": ()}, ("out_proj",))
_INNER, _GROUPS = "intermediate_size", "n_groups*ssm_state_size"
_MAMBA_PROJECTION = (_INNER, _INNER, _GROUPS, _GROUPS, "num_heads")  # gate, inputs, B, C, time steps
_MAMBA_2 = MixerPlan(
    ("num_heads", _INNER, "n_groups"),
    {
        "in_proj": _MAMBA_PROJECTION,
        "mup_vector": _MAMBA_PROJECTION,
        "conv1d": _MAMBA_PROJECTION[1:4],
        "norm": (),
        "dt_bias": (),
        "A_log": (),
        "D": (),
    },
    ("out_proj",),
)
_MAMBA_2_OF_ONE_GROUP = replace(_MAMBA_2, counts=("num_heads", _INNER), whole=(_GROUPS,))
_MAMBA_1 = MixerPlan(
    (_INNER,),
    {"in_proj": (_INNER,) * 2, "conv1d": (), "dt_proj": (), "A_log": (), "D": ()},
    ("x_proj", "out_proj"),
)
_QUERIES_KEYS_VALUES = ("key_dim", "key_dim", "value_dim")
_DELTA_COUNTS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")
_DELTA_PARTS: Mapping[str, tuple[str, ...]] = {"conv1d": _QUERIES_KEYS_VALUES, "dt_bias": (), "A_log": ()}
_DELTA_BY_KEY_HEAD = MixerPlan(_DELTA_COUNTS, {**_DELTA_PARTS, "in_proj_qkvz": (), "in_proj_ba": ()}, ("out_proj",))
_DELTA = MixerPlan(
    _DELTA_COUNTS,
    {**_DELTA_PARTS, "in_proj_qkv": _QUERIES_KEYS_VALUES, "in_proj_z": (), "in_proj_b": (), "in_proj_a": ()},
    ("out_proj",),
)
_DELTA_OF_LINEARS = MixerPlan(
    _DELTA_COUNTS,
    {**_DELTA_PARTS, **dict.fromkeys(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), ())},
    ("o_proj",),
)
_DELTA_BY_CHANNEL = MixerPlan(
    ("num_heads", "qkv_dim", "forget_gate.num_heads", "forget_gate.qkv_dim"),
    {
        "conv1d": ("qkv_dim",) * 3,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj"), ()),
        **dict.fromkeys(("forget_gate.f_b_proj", "forget_gate.dt_bias", "forget_gate.A_log"), ()),
    },
    ("o_proj",),
)

# By the classes of mixers. Not here are MiniMax's, whose norm is over all heads.
_PLANS: Mapping[str, MixerPlan] = {
    "Lfm2ShortConv": _SHORT_CONVOLUTION,
    "Lfm2MoeShortConv": _SHORT_CONVOLUTION,
    "Lfm3ShortConv": _SHORT_CONVOLUTION,
    "Qwen3NextGatedDeltaNet": _DELTA_BY_KEY_HEAD,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "OlmoHybridGatedDeltaNet": _DELTA_OF_LINEARS,
    "KimiLinearDeltaAttention": _DELTA_BY_CHANNEL,
    "BambaMixer": _MAMBA_2,
    "GraniteMoeHybridMambaLayer": _MAMBA_2,
    "NemotronHMamba2Mixer": _MAMBA_2,
    "FalconH1Mixer": _MAMBA_2,
    "JambaMambaMixer": _MAMBA_1,
}


@torch.no_grad()
def divide_mixers(model: PreTrainedModel) -> None:
    """Keep, of each recurrent mixer of a model that was loaded with tensor parallelism, this rank's heads, in place."""
    rank, ranks = rank_of_group()
    for mixer in list(model.modules()):
        plan = _plan_of(mixer, ranks)
        if plan is not None:
            _divide(mixer, plan, rank, ranks)


def _plan_of(mixer: nn.Module, ranks: int) -> MixerPlan | None:
    plan = _PLANS.get(type(mixer).__name__)
    if plan is _MAMBA_2 and mixer.n_groups == 1 and isinstance(mixer.norm, nn.Identity):
        plan = _MAMBA_2_OF_ONE_GROUP
    if plan is None:
        return None
    sizes = [*plan.counts, *(size for parts in plan.parts.values() for size in parts if size not in plan.whole)]
    return None if any(_size(mixer, size) % ranks for size in sizes) else plan


def _divide(mixer: nn.Module, plan: MixerPlan, rank: int, ranks: int) -> None:
    for path, parts in plan.parts.items():
        sizes = [(_size(mixer, part), part in plan.whole) for part in parts]
        for owner, name in _tensors(mixer, path):
            tensor = getattr(owner, name)
            share = _share(tensor, sizes, rank, ranks)
            setattr(owner, name, nn.Parameter(share, requires_grad=False) if name in owner._parameters else share)
    for path in plan.summed:
        linear = cast("nn.Linear", mixer.get_submodule(path))
        linear.weight = nn.Parameter(linear.weight.chunk(ranks, dim=1)[rank].clone(), requires_grad=False)
        setattr(mixer, path, summed_rows(linear, splits_input=False))
    for module in mixer.modules():
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
    for path in (*plan.counts, *(("norm.n_groups",) if "n_groups" in plan.counts else ())):
        owner, name = _owner(mixer, path)
        if hasattr(owner, name):
            setattr(owner, name, getattr(owner, name) // ranks)
    if hasattr(mixer, "conv_dim"):
        mixer.conv_dim = len(mixer.conv1d.weight)


def _size(mixer: nn.Module, size: str) -> int:
    """size: attributes, joined by `*`"""
    return math.prod(int(attrgetter(name)(mixer)) for name in size.split("*"))


def _owner(mixer: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return mixer.get_submodule(parent), name


def _tensors(mixer: nn.Module, path: str) -> list[tuple[nn.Module, str]]:
    """Owners and names of a module's own parameters, or of the one parameter or buffer; none if there is nothing."""
    owner, name = _owner(mixer, path)
    found = getattr(owner, name, None)
    if isinstance(found, nn.Module):
        return [(found, own) for own, _ in found.named_parameters(recurse=False)]
    return [] if found is None else [(owner, name)]


def _share(tensor: Tensor, sizes: list[tuple[int, bool]], rank: int, ranks: int) -> Tensor:
    """sizes: of the parts along the first dimension that is larger than 1, and whether each rank has them whole."""
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    sizes = sizes or [(tensor.shape[dim], False)]
    parts = tensor.split([size for size, _ in sizes], dim)
    own = [part if is_whole else part.chunk(ranks, dim)[rank] for part, (_, is_whole) in zip(parts, sizes, strict=True)]
    return torch.cat(own, dim)
