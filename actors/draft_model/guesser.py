"""Forwards of a draft model that guess the next tokens after paths of sequences.

A parallel model (PARD, An et al. 2025, arXiv:2504.18583) guesses K tokens in one forward: K - 1 mask tokens follow the
last token, and the row of each gives a guess one position further. Keys and values of mask tokens are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from actors.draft_model.answer_grammars import AnswerGrammars
from actors.draft_model.device_guesses import likeliest_after
from actors.draft_model.growing_tree import ROOT
from actors.draft_model.known_guesses import Guess, KnownGuesses, Path
from actors.engine.batch import SequenceRows
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.model_runner import ModelRunner
from actors.engine.sequence import Sequence
from actors.messages import no_tokens
from actors.sampling.row_masks import RowMasks, mask_rows, row_masks
from actors.sampling.sampler import RowSampling, draft_with_probs, likeliest_tokens, rows_for

_NUM_PROBS = 32  # pairs that define q under rejection, 256 bytes a node


class Want(NamedTuple):
    """Paths of one sequence to guess after: [()] for its text, whose end is pending, or nodes to compute."""

    sequence: Sequence
    known: KnownGuesses
    paths: list[Path]
    depth: int = 1  # tokens to guess after each path; more than 1 only with a parallel model
    max_depth: int = 1  # the same, less the length of a path, by the positions that are left

    def depth_after(self, path: Path) -> int:
        """Tokens to guess after a path."""
        return max(1, min(self.depth, self.max_depth - len(path)))

    @property
    def num_rows(self) -> int:
        """Draft nodes to compute, mask tokens included."""
        num_masks = sum(self.depth_after(path) - 1 for path in self.paths)
        return len(self.known.new_nodes(self.paths)) + num_masks


class _Row(NamedTuple):
    """A row of logits: of the token `ahead` places after the next one after a path."""

    want: Want
    path: Path
    ahead: int = 0


class _Part(NamedTuple):
    """Rows of one want in a forward."""

    rows: SequenceRows  # nodes that are kept, then mask tokens
    wanted: list[_Row]  # rows with logits, the last ones of `rows`
    num_kept: int  # draft nodes that are no mask tokens
    guesses: list[list[int]]  # for each path: its guesses, as indices into `wanted`


class Guesser:
    """Runs the draft model and turns its logits into guesses."""

    def __init__(
        self,
        runner: ModelRunner | EncoderDecoderRunner,
        vocab_map: torch.Tensor | None,
        mask_token: int | None = None,
        grammars: AnswerGrammars | None = None,
    ) -> None:
        """vocab_map, mask_token: see DraftEngine. grammars: of constrained sequences; None: they are drafted for as if
        they were free."""
        self._runner = runner
        self._grammars = grammars
        self._vocab_map = vocab_map
        self._mask_token = mask_token
        self.launched_new = False  # whether a guess since this was reset had launches of a new shape

    def compute(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` pending tokens of a text, without a guess."""
        num_wanted = int(count == sequence.num_pending)
        self._runner.run([SequenceRows(sequence, count, no_tokens(), no_tokens())], [num_wanted])
        sequence.computed(count, no_tokens(), no_tokens())

    def guess(self, wants: Sequences[Want]) -> None:
        """Make all guesses in one forward and record them. A failure changes nothing."""
        parts = [_part_of(want, self._mask_token) for want in wants]
        rows = [row for part in parts for row in part.wanted]
        masks = self._masks_of(parts)
        guesses = self._guess_on_device(parts, rows, masks) or self._guess_on_host(parts, rows, masks)
        firsts = accumulate((len(part.wanted) for part in parts), initial=0)
        for want, part, first in zip(wants, parts, firsts, strict=False):
            kept = slice(part.num_kept)
            part.rows.sequence.computed(part.rows.count, part.rows.tree_tokens[kept], part.rows.tree_parents[kept])
            for path, indices in zip(want.paths, part.guesses, strict=True):
                found = [guesses[first + index] for index in indices]
                later = None if self._mask_token is None else found[1:]
                want.known.add(path, *found[0], later)

    def _masks_of(self, parts: list[_Part]) -> RowMasks | None:
        """Masks of all rows that are wanted; None: all are free. So is what a parallel model guesses beyond the next
        token, which does not know the tokens before it."""
        if self._grammars is None:
            return None
        masks = [
            self._grammars.masks(part.rows.sequence, [None if row.ahead else row.path for row in part.wanted])
            for part in parts
        ]
        return row_masks(masks, [len(part.wanted) for part in parts], self._grammars.vocab_size)

    def _guess_on_device(self, parts: list[_Part], rows: list[_Row], masks: RowMasks | None) -> list[Guess] | None:
        """None where the runner or the rows need another way."""
        runner = self._runner
        if not isinstance(runner, ModelRunner) or not runner.has_device_inputs:
            return None
        if any(part.rows.sequence.is_rejection for part in parts):
            return None
        most = max(row.want.known.width for row in rows)
        wanted = [len(part.wanted) for part in parts]
        found = likeliest_after(
            runner, [part.rows for part in parts], wanted, _row_sampling(rows), most, self._vocab_map, masks
        )
        self.launched_new |= runner.launched_new
        return _guesses_of(*found)

    def _guess_on_host(self, parts: list[_Part], rows: list[_Row], masks: RowMasks | None) -> list[Guess]:
        logits = self._runner.run([part.rows for part in parts], [len(part.wanted) for part in parts])
        if masks is not None:
            mask_rows(logits, masks, self._vocab_map)
        if not any(part.rows.sequence.is_rejection for part in parts):
            return self._draw(rows, logits)
        guesses: dict[int, Guess] = {}
        for from_probs, draw in ((False, self._draw), (True, self._draw_from_probs)):
            chosen = [index for index, row in enumerate(rows) if row.want.sequence.is_rejection == from_probs]
            if chosen:
                guesses.update(zip(chosen, draw([rows[index] for index in chosen], logits[chosen]), strict=True))
        return [guesses[index] for index in range(len(rows))]

    def _draw(self, rows: list[_Row], logits: torch.Tensor) -> list[Guess]:
        most = max(row.want.known.width for row in rows)
        are_plain = all(row.want.sequence.sampling.is_plain for row in rows)
        sampling = None if are_plain else _row_sampling(rows)
        tokens, shares = likeliest_tokens(logits, sampling, most, self._vocab_map)
        return _guesses_of(tokens.cpu().numpy(), shares.cpu().numpy())

    def _draw_from_probs(self, rows: list[_Row], logits: torch.Tensor) -> list[Guess]:
        drawn, ids, probs = draft_with_probs(logits, _row_sampling(rows), _NUM_PROBS, self._vocab_map)
        shares = torch.where(ids == drawn[:, None], probs, 0.0).sum(dim=1)
        return [
            ([(token, share)], (ids[index].to(torch.int32).cpu().numpy(), probs[index].float().cpu().numpy()))
            for index, (token, share) in enumerate(zip(drawn.tolist(), shares.tolist(), strict=True))
        ]


def _guesses_of(tokens: np.ndarray, shares: np.ndarray) -> list[Guess]:
    """tokens, shares: [rows, k]."""
    pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
    return [(list(zip(*pair, strict=True)), None) for pair in pairs]


def _part_of(want: Want, mask_token: int | None) -> _Part:
    """The text's end with mask tokens after it, or new nodes and then the mask tokens after each path."""
    known, is_text = want.known, want.paths == [()]
    new = known.new_nodes(want.paths)
    tokens, parents = known.arrays(new)
    num_kept = len(tokens)
    wanted = [_Row(want, ())] if is_text else [_Row(want, node) for node in new]
    guesses = [[index for index, row in enumerate(wanted) if row.path == path] for path in want.paths]
    if mask_token is not None:
        nodes = {path: place for place, path in enumerate([*known.nodes, *new])} | {(): ROOT}
        masks: list[int] = []  # the parent of each
        for path, indices in zip(want.paths, guesses, strict=True):
            parent = nodes[path]
            for ahead in range(1, want.depth_after(path)):
                indices.append(len(wanted))
                wanted.append(_Row(want, path, ahead))
                masks.append(parent)
                parent = num_kept + len(masks) - 1
        tokens = np.concatenate([tokens, np.full(len(masks), mask_token, np.int32)])
        parents = np.concatenate([parents, np.asarray(masks, np.int32)])
    count = want.sequence.num_pending if is_text else 0
    first = len(known.nodes)
    return _Part(SequenceRows(want.sequence, count, tokens, parents, first), wanted, num_kept, guesses)


def _row_sampling(rows: list[_Row]) -> RowSampling:
    """Penalties see the tokens of a path. Those that a parallel model has yet to guess are unknown."""
    positions = np.asarray([row.want.sequence.length + len(row.path) + row.ahead for row in rows])
    sequences = [row.want.sequence.sampling for row in rows]
    paths = None
    if any(sequence.uses_history for sequence in sequences):
        paths = [np.asarray(row.path, dtype=np.int32) for row in rows]
    return rows_for(sequences, np.arange(len(rows)), positions, paths)
