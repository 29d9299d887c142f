"""Forwards of a draft model that guess the next tokens after paths of sequences."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch

from actors.draft_model.device_guesses import likeliest_after
from actors.draft_model.known_guesses import KnownGuesses, Path
from actors.engine.batch import SequenceRows
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.model_runner import ModelRunner
from actors.engine.sequence import Sequence
from actors.messages import no_tokens
from actors.sampling.sampler import RowSampling, draft_with_probs, likeliest_tokens, rows_for

_NUM_PROBS = 32  # pairs that define q under rejection, 256 bytes a node

_Probs = tuple[np.ndarray, np.ndarray]
_Guess = tuple[list[tuple[int, float]], _Probs | None]


@dataclass(frozen=True, slots=True)
class Want:
    """Paths of one sequence to guess after: [()] for its text, whose end is pending, or nodes to compute."""

    sequence: Sequence
    known: KnownGuesses
    paths: list[Path]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of logits: the next token after one path."""

    want: Want
    path: Path


class Guesser:
    """Runs the draft model and turns its logits into guesses."""

    def __init__(self, runner: ModelRunner | EncoderDecoderRunner, vocab_map: torch.Tensor | None) -> None:
        """vocab_map: see DraftEngine."""
        self._runner = runner
        self._vocab_map = vocab_map

    def compute(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` pending tokens of a text, without a guess."""
        self._forward([SequenceRows(sequence, count, no_tokens(), no_tokens())])
        sequence.computed(count, no_tokens(), no_tokens())

    def guess(self, wants: Sequences[Want]) -> None:
        """Make all guesses in one forward and record them. A failure changes nothing."""
        parts = [_rows_of(want) for want in wants]
        rows = [_Row(want, path) for want in wants for path in want.paths]
        guesses = self._guess_on_device(parts, rows) or self._guess_on_host(parts, rows)
        for part in parts:
            part.sequence.computed(part.count, part.tree_tokens, part.tree_parents)
        for index, row in enumerate(rows):
            row.want.known.add(row.path, *guesses[index])

    def _guess_on_device(self, parts: list[SequenceRows], rows: list[_Row]) -> list[_Guess] | None:
        """None where the runner or the rows need another way."""
        runner = self._runner
        if not isinstance(runner, ModelRunner) or not runner.has_device_inputs:
            return None
        if any(row.want.sequence.draws_from_probs for row in rows):
            return None
        most = max(row.want.known.width for row in rows)
        wanted = [_num_wanted(part) for part in parts]
        found = likeliest_after(runner, parts, wanted, _row_sampling(rows), most, self._vocab_map)
        return _guesses_of(*found)

    def _guess_on_host(self, parts: list[SequenceRows], rows: list[_Row]) -> list[_Guess]:
        logits = self._forward(parts)
        guesses: dict[int, _Guess] = {}
        for from_probs, draw in ((False, self._draw), (True, self._draw_from_probs)):
            chosen = [index for index, row in enumerate(rows) if row.want.sequence.draws_from_probs == from_probs]
            if chosen:
                guesses.update(zip(chosen, draw([rows[index] for index in chosen], logits[chosen]), strict=True))
        return [guesses[index] for index in range(len(rows))]

    def _draw(self, rows: list[_Row], logits: torch.Tensor) -> list[_Guess]:
        most = max(row.want.known.width for row in rows)
        tokens, shares = likeliest_tokens(logits, _row_sampling(rows), most, self._vocab_map)
        return _guesses_of(tokens.cpu().numpy(), shares.cpu().numpy())

    def _draw_from_probs(self, rows: list[_Row], logits: torch.Tensor) -> list[_Guess]:
        drawn, ids, probs = draft_with_probs(logits, _row_sampling(rows), _NUM_PROBS, self._vocab_map)
        shares = torch.where(ids == drawn[:, None], probs, 0.0).sum(dim=1)
        return [
            ([(token, share)], (ids[index].to(torch.int32).cpu().numpy(), probs[index].float().cpu().numpy()))
            for index, (token, share) in enumerate(zip(drawn.tolist(), shares.tolist(), strict=True))
        ]

    def _forward(self, parts: list[SequenceRows]) -> torch.Tensor:
        """Compute the rows. Returns logits [rows, outputs] after the last committed token of each part that reaches it,
        and after the new nodes of the others."""
        return self._runner.run(parts, [_num_wanted(part) for part in parts])


def _guesses_of(tokens: np.ndarray, shares: np.ndarray) -> list[_Guess]:
    """tokens, shares: [rows, k]."""
    pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
    return [(list(zip(*pair, strict=True)), None) for pair in pairs]


def _num_wanted(part: SequenceRows) -> int:
    if not part.count:
        return part.num_rows
    return 1 if part.count == part.sequence.num_pending else 0


def _rows_of(want: Want) -> SequenceRows:
    if want.paths == [()]:
        return SequenceRows(want.sequence, want.sequence.num_pending, no_tokens(), no_tokens())
    tokens, parents = want.known.arrays(want.paths)
    return SequenceRows(
        sequence=want.sequence, count=0, tree_tokens=tokens, tree_parents=parents, first_node=len(want.known.nodes)
    )


def _row_sampling(rows: list[_Row]) -> RowSampling:
    positions = np.asarray([row.want.sequence.length + len(row.path) for row in rows])
    paths = [np.asarray(row.path, dtype=np.int32) for row in rows]
    return rows_for([row.want.sequence.sampling for row in rows], np.arange(len(rows)), positions, paths)
