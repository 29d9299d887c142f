"""The rows of one forward: the uncomputed tokens of each sequence, then the nodes of its draft tree."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Self

import numpy as np

from actors.draft_tree import ancestor_mask, depths_of
from actors.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows that one sequence contributes: `count` committed tokens from num_computed on, then a draft tree.

    A tree that grows over several forwards is passed whole each time; its first nodes have their KV already.
    """

    sequence: Sequence
    count: int  # >= 1, or 0 if all known tokens are computed and there are nodes
    tree_tokens: np.ndarray  # int32 [n]; empty unless `count` completes the known tokens
    tree_parents: np.ndarray  # int32 [n]
    first_node: int = 0  # nodes before this one are computed; more than 0 only with count == 0

    @property
    def num_rows(self) -> int:
        return self.count + len(self.tree_tokens) - self.first_node


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Place of a sequence's rows in the packed input, and the slots that they attend to."""

    first_row: int
    num_rows: int
    slots: np.ndarray  # int64 [context]: physical slots in logical order; the last num_rows are the rows' own
    row_positions: np.ndarray  # int64 [num_rows]: depth positions, equal for siblings
    slot_positions: np.ndarray  # int64 [context]
    # bool [nodes, m]: which of the last m slots the last `nodes` rows see (ancestors and themselves); None: causal
    tree_mask: np.ndarray | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """All rows of all sequences in one [1, rows] input."""

    token_ids: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    slots: np.ndarray  # int64 [rows]: where each row's keys and values go
    spans: tuple[SequenceSpan, ...]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, token_ids: Sequences[np.ndarray], spans: Sequences[SequenceSpan]) -> Self:
        """token_ids: ints, together those of all rows in the order of the spans."""
        return cls(
            np.concatenate(token_ids).astype(np.int64),
            np.concatenate([span.row_positions for span in spans]),
            np.concatenate([span.slots[len(span.slots) - span.num_rows :] for span in spans]),
            tuple(spans),
        )


def pack(parts: Sequences[SequenceRows]) -> PackedBatch:
    """Lay out the rows. Every sequence must have reserved num_computed + count + nodes slots."""
    token_ids, spans = [], []
    first_row = 0
    for part in parts:
        sequence, nodes = part.sequence, len(part.tree_tokens)
        known = sequence.num_computed + part.count
        begin = sequence.num_computed + part.first_node
        context = sequence.slots(known + nodes)
        slot_positions = np.arange(known + nodes)
        tree_mask = None
        if nodes:
            slot_positions[known:] = known - 1 + depths_of(part.tree_parents)
            if not is_chain(part.tree_parents):
                tree_mask = ancestor_mask(part.tree_parents)
        token_ids.append(sequence.tokens[sequence.num_computed : known])
        token_ids.append(part.tree_tokens[part.first_node :])
        num_rows = part.num_rows
        spans.append(
            SequenceSpan(
                first_row=first_row,
                num_rows=num_rows,
                slots=context,
                row_positions=slot_positions[begin:],
                slot_positions=slot_positions,
                tree_mask=tree_mask,
            )
        )
        first_row += num_rows
    return PackedBatch.of(token_ids, spans)


def is_chain(parents: np.ndarray) -> bool:
    return bool((parents == np.arange(-1, len(parents) - 1)).all())


def visible(span: SequenceSpan, sliding_window: int | None) -> np.ndarray:
    """bool [num_rows, context]: which slots each row may attend to.

    A sliding window counts positions, so that a deep node sees as far back as the committed token it may become.
    """
    context = len(span.slots)
    own = context - span.num_rows
    allowed = np.arange(context)[None, :] <= np.arange(own, context)[:, None]
    if span.tree_mask is not None:
        nodes, reach = span.tree_mask.shape
        rows = min(nodes, span.num_rows)  # fewer if the first nodes were computed before
        allowed[-rows:, -reach:] = span.tree_mask[-rows:]
    if sliding_window is not None:
        allowed &= span.row_positions[:, None] - span.slot_positions[None, :] < sliding_window
    return allowed
