"""Runs one packed forward of a transformers model over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Sequences
from typing import TypeVar

import numpy as np
import torch
from numba import njit
from transformers import PreTrainedModel

from actors.engine.arena import Arena, Part
from actors.engine.attention.choice import choose_attention, has_varlen_kernel
from actors.engine.attention.exact import ExactPlan
from actors.engine.attention.flashinfer import FlashInfer, FlashInferPlan
from actors.engine.attention.interface import AttentionPlan
from actors.engine.attention.padded import PaddedPlan
from actors.engine.attention.prompt_chunks import may_have_chunks, pack_chunks
from actors.engine.batch import PackedBatch, SequenceRows, pack
from actors.engine.compiled.layers import compile_model
from actors.engine.cpu_kernels.kernel_choice import choose_panels, replace_linears
from actors.engine.cpu_kernels.layer_fusion import fuse_layers
from actors.engine.cpu_kernels.rms_norm import replace_norms
from actors.engine.cpu_kernels.whole_forward import whole_forward
from actors.engine.device_inputs import DeviceInputs, Shape, send_inputs, send_written
from actors.engine.eager_layers import fuse_eager_layers
from actors.engine.feature_tap import FeatureTap, Kept
from actors.engine.kv_cache import KvCache
from actors.engine.layer_checks import check_layers
from actors.engine.layer_shapes import layer_shapes
from actors.engine.recorded_launches import CudaGraphs, RecordedLaunches
from actors.engine.row_tiers import row_tier
from actors.engine.sequence import Sequence
from actors.models.layer_types import ATTENDING
from actors.models.shards import VocabularyShard
from actors.options import AttentionBackend, Exactness

# Rows of every forward in bitwise mode: in matrix products of one fixed shape, a row's bits depend neither on its place
# in the tile nor on the other rows. Wide enough for a decoding sequence with its drafts.
ROW_TILE = 16
# Threads split an element-wise operation by elements; a share that ends within a vector is computed by other
# instructions there. Two threads split a tile between rows.
_EXACT_THREADS = 2
_MOST_STEPPED_ROWS = 256  # limit of `row_steps`: beyond, a step hardly matters
Result = TypeVar("Result")


class ModelRunner:
    """A model with its KV cache. Computes rows; does no sampling."""

    sequence_type: type[Sequence] = Sequence
    cache_type: type[KvCache] = KvCache
    chain_only = False  # whether draft trees must be chains
    layer_types: tuple[str, ...] = ATTENDING  # that are computed

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        exact: Exactness = "default",
        *,
        attention: AttentionBackend | None = None,
        is_eager: bool = False,
    ) -> None:
        """exact "bitwise": layers stay unchanged and launches are not recorded, regardless of attention and is_eager.
        attention: None chooses by device. is_eager: layers are neither fused (CPU) nor compiled (CUDA), and launches
        not recorded. Raises ModelError for layers that it does not compute right."""
        self.device = next(model.parameters()).device
        self._attention = attention or choose_attention(self.device)
        if self.device.type == "cuda":
            # torch prefers cuDNN for masked attention on Hopper, which builds a plan for each new context length.
            torch.backends.cuda.enable_cudnn_sdp(False)
        check_layers(model, exact, self.layer_types)
        shapes = layer_shapes(model)
        may_fuse = exact == "default" and self._attention == "padded" and self.device.type == "cpu" and not is_eager
        if may_fuse:
            fuse_layers(model, shapes, choose_panels)
        replace_norms(model)
        self._pads = replace_linears(model)
        self.model = model.eval()
        self._whole = whole_forward(model) if may_fuse else None
        head = model.get_output_embeddings()
        self.vocabulary_shard = head if isinstance(head, VocabularyShard) else None
        self._exact = exact
        self.kv = self.cache_type(num_slots, self.device, shapes)
        # In bitwise mode logits are of the host: what is drawn there does not depend on the batch's shape.
        self._arena = Arena(self.device) if self._attention != "padded" and exact == "default" else None
        self._flashinfer = FlashInfer(self.device) if self._attention == "flashinfer" else None
        self._finds_chunks = self._attention == "triton_tree" and has_varlen_kernel(self.device)
        self._launches: RecordedLaunches | None = None
        self.launched_new = False  # whether the last launches took longer than those of their shape will
        self.tap: FeatureTap | None = None  # on the model, set before the first forward
        if self._arena is not None and is_eager:
            fuse_eager_layers(model)
        elif self.device.type == "cuda" and exact == "default" and not is_eager:
            compile_model(model)
            self._launches = RecordedLaunches(CudaGraphs())

    @property
    def launches(self) -> RecordedLaunches | None:
        """Where launches are recorded."""
        return self._launches

    @property
    def records_launches(self) -> bool:
        """Whether rounds of a shape that came before are replayed. FlashInfer plans on the host."""
        return self._launches is not None and self._flashinfer is None

    @property
    def num_outputs(self) -> int:
        """Columns of the logits."""
        return int(self.model.get_output_embeddings().out_features)

    @property
    def row_steps(self) -> list[int]:
        """Row counts that forwards of decoding rounds are padded to; empty: no padding."""
        if self._exact == "bitwise":
            return list(range(ROW_TILE, _MOST_STEPPED_ROWS + 1, ROW_TILE))
        if not (self._pads or self.has_device_inputs):
            return []
        return sorted({row_tier(rows) for rows in range(1, _MOST_STEPPED_ROWS + 1)})

    def padded(self, rows: int) -> int:
        """Rows that a forward of `rows` rows has with its padding, where it has no device inputs."""
        return row_tier(rows) if self._pads else rows

    def run(self, parts: Sequences[SequenceRows], wanted: Sequences[int]) -> torch.Tensor:
        """Compute all rows of the parts; logits [sum of wanted, vocab] of the last `wanted` rows of each."""
        batch = pack(parts)
        rows = last_rows(batch.first_rows, np.array(wanted))
        return self.forward_sequences(batch, rows, [part.sequence for part in parts])

    def forward_sequences(
        self, batch: PackedBatch, logit_rows: np.ndarray, sequences: Sequences[Sequence]
    ) -> torch.Tensor:
        """As `forward`, for layers that keep states by sequence. sequences: those of the batch."""
        return self.forward(batch, logit_rows)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, logit_rows: np.ndarray) -> torch.Tensor:
        """Compute all rows and fill their KV slots; logits of `logit_rows` (int64 [n], ascending), [n, vocab]."""
        if self._arena is not None:
            inputs = self.send(batch, logit_rows, row_tier(len(logit_rows)))
            logits = self.launch(inputs, None, lambda: self.compute_whole(inputs), may_record=False)
            return logits[: len(logit_rows)]
        self.kv.settle()
        if self._exact == "bitwise":
            return self._of_whole_vocabulary(self._forward_tiles(batch, logit_rows)).cpu()
        if self._whole is not None and self._whole.is_unseen:
            return self._whole.logits(batch, self.kv, logit_rows)
        rows = self.padded(batch.num_rows)
        wanted = _padded(logit_rows, self.padded(len(logit_rows)))
        logits = self._run(
            torch.from_numpy(_padded(batch.token_ids, rows)).to(self.device),
            torch.from_numpy(_padded(batch.positions, rows)).to(self.device),
            PaddedPlan(batch, self.kv, self.device, rows),
            torch.from_numpy(wanted).to(self.device),
        )
        return self._of_whole_vocabulary(logits)[: len(logit_rows)]

    def _of_whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.vocabulary_shard is None else self.vocabulary_shard.gather(logits)

    @property
    def has_device_inputs(self) -> bool:
        """Whether `send` and `compute` are there, the two halves of a forward on an accelerator."""
        return self._arena is not None

    def send(
        self, batch: PackedBatch, logit_rows: np.ndarray, num_logits: int, more: Sequences[Part] = ()
    ) -> DeviceInputs:
        """Copy a batch to the device, and what was accepted before to its slots. num_logits: of `logit_rows` (int64,
        ascending) with padding. more: arrays of the caller that travel along."""
        assert self._arena is not None
        chunks = pack_chunks(batch) if self._finds_chunks else None
        moves, padding_slot = self.kv.waiting_moves, self.kv.padding_slot
        inputs = send_inputs(self._arena, batch, logit_rows, num_logits, moves, padding_slot, more, chunks=chunks)
        return self._moved(inputs if self._flashinfer is None else inputs._replace(batch=batch))

    def send_round(
        self,
        shape: Shape,
        write: Callable[[np.ndarray, np.ndarray, Shape], object],
        updates: Sequences[Part],
        pack: Callable[[], PackedBatch],
        *,
        most_rows: int,
    ) -> DeviceInputs:
        """As `send`, of what `write` writes (`send_written`). updates: arrays that are read before the forward. pack:
        makes the batch, which some rounds need for their attention; most_rows: of a sequence."""
        assert self._arena is not None
        batch, chunks = None, None
        if self._flashinfer is not None or (self._finds_chunks and may_have_chunks(most_rows)):
            batch = pack()
            chunks = pack_chunks(batch) if self._finds_chunks else None
        moves, padding_slot = self.kv.waiting_moves, self.kv.padding_slot
        inputs = send_written(self._arena, shape, write, moves, padding_slot, updates=updates, chunks=chunks)
        return self._moved(inputs if batch is None else inputs._replace(batch=batch))

    def _moved(self, inputs: DeviceInputs) -> DeviceInputs:
        if inputs.moves.shape[1]:
            self.kv.copy_waiting(inputs.moves)
        return inputs

    @torch.inference_mode()
    def launch(
        self, inputs: DeviceInputs, key: Hashable, launch: Callable[[], Result], *, may_record: bool = True
    ) -> Result:
        """What `launch` returns, which computes the inputs. key: all else that its launches depend on. The tensors hold
        until the next call. may_record: False where few rounds have the same key, as with parts of prompts."""
        self.launched_new = False
        # The shapes of prompt chunks are no part of a key.
        if self._launches is None or not (self.records_launches and may_record) or inputs.chunks is not None:
            return launch()
        tap = self.tap if self.tap is not None and self.tap.is_open else None

        def launch_and_keep() -> tuple[Result, Kept | None]:
            result = launch()
            return result, None if tap is None else tap.kept

        result, kept = self._launches.run((inputs.key, key, tap is None), launch_and_keep)
        self.launched_new = self._launches.was_new
        if tap is not None and kept is not None:
            tap.kept = kept
        return result

    @torch.inference_mode()
    def compute(self, inputs: DeviceInputs) -> torch.Tensor:
        """The forward of inputs that are on the device; logits [num_logits, vocab], or with tensor parallelism those of
        `vocabulary_shard`. Launches only: it waits for nothing and reads nothing of the host. (`flashinfer` does.)"""
        return self._run(inputs.token_ids, inputs.positions, self._plan_on_device(inputs), inputs.logit_rows)

    def compute_whole(self, inputs: DeviceInputs) -> torch.Tensor:
        """As `compute`; logits [num_logits, vocab], also with tensor parallelism."""
        return self._of_whole_vocabulary(self.compute(inputs))

    def _plan_on_device(self, inputs: DeviceInputs) -> AttentionPlan:
        if self._flashinfer is not None:
            assert inputs.batch is not None
            return FlashInferPlan(self._flashinfer, inputs.batch, inputs.rows.slots, self.kv)
        # Triton is not installed everywhere.
        from actors.engine.attention.triton_tree import TreePlan
        from actors.engine.attention.varlen import VarlenPlan

        if inputs.chunks is None:
            return TreePlan(inputs.rows, self.kv, inputs.block_size, inputs.max_context)
        return VarlenPlan(inputs.rows, self.kv, inputs.block_size, inputs.max_context, inputs.chunks)

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, rows: torch.Tensor
    ) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paged_plan=plan,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _forward_tiles(self, batch: PackedBatch, logit_rows: np.ndarray) -> torch.Tensor:
        threads = torch.get_num_threads()
        if threads <= _EXACT_THREADS:
            return self._run_tiles(batch, logit_rows)
        torch.set_num_threads(_EXACT_THREADS)
        try:
            return self._run_tiles(batch, logit_rows)
        finally:
            torch.set_num_threads(threads)

    def _run_tiles(self, batch: PackedBatch, logit_rows: np.ndarray) -> torch.Tensor:
        parts = []
        for first in range(0, batch.num_rows, ROW_TILE):
            tile = slice(first, first + ROW_TILE)
            logits = self._run(
                torch.from_numpy(_padded(batch.token_ids[tile], ROW_TILE)).to(self.device),
                torch.from_numpy(_padded(batch.positions[tile], ROW_TILE)).to(self.device),
                ExactPlan(batch, self.kv, first, ROW_TILE),
                torch.arange(ROW_TILE, device=self.device),
            )
            wanted = logit_rows[(logit_rows >= first) & (logit_rows < first + ROW_TILE)] - first
            parts.append(logits[torch.from_numpy(wanted).to(self.device)])
        return torch.cat(parts)


@njit(cache=True, nogil=True)
def last_rows(first_rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: the last `counts` (int64 [S]) rows of each sequence. first_rows: int32 [S + 1]."""
    rows = np.empty(counts.sum(), np.int64)
    index = 0
    for s in range(len(counts)):
        for row in range(first_rows[s + 1] - counts[s], first_rows[s + 1]):
            rows[index] = row
            index += 1
    return rows


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, the last of them zeros."""
    if count == len(rows):
        return rows
    padded = np.zeros(count, dtype=rows.dtype)
    padded[: len(rows)] = rows
    return padded
