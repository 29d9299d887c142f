"""Decoder layers on CPU as compiled steps over buffers that all layers share; layers in turn run in one call.

A layer is replaced if it has the parts of Llama's and gives the outputs of the one it replaces, on rows and draft trees
that it is tried with. Between 40 calls of operators and modules a layer of a small model spends as much time as in its
products.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module

from actors.engine.attention.interface import AttentionPlan
from actors.engine.attention.padded import PaddedPlan
from actors.engine.batch import PackedBatch
from actors.engine.cpu_kernels import layer_state, layer_steps
from actors.engine.cpu_kernels.attend_step import attend
from actors.engine.cpu_kernels.block_weights import BlockWeights, blocks_of_int4
from actors.engine.cpu_kernels.microkernel import multiply
from actors.engine.cpu_kernels.panel_linear import PanelKernel, Panels, PanelSlice
from actors.engine.cpu_kernels.weight_formats import FLOAT32
from actors.engine.kv_cache import KvCache
from actors.models.quantization import Int4Linear, Int8Linear

# A weight [out_features, in_features] -> how to multiply by panels; None: another kernel is faster
ChoosePanels = Callable[[Tensor | BlockWeights], PanelKernel | None]


class Workspace:
    """The buffers of a model's layers, and what its layers read of a forward."""

    def __init__(self) -> None:
        self.state = np.zeros(layer_state.SIZE, np.int64)
        self._columns = [0, 0, 0]  # of hidden, inputs, products
        self._capacity = 0
        self.lock = threading.Lock()  # engines of one model share its buffers
        self._plan: weakref.ref[PaddedPlan] | None = None  # its engine may go before the model
        self._angles = torch.empty(0), torch.empty(0)
        self._told: tuple[Any, ...] = ()  # what the state has addresses of
        self.hidden = torch.empty(0)

    def widen(self, *columns: int) -> None:
        """Columns that a layer needs of the buffers of hidden states, inputs and products."""
        self._columns = list(map(max, self._columns, columns))
        self._capacity = 0

    def begin(self, plan: PaddedPlan, angles: tuple[Tensor, Tensor], rows: int) -> None:
        """Read a forward's plan and angles (cosines and sines, [1, rows, rotated dims]), unless that is done."""
        if self._plan is None or self._plan() is not plan:
            self.begin_batch(plan.batch, plan.kv, plan.slots.numpy(), np.arange(rows))
            self._plan = weakref.ref(plan)
        self.turn_by(angles)

    def begin_batch(self, batch: PackedBatch, kv: KvCache, slots: np.ndarray, angles_at: np.ndarray) -> None:
        """Read a forward's batch. slots: int64 [rows], with those of rows of padding, which come last. angles_at: int64
        [rows], the place of each row in the angles."""
        self._plan = None
        self._reserve(len(slots))
        self._told = (
            *(kv.addresses, angles_at, slots, batch.block_size, batch.positions, batch.first_rows, batch.contexts),
            *(batch.tree_starts, batch.block_tables, batch.visible_ends, batch.ancestors, batch.node_positions),
        )
        layer_state.tell_batch(self.state, len(slots), *self._told)

    def turn_by(self, angles: tuple[Tensor, Tensor]) -> None:
        """Rotate by these cosines and sines, [1, places, rotated dims], unless that is done."""
        if angles[0] is self._angles[0]:
            return
        self._angles, self._turns = angles, [angle.float().contiguous() for angle in angles]
        self.state[layer_state.ROTATED] = angles[0].shape[-1]
        self.state[layer_state.COSINES], self.state[layer_state.SINES] = (turn.data_ptr() for turn in self._turns)

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        self._capacity = max(rows, 2 * self._capacity)
        self._buffers = [torch.zeros(self._capacity, columns) for columns in self._columns]
        self.hidden = self._buffers[0]
        for place, buffer in zip(
            (layer_state.HIDDEN, layer_state.INPUTS, layer_state.PRODUCTS), self._buffers, strict=True
        ):
            self.state[place] = buffer.data_ptr()


_CHAIN = "_paceline_chain"  # attribute of the outputs of a chain's last layer

Linear: TypeAlias = nn.Linear | Int8Linear | Int4Linear


class LayerParts(NamedTuple):
    """Modules of a layer as Llama has them."""

    norms: list[nn.Module]  # before attention, before the MLP
    projections: list[Linear]  # of queries, keys, values
    output: Linear
    gates: list[Linear]  # gate projection and up projection
    down: Linear
    head_norms: list[nn.Module]  # of queries and keys, or none


class Attended(NamedTuple):
    """How a layer attends."""

    layer: int
    heads: int
    key_heads: int
    head_dim: int
    scale: float
    window: int  # 0: none


class FusedLayer(nn.Module):
    def __init__(
        self, layer: nn.Module, parts: LayerParts, attended: Attended, shared: Workspace, choose: ChoosePanels
    ) -> None:
        """Moves the weights of a layer into panels. Raises RuntimeError, and leaves the layer as it was, where panels
        are not the fastest kernel of one of its products."""
        super().__init__()
        self.space = shared
        self._kept: list[Any] = []
        self.dtype = parts.norms[0].weight.dtype
        rounds = self.dtype == torch.bfloat16
        heads, key_heads, dim = attended.heads, attended.key_heads, attended.head_dim
        hidden, width = parts.output.out_features, parts.down.in_features
        groups = (parts.projections, [parts.output], parts.gates, [parts.down])
        products = [_panels_of(linears, choose) for linears in groups]
        stacked, output, gated, down = products
        self._kept.append(products)
        shared.widen(
            hidden,
            max(hidden, parts.output.in_features, width),
            max(product.width for product in products),
        )
        norms = [(self._weight(norm), float_bits(_eps(norm))) for norm in parts.norms]
        head_norms = [self._weight(norm) for norm in parts.head_norms] or [0, 0]
        head_eps = float_bits(_eps(parts.head_norms[0])) if parts.head_norms else 0
        add, product = layer_steps.add_and_normalize(rounds), layer_steps.multiply_panels()
        self.program, works = lay_out(
            self.space,
            [
                (add, [hidden, 0, *norms[0], stacked.rounds_inputs]),
                (product, stacked.fields),
                (
                    layer_steps.rotate(rounds),
                    [heads, key_heads, dim, stacked.width, attended.layer, *head_norms, head_eps],
                ),
                (
                    attend(rounds),
                    [heads, key_heads, dim, stacked.width, attended.layer, float_bits(attended.scale),
                     attended.window, output.rounds_inputs, multiply(FLOAT32)],
                ),
                (product, output.fields),
                (add, [hidden, output.width, *norms[1], gated.rounds_inputs]),
                (product, gated.fields),
                (layer_steps.gate(rounds), [width, gated.width, down.rounds_inputs]),
                (product, down.fields),
                (add, [hidden, down.width, 0, 0, 0]),
            ],
        )  # fmt: skip
        self._kept.append(works)
        self.plain = layer
        self._chain: Chain | None = None
        for linears, panels in zip(groups, products, strict=True):
            _share_panels(layer, linears, panels)

    def forward(self, hidden_states: Tensor, *args: Any, paged_plan: AttentionPlan | None = None, **kwargs: Any) -> Any:
        """[1, rows, hidden size] -> the same. In a forward without a padded plan the layer runs as it was."""
        if not isinstance(paged_plan, PaddedPlan):
            given = {} if paged_plan is None else {"paged_plan": paged_plan}
            return self.plain(hidden_states, *args, **given, **kwargs)
        chain = self._chain
        if chain is not None and not chain.begins_with(self):
            if chain.has_computed(hidden_states, paged_plan):
                return hidden_states
            chain = None
        rows, space = hidden_states.shape[1], self.space
        with space.lock:
            space.begin(paged_plan, kwargs["position_embeddings"], rows)
            space.hidden[:rows].copy_(hidden_states[0])
            run_program(self.program if chain is None else chain.program)
            outputs = space.hidden[:rows].to(self.dtype, copy=True).unsqueeze(0)
        if chain is not None:
            chain.mark(outputs, paged_plan)
        return outputs

    def join(self, chain: Chain) -> None:
        self._chain = chain

    @property
    def chain(self) -> Chain | None:
        return self._chain

    def _weight(self, norm: nn.Module) -> int:
        weight = norm.weight.detach().float().contiguous()
        self._kept.append(weight)
        return int(weight.data_ptr())


class Chain:
    """Layers that run in one call, because each has nothing but the outputs of the one before as its inputs.

    The call of the first layer computes all of them, and the calls of the others return its result.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self.space, self.dtype, self.num_layers = layers[0].space, layers[0].dtype, len(layers)
        self.program = joined([layer.program for layer in layers])
        # No layer itself, which would keep the model in a cycle of references.
        self._first = weakref.ref(layers[0])
        self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._hooks += [module._global_forward_hooks, module._global_forward_pre_hooks]
        for layer in layers:
            layer.join(self)

    def begins_with(self, layer: FusedLayer) -> bool:
        """Whether to compute all layers in the call of this one: of the first, where no hook sees the others."""
        return layer is self._first() and self.is_unseen

    @property
    def is_unseen(self) -> bool:
        """Whether no hook sees the layers."""
        return not any(self._hooks)

    def mark(self, outputs: Tensor, plan: AttentionPlan) -> None:
        setattr(outputs, _CHAIN, (self, weakref.ref(plan)))

    def has_computed(self, hidden_states: Tensor, plan: AttentionPlan) -> bool:
        """Whether these are the outputs of all layers in the forward of this plan."""
        mark = getattr(hidden_states, _CHAIN, None)
        return mark is not None and mark[0] is self and mark[1]() is plan


def lay_out(space: Workspace, steps: list[tuple[int, Sequence[int]]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A program of steps, each with its fields after that of the state, and what must be kept for it."""
    works = [np.array([space.state.ctypes.data, *fields], np.int64) for _, fields in steps]
    program = [len(steps)]
    for (address, _), work in zip(steps, works, strict=True):
        program += [address, work.ctypes.data]
    return np.array(program, np.int64), works


def joined(programs: Sequence[np.ndarray]) -> np.ndarray:
    """One program of the steps of several."""
    return np.concatenate([[sum(int(program[0]) for program in programs)], *(program[1:] for program in programs)])


def run_program(program: np.ndarray) -> None:
    """Run the steps of a layer or chain on torch's threads. Its workspace must be locked."""
    run, steps = layer_steps.runner()
    run(steps, program.ctypes.data, torch.get_num_threads(), 0)


def _panels_of(linears: list[Linear], choose: ChoosePanels) -> Panels:
    weight = _stacked(linears)
    kernel, (out_features, in_features) = choose(weight), weight.shape
    if kernel is None:
        raise RuntimeError(f"panels are not the fastest for {in_features} x {out_features}")
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    scales = torch.cat([linear.scales for linear in linears]) if isinstance(linears[0], Int8Linear) else None
    panels = Panels(weight, kernel, bias, scales)
    if panels.missing_inputs:
        raise RuntimeError(f"{in_features} inputs are no whole number of items")
    return panels


def _stacked(linears: list[Linear]) -> Tensor | BlockWeights:
    weight = torch.cat([linear.weight for linear in linears])
    if isinstance(linears[0], Int4Linear):
        return blocks_of_int4(weight, torch.cat([linear.scales_and_offsets for linear in linears], 1))
    return weight


def _share_panels(layer: nn.Module, linears: list[Linear], panels: Panels) -> None:
    """Let linears of a layer compute by panels, which hold their weights."""
    firsts = dict(zip(linears, accumulate((one.out_features for one in linears), initial=0), strict=False))
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if child in firsts:
                setattr(parent, name, PanelSlice(panels, firsts[child], child.out_features))


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def float_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
