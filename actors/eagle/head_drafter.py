"""What drafters from the target's hidden states share: the head with its keys and values, and its forwards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Sequences
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from actors.drafters.contract import Drafter
from actors.drafters.registry import EAGLE
from actors.eagle.device_growth import Level
from actors.eagle.draft_head import DraftHead
from actors.eagle.head_outputs import HeadOutputs
from actors.engine.arena import Arena
from actors.engine.attention.choice import choose_attention
from actors.engine.attention.interface import AttentionPlan
from actors.engine.attention.padded import PaddedPlan
from actors.engine.batch import PackedBatch, num_words
from actors.engine.cpu_kernels.kernel_choice import replace_linears
from actors.engine.feature_tap import FeatureTap
from actors.engine.hidden_state_drafter import HeadRows
from actors.engine.kv_cache import KvCache
from actors.engine.recorded_launches import RecordedLaunches
from actors.engine.row_tiers import row_tier
from actors.options import AttentionBackend, EagleOptions

Result = TypeVar("Result")

SCRATCH_SLOTS = 4096  # slots for keys and values of drafted tokens


class HeadDrafter(Drafter[HeadRows]):
    """A head with a separate KV cache, which uses the same slots as the target's.

    Rows that the target computed without the head leave a gap, which later rows do not see; a gap only costs
    acceptance. In a shared prefix, the last position of a block may have seen another next token.

    With tensor parallelism every rank has the head and drafts the same: only the target's own layers, such as its
    embeddings, are shared out.
    """

    name = EAGLE
    is_parallel: bool  # whether one forward gives trees of any depth

    def __init__(
        self,
        model: PreTrainedModel,
        head: DraftHead,
        num_slots: int,
        options: EagleOptions,
        attention: AttentionBackend | None = None,
        num_ranks: int = 1,
    ) -> None:
        """model: the target, in its engine already. head: with the model's device and dtype. num_slots: slots of the
        target's KV cache. attention: None chooses by device. num_ranks: of the target, each of which has this head."""
        self.options = options
        self.tap = FeatureTap(model, head.feature_layers)
        embedding = model.get_input_embeddings()
        own = head.embed_tokens
        self._embedding: nn.Module = embedding if own is None or _is_same(own, embedding) else own
        head.embed_tokens = None
        head.attend_paged()
        replace_linears(head)
        self._head = head
        self._device = device = next(head.parameters()).device
        self._scratch_per_tree = self._most_drafted()
        scratch = max(SCRATCH_SLOTS, self._scratch_per_tree)
        self._trees_at_a_time = scratch // self._scratch_per_tree
        self._first_scratch = num_slots
        self._kv = KvCache(num_slots + scratch, device, head.kv_shapes)
        is_accelerated = (attention or choose_attention(device)) == "triton_tree"
        self._arena = Arena(device) if is_accelerated else None
        self.launches: RecordedLaunches | None = None
        self.num_forwards = 0
        self.launched_new = False
        # On the host, shapes of the next level depend on scores.
        agree = num_ranks > 1 and not is_accelerated
        self._outputs = HeadOutputs(head, model.get_output_embeddings(), agree)
        self._is_known = np.zeros(num_slots, np.bool_)  # slots whose position the head has seen

    @abstractmethod
    def _most_drafted(self) -> int:
        """Scratch slots of one tree."""

    def computed(self, slots: np.ndarray) -> None:
        """The target has overwritten these slots (int64), so the head's keys and values there are invalid."""
        self._is_known[slots] = False

    def _launch(self, key: Hashable, launch: Callable[[], Result], may_record: bool) -> Result:
        """What `launch` returns, recorded if it may be. key: as of `RecordedLaunches.run`."""
        if self.launches is None or not may_record:
            return launch()
        result = self.launches.run(key, launch)
        self.launched_new |= self.launches.was_new
        return result

    def _context_of(self, part: HeadRows) -> np.ndarray:
        """Slots that the head has keys and values in after these rows, int64."""
        earlier = part.slots[: part.begin]
        return np.concatenate([earlier[self._is_known[earlier]], part.slots[part.begin :]])

    def _forward(self, batch: PackedBatch, features: torch.Tensor, feature_rows: np.ndarray) -> torch.Tensor:
        """Hidden states of the batch's rows and, after them, of padding rows, [rows, h]."""
        num_rows = row_tier(batch.num_rows)
        padding = (0, num_rows - batch.num_rows)
        token_ids, rows, positions = (
            self._index(np.pad(array, padding)) for array in (batch.token_ids, feature_rows, batch.positions)
        )
        plan = PaddedPlan(batch, self._kv, self._device, num_rows)
        return self._compute(token_ids, features, rows, positions, plan)

    def _forward_on_device(self, level: Level, features: torch.Tensor) -> torch.Tensor:
        """Hidden states of rows that are on the device, [rows, h]."""
        from actors.engine.attention.triton_tree import TreePlan  # Triton is not installed everywhere

        plan = TreePlan(level.rows, self._kv, 1, level.max_context)
        return self._compute(level.token_ids, features, level.feature_rows, level.positions, plan)

    def _compute(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        feature_rows: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """feature_rows: int64 [rows], of `features`; -1 for rows of a one-pass head that have none yet."""
        drafted = None if self._head.masks is None else (feature_rows < 0)[None]
        hidden: torch.Tensor = self._head(
            self._embedding(token_ids[None]), features[feature_rows][None], positions[None], drafted, paged_plan=plan
        )[0]
        return hidden

    def _index(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def pack(
    token_ids: Sequences[np.ndarray],
    positions: Sequences[np.ndarray],
    contexts: Sequences[np.ndarray],
    sights: Sequences[np.ndarray] = (),
) -> PackedBatch:
    """Rows of S sequences, whose token ids and positions are int64.

    contexts: int64, by sequence: the slots that its rows see; the last of them are the rows' own. sights: bool
    [own rows, nodes], by sequence: which of its last slots, the nodes of a growing tree, the rows see; none: rows are
    causal. Blocks have one slot. The head has no sliding windows, so positions of slots are left out.
    """
    counts = np.array([len(part) for part in token_ids])
    ends = np.array([len(context) for context in contexts])
    first_rows = np.append(0, counts.cumsum())
    begins = ends - counts
    most_nodes = max((sight.shape[1] for sight in sights), default=0)
    tree_starts = ends - [sight.shape[1] for sight in sights] if sights else ends
    visible_ends = np.arange(first_rows[-1]) + 1 + (begins - first_rows[:-1]).repeat(counts)
    ancestors = np.zeros((first_rows[-1], num_words(most_nodes)), np.int64)
    block_tables = np.zeros((len(contexts), ends.max()), np.int32)
    for index, context in enumerate(contexts):
        block_tables[index, : len(context)] = context
    for first_row, sight in zip(first_rows, sights, strict=False):
        bits = np.packbits(sight, axis=1, bitorder="little")
        ancestors.view(np.uint8)[first_row : first_row + len(sight), : bits.shape[1]] = bits
    return PackedBatch(
        block_size=1,
        token_ids=np.concatenate(token_ids, dtype=np.int64),
        positions=np.concatenate(positions, dtype=np.int64),
        slots=np.concatenate([context[begin:] for context, begin in zip(contexts, begins, strict=True)]),
        first_rows=first_rows.astype(np.int32),
        begins=begins.astype(np.int32),
        tree_starts=tree_starts.astype(np.int32),
        block_tables=block_tables,
        visible_ends=(tree_starts.repeat(counts) if sights else visible_ends).astype(np.int32),
        ancestors=ancestors,
        node_positions=np.zeros((len(contexts), 64 * ancestors.shape[1]), np.int32),
        max_context=int(ends.max()),
    )


def _is_same(own: nn.Embedding, other: nn.Module) -> bool:
    weight = getattr(other, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.shape == own.weight.shape and torch.equal(weight, own.weight)
