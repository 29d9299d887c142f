"""Decoder layers on CPU that run in one call, as compiled steps over buffers that all layers share.

A layer is replaced if it has the parts of Llama's and gives the outputs of the one it replaces, on rows and draft trees
that it is tried with. Between 40 calls of operators and modules a layer of a small model spends as much time as in its
products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from actors.engine.attention.interface import AttentionPlan, Scoring
from actors.engine.attention.padded import PaddedPlan
from actors.engine.cpu_kernels import layer_state, layer_steps
from actors.engine.cpu_kernels.attend_step import attend
from actors.engine.cpu_kernels.microkernel import BFLOAT16_PAIRS, FLOAT32, INPUTS_OF_ITEM, PANEL, multiply
from actors.engine.cpu_kernels.panel_linear import lay_out
from actors.engine.layer_shapes import ShapeProbe
from actors.errors import ModelError
from actors.models.quantization import Int8Linear


class PanelKernel(NamedTuple):
    rounds_inputs: bool
    ahead_bytes: int


# (dtype, in_features, out_features) -> how to multiply by panels; None: another kernel is faster
ChoosePanels = Callable[[torch.dtype, int, int], PanelKernel | None]


class Workspace:
    """The buffers of a model's layers, and what its layers read of a forward."""

    def __init__(self) -> None:
        self.state = np.zeros(layer_state.SIZE, np.int64)
        self._columns = [0, 0, 0]  # of hidden, inputs, products
        self._capacity = 0
        self._plan: PaddedPlan | None = None
        self._angles: tuple[Tensor, Tensor] | None = None
        self._kept: list[Any] = []  # what the state has addresses of
        self.hidden = torch.empty(0)

    def widen(self, *columns: int) -> None:
        """Columns that a layer needs of the buffers of hidden states, inputs and products."""
        self._columns = list(map(max, self._columns, columns))
        self._capacity = 0

    def begin(self, plan: PaddedPlan, angles: tuple[Tensor, Tensor], rows: int) -> None:
        """Read a forward's plan and angles (cosines and sines, [1, rows, rotated dims]), unless that is done."""
        if plan is not self._plan:
            self._plan = plan
            self._reserve(rows)
            batch = plan.batch
            arrays = {
                layer_state.SLOTS: plan.slots.numpy(),
                layer_state.FIRST_ROWS: batch.first_rows,
                layer_state.CONTEXTS: batch.contexts,
                layer_state.TREE_STARTS: batch.tree_starts,
                layer_state.BLOCK_TABLES: batch.block_tables,
                layer_state.VISIBLE_ENDS: batch.visible_ends,
                layer_state.ANCESTORS: batch.ancestors,
                layer_state.POSITIONS: batch.positions,
                layer_state.NODE_POSITIONS: batch.node_positions,
            }
            self._kept = [np.ascontiguousarray(array) for array in arrays.values()]
            for place, array in zip(arrays, self._kept, strict=True):
                self.state[place] = array.ctypes.data
            self.state[layer_state.ROWS] = rows
            self.state[layer_state.CACHE] = plan.kv.addresses.ctypes.data
            self.state[layer_state.SEQUENCES] = len(batch.begins)
            self.state[layer_state.TABLE_WIDTH] = batch.block_tables.shape[1]
            self.state[layer_state.BLOCK_SIZE] = batch.block_size
            self.state[layer_state.WORDS] = batch.ancestors.shape[1]
        if self._angles is None or angles[0] is not self._angles[0]:
            self._angles = angles
            self._turns = [angle.float().contiguous() for angle in angles]
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


Linear: TypeAlias = nn.Linear | Int8Linear


class LayerParts(NamedTuple):
    """Modules of a layer as Llama has them."""

    norms: tuple[nn.Module, nn.Module]  # before attention, before the MLP
    projections: list[Linear]  # of queries, keys, values
    output: Linear
    gates: list[Linear]  # of the gate and of what it gates
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
    def __init__(self, parts: LayerParts, attended: Attended, shared: Workspace, choose: ChoosePanels) -> None:
        """Copies the weights. Raises RuntimeError where panels are not the fastest kernel of one of its products."""
        super().__init__()
        self.layer_idx = attended.layer
        self._attended = attended
        self._space = shared
        self._kept: list[Any] = []
        self._dtype = parts.norms[0].weight.dtype
        rounds = self._dtype == torch.bfloat16
        heads, key_heads, dim = attended.heads, attended.key_heads, attended.head_dim
        hidden, width = parts.output.out_features, parts.down.in_features
        products = [
            self._product(linears, choose) for linears in (parts.projections, [parts.output], parts.gates, [parts.down])
        ]
        stacked, output, gated, down = products
        shared.widen(
            hidden,
            max(hidden, parts.output.in_features, width),
            max(product.width for product in products),
        )
        norms = [(self._weight(norm), _float_bits(_eps(norm))) for norm in parts.norms]
        head_norms = [self._weight(norm) for norm in parts.head_norms] or [0, 0]
        head_eps = _float_bits(_eps(parts.head_norms[0])) if parts.head_norms else 0
        add = layer_steps.add_and_normalize(rounds)
        self._run, self._runner = layer_steps.runner()
        self._program = self._lay_out(
            [
                (add, [hidden, 0, *norms[0], stacked.rounds_inputs]),
                stacked.step,
                (
                    layer_steps.rotate(rounds),
                    [heads, key_heads, dim, stacked.width, attended.layer, *head_norms, head_eps],
                ),
                (
                    attend(rounds),
                    [heads, key_heads, dim, stacked.width, attended.layer, _float_bits(attended.scale),
                     attended.window, output.rounds_inputs, multiply(FLOAT32)],
                ),
                output.step,
                (add, [hidden, output.width, *norms[1], gated.rounds_inputs]),
                gated.step,
                (layer_steps.gate(rounds), [width, gated.width, down.rounds_inputs]),
                down.step,
                (add, [hidden, down.width, 0, 0, 0]),
            ]
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        *,
        paged_plan: AttentionPlan,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """[1, rows, hidden size] -> the same."""
        rows, space = hidden_states.shape[1], self._space
        if isinstance(paged_plan, ShapeProbe):
            return self._show_shapes(hidden_states, paged_plan)
        if not isinstance(paged_plan, PaddedPlan):
            name = type(paged_plan).__name__
            raise ModelError(f"layers are fused for another engine of this model; {name} needs a model of its own")
        space.begin(paged_plan, position_embeddings, rows)
        space.hidden[:rows].copy_(hidden_states[0])
        self._run(self._runner, self._program.ctypes.data, torch.get_num_threads(), 0)
        return space.hidden[:rows].to(self._dtype, copy=True).unsqueeze(0)

    def _show_shapes(self, hidden_states: Tensor, plan: ShapeProbe) -> Tensor:
        one, rows = self._attended, hidden_states.shape[1]
        query, keys = (hidden_states.new_zeros((rows, heads, one.head_dim)) for heads in (one.heads, one.key_heads))
        plan.attend(one.layer, query, keys, keys, Scoring(one.scale, one.window or None, softcap=None))
        return hidden_states

    def _product(self, linears: list[Linear], choose: ChoosePanels) -> _Product:
        weight = torch.cat([linear.weight for linear in linears])
        kernel = choose(weight.dtype, weight.shape[1], len(weight))
        if kernel is None:
            raise RuntimeError(f"panels are not the fastest for {weight.shape[1]} x {len(weight)}")
        panels, kind = lay_out(weight, kernel.rounds_inputs)
        if panels.shape[1] * INPUTS_OF_ITEM[kind] != weight.shape[1]:
            raise RuntimeError(f"{weight.shape[1]} inputs are no whole number of items")
        self._kept.append(panels)
        bias = scales = 0
        if linears[0].bias is not None:
            bias = self._padded([linear.bias for linear in linears])
        if isinstance(linears[0], Int8Linear):
            scales = self._padded([linear.scales for linear in linears])
        fields = [panels.shape[1], panels.data_ptr(), len(panels), bias, scales, multiply(kind, kernel.ahead_bytes)]
        return _Product((layer_steps.multiply_panels(), fields), len(panels) * PANEL, int(kind == BFLOAT16_PAIRS))

    def _padded(self, parts: list[Tensor]) -> int:
        """Address of numbers of all outputs."""
        whole = torch.cat(parts).float()
        self._kept.append(nn.functional.pad(whole, (0, -len(whole) % PANEL)))
        return int(self._kept[-1].data_ptr())

    def _weight(self, norm: nn.Module) -> int:
        weight = norm.weight.detach().float().contiguous()
        self._kept.append(weight)
        return int(weight.data_ptr())

    def _lay_out(self, steps: list[tuple[int, list[int]]]) -> np.ndarray:
        works = [np.array([self._space.state.ctypes.data, *fields], np.int64) for _, fields in steps]
        self._kept.append(works)
        program = [len(steps)]
        for (address, _), work in zip(steps, works, strict=True):
            program += [address, work.ctypes.data]
        return np.array(program, np.int64)


class _Product(NamedTuple):
    step: tuple[int, list[int]]
    width: int  # outputs with padding
    rounds_inputs: int


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _float_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
