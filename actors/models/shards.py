"""A rank's part of a model, as plain layers with collectives of our own between them.

`transformers` loads the part and wraps every layer of it, which costs a tenth of a millisecond a call and keeps layers
from being compiled, merged and given kernels. The wrappers are taken off here; what they computed stays the same, but
for the output layer: a rank keeps the logits of its share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from actors.errors import ModelError
from actors.models.collectives import all_reduce, gather_columns, rank_of_group


class GatheredColumns(nn.Module):
    """A linear with a share of the outputs on each rank; every rank gets all of them."""

    def __init__(self, linear: nn.Module, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, out_features

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return gather_columns(self.linear(inputs), self.out_features)


class VocabularyShard(nn.Module):
    """An output layer with a share of the vocabulary on each rank, in the order of ranks."""

    def __init__(self, linear: nn.Module, out_features: int) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, out_features
        rank, ranks = rank_of_group()
        share = -(-out_features // ranks)
        self.first_id = min(out_features, rank * share)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> logits [..., ids of this rank]"""
        logits: Tensor = self.linear(inputs)
        return logits

    def gather(self, logits: Tensor) -> Tensor:
        """[..., ids of this rank] -> [..., out_features]"""
        return gather_columns(logits, self.out_features)


class SummedRows(nn.Module):
    """A linear with a share of the inputs on each rank; every rank gets the sum."""

    def __init__(self, linear: nn.Module, bias: nn.Parameter | None, splits_input: bool) -> None:
        """linear: without bias. splits_input: each rank is given all inputs and takes its share."""
        super().__init__()
        self.linear, self.bias = linear, bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._splits_input = splits_input

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features, or those of all ranks] -> [..., out_features]"""
        if self._splits_input:
            rank, ranks = rank_of_group()
            first = min(inputs.shape[-1], rank * -(-inputs.shape[-1] // ranks))
            inputs = inputs.narrow(-1, first, self.in_features)
        output = all_reduce(self.linear(inputs))
        return output if self.bias is None else output + self.bias


class EmbeddingShard(nn.Module):
    """Embeddings with a share of the vocabulary on each rank."""

    def __init__(self, embedding: nn.Embedding, num_embeddings: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding.embedding_dim
        rank, ranks = rank_of_group()
        self._first = min(num_embeddings, rank * -(-num_embeddings // ranks))

    @property
    def weight(self) -> nn.Parameter:
        """This rank's, [ids, embedding_dim]."""
        weight: nn.Parameter = self.embedding.weight
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., embedding_dim]"""
        if type(self.embedding) is nn.Embedding:
            return all_reduce(torch.ops.paceline.embedding_shard(ids, self.weight, self._first))
        return all_reduce(_own_rows(self.embedding, ids, self.weight, self._first))


def _own_rows(embedding: Callable[[Tensor], Tensor], ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """[*ids, embedding_dim]: rows of ids from first_id on, zeros for those that the weight lacks."""
    places, last = ids - first_id, len(weight) - 1
    if last < 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    return embedding(places.clamp(0, last)) * ((places >= 0) & (places <= last))[..., None]


def _embedding_shard(ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    if ids.is_cuda:
        # Imported late: machines without a GPU may have no Triton.
        from actors.models.embedding_kernel import launch

        rows = _fake_embedding_shard(ids, weight, first_id)
        launch(ids.contiguous(), weight, rows, first_id)
        return rows
    return _own_rows(weight.__getitem__, ids, weight, first_id)


def _fake_embedding_shard(ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


_library = torch.library.Library("paceline", "FRAGMENT")
_library.define("embedding_shard" + torch.library.infer_schema(_embedding_shard, mutates_args=()))
for _device in ("CPU", "CUDA"):
    _library.impl("embedding_shard", _embedding_shard, _device)
torch.library.register_fake("paceline::embedding_shard", _fake_embedding_shard, lib=_library)


@torch.no_grad()
def unwrap_shards(model: PreTrainedModel) -> None:
    """Replace the wrappers of a model that was loaded with tensor parallelism, in place. Layers whose style is not
    known here keep theirs."""
    plan, head = model.tp_plan, model.get_output_embeddings()
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            path = f"{parent_name}.{name}" if parent_name else name
            style = plan.get(replace_layer_number_by_wildcard(path))
            unwrap = _UNWRAPPED.get(style or "")
            if unwrap is not None:
                setattr(parent, name, unwrap(module, module is head))


def check_unwrapped(model: PreTrainedModel) -> None:
    """Raises ModelError for a model that still has a wrapper of transformers, which uses collectives of its own."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            style = model.tp_plan.get(replace_layer_number_by_wildcard(name.rpartition(".")[0]))
            raise ModelError(
                f"exact is 'bitwise' and {name} is shared out over ranks as {style!r}, which is not summed in one "
                "order; it needs tensor_parallel 1"
            )


def _without_wrapper(module: nn.Module, *_: Any) -> nn.Module:
    """The module as it was, with this rank's part of its parameters."""
    vars(module).pop("forward", None)
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            module._parameters[name] = nn.Parameter(parameter.to_local(), requires_grad=False)
    return module


def _columns(linear: nn.Module, *_: Any) -> nn.Module:
    _without_wrapper(linear)
    if type(linear) is nn.Linear:
        linear.out_features, linear.in_features = linear.weight.shape
    return linear


def _gathered_columns(linear: nn.Module, is_head: bool) -> nn.Module:
    out_features = getattr(linear, "whole_out_features", linear.out_features)
    return (VocabularyShard if is_head else GatheredColumns)(_columns(linear), out_features)


def summed_rows(linear: nn.Module, splits_input: bool) -> SummedRows:
    """linear: with this rank's inputs alone. Its bias is added after the sum."""
    bias = _columns(linear).bias
    linear.bias = None
    return SummedRows(linear, bias, splits_input)


def _embedding(embedding: nn.Module, *_: Any) -> nn.Module:
    num_embeddings = embedding.num_embeddings
    _without_wrapper(embedding)
    embedding.num_embeddings, embedding.padding_idx = len(embedding.weight), None
    return EmbeddingShard(embedding, num_embeddings)


def _summed(module: nn.Module, *_: Any) -> nn.Module:
    """A module whose outputs are parts of a sum. It stays itself, because others ask it for its attributes."""
    _without_wrapper(module)
    forward = type(module).forward
    module.forward = lambda *args, **kwargs: all_reduce(forward(module, *args, **kwargs))
    return module


_UNWRAPPED: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "colwise": _columns,
    "packed_colwise": _columns,
    "colwise_gather_output": _gathered_columns,
    "colwise_rep": _gathered_columns,
    "rowwise": lambda linear, _: summed_rows(linear, splits_input=False),
    "rowwise_split_input": lambda linear, _: summed_rows(linear, splits_input=True),
    "rowwise_rep": lambda linear, _: summed_rows(linear, splits_input=True),
    "embedding_rowwise": _embedding,
    "replicated_with_grad_allreduce": _without_wrapper,  # forwards need no collective
    "mla_kv_a_proj": _without_wrapper,  # likewise
    "local_params": _without_wrapper,
    "moe_tp_experts": _summed,
    "all_reduce": _summed,
}
