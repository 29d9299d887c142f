"""Fits and distils a draft model that is made of its target's first layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from actors.models.quiet import quiet_transformers
from actors.models.source import VOCAB_MAP_FILE
from actors.training.recipes import DrafterRecipe
from actors.training.target_text import Answer, AnswerPlaces, padded_texts
from actors.training.training_checkpoint import TrainingCheckpoint
from actors.training.training_loop import Report, batches_of, check_weights, fast_dtype, run_steps

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CHAIN_LENGTH = 4  # draft tokens of a round, for `tokens_per_round` in the card
_READOUT_TOKENS = 12_000  # answer tokens for the least squares: many times the hidden size
_RIDGE = 0.01  # relative to the mean of the diagonal


@dataclass(frozen=True, slots=True)
class Agreement:
    share: float  # share of tokens at which draft and target choose the same
    coverage: float  # share of tokens in the draft's vocabulary
    tokens_per_round: float
    by_depth: tuple[float, ...] = ()  # of a parallel model: share at the first, second, ... token after a text


def tokens_per_round(hits: Sequence[Sequence[bool]], length: int) -> float:
    """Tokens a round with chains of `length` greedy drafts. hits: for each answer, which tokens the draft guesses.

    Exact, not an estimate: a chain equals the target's own tokens as far as it is accepted.
    """
    rounds = tokens = 0
    for answer in hits:
        done = 0
        while done < len(answer):
            drafted = answer[done : done + length]
            done += next((index for index, hit in enumerate(drafted) if not hit), len(drafted)) + 1
            rounds += 1
        tokens += len(answer)
    return tokens / rounds if rounds else 1.0


class DrafterTrainer:
    """Fits and distils a draft model and its readout, the output rows of the reduced vocabulary."""

    chain_length = CHAIN_LENGTH

    def __init__(self, draft: PreTrainedModel, token_ids: torch.Tensor, recipe: DrafterRecipe, device: str) -> None:
        import torch

        self._draft = draft
        self.recipe = recipe
        self._device = device
        self._autocast = fast_dtype(device) == "bfloat16"
        self._token_ids = token_ids.to(device)
        head = draft.get_output_embeddings()
        self._rows = head.weight.detach()[self._token_ids].clone()  # the target's output rows
        self._bias = None if head.bias is None else head.bias.detach()[self._token_ids].clone()
        self._column = torch.full((head.weight.shape[0],), -1, device=device)
        self._column[self._token_ids] = torch.arange(len(token_ids), device=device)
        self._readout = torch.nn.Parameter(self._rows.clone())
        self._more_parameters: list[torch.nn.Parameter] = []  # trained like the layers

    def fit_readout(self, answers: Sequence[Answer], report: Report) -> None:
        """Ridge regression from the draft's last hidden state to the target's, followed by the target's output rows."""
        import torch

        size = self._rows.shape[1]
        gram = torch.zeros((size, size), device=self._device)
        cross = torch.zeros((size, size), device=self._device)
        batches = batches_of(_some(answers, _READOUT_TOKENS), 4096)
        with torch.inference_mode():
            for done, batch in enumerate(batches):
                report("fitting the readout", done, len(batches))
                state, wanted, _ = self._states(batch)
                gram += state.T @ state
                cross += state.T @ wanted
            # The ridge pulls towards the identity, because both states are of one residual stream.
            pull = torch.eye(size, device=self._device) * (_RIDGE * gram.diagonal().mean())
            gram += pull
            cross += pull
            lens = torch.linalg.solve(gram, cross).T
            fitted = self._rows @ lens
        report("fitting the readout", len(batches), len(batches))
        self._readout = torch.nn.Parameter(fitted.clone())

    def distil(
        self,
        answers: Sequence[Answer],
        report: Report,
        checkpoint: TrainingCheckpoint | None = None,
        most_steps: int | None = None,
        most_s: float | None = None,
    ) -> None:
        """Minimise the cross entropy with the target's distribution over the reduced vocabulary.

        Layers and readout are trained together. most_s: as in `run_steps`. Raises TrainingPaused if steps are left
        after `most_steps`.
        """
        import torch

        recipe = self.recipe
        embeddings = {id(p) for p in self._draft.get_input_embeddings().parameters()}
        layers = [p for p in self._draft.get_decoder().parameters() if id(p) not in embeddings]
        parameters = [*layers, self._readout, *self._more_parameters]
        self._draft.requires_grad_(False)  # a gradient of the embeddings costs as much as all the others together
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            parameters, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        batches = batches_of(answers, recipe.batch_tokens)
        order = random.Random(recipe.seed)
        schedule: list[list[Answer]] = []
        for _ in range(recipe.epochs):
            order.shuffle(batches)
            schedule += batches
        run_steps(
            list(enumerate(schedule)),
            lambda step, share: self._loss(step[1], recipe.seed + step[0], share),
            optimizer,
            stage="distilling",
            report=report,
            checkpoint=checkpoint,
            most=most_steps,
            most_s=most_s,
        )
        for parameter in parameters:
            parameter.requires_grad_(False)

    def _loss(self, answers: Sequence[Answer], seed: int, share: float) -> torch.Tensor:
        """The loss of one batch. seed: for all random choices. share: of the training that is done."""
        import torch

        with torch.autocast(self._device.partition(":")[0], torch.bfloat16, enabled=self._autocast):
            state, wanted = self._training_states(answers, seed, share)
            guess = torch.nn.functional.linear(state, self._readout, self._bias).float()
            with torch.no_grad():
                label = torch.nn.functional.linear(wanted, self._rows, self._bias).float().softmax(-1)
        return torch.nn.functional.cross_entropy(guess, label)

    def _training_states(self, answers: Sequence[Answer], seed: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft's hidden state and the target's at each row to train on, [n, H]."""
        state, wanted, _ = self._states(answers)
        return state, wanted

    def agreement(self, answers: Sequence[Answer]) -> Agreement:
        """How often the draft's greedy choice at a token of the answers is the target's."""
        import torch

        hits: list[list[bool]] = []
        known = 0
        with torch.inference_mode():
            for batch in batches_of(answers, 4096):
                state, _, argmax = self._states(batch)
                guess = self._token_ids[torch.nn.functional.linear(state, self._readout, self._bias).argmax(-1)]
                known += int((self._column[argmax] >= 0).sum())
                counts = [answer.num_answer_tokens for answer in batch]
                hits += [part.tolist() for part in (guess == argmax).split(counts)]
        count = max(1, sum(map(len, hits)))
        return Agreement(sum(map(sum, hits)) / count, known / count, tokens_per_round(hits, CHAIN_LENGTH))

    def save(self, directory: Path) -> None:
        """A normal model directory in bfloat16, the readout in its rows of the output layer, and the map beside it."""
        import torch
        from safetensors.torch import save_file

        self._draft.get_output_embeddings().weight.data[self._token_ids] = self._readout.detach()
        check_weights("drafter", self._draft.state_dict().values(), self.recipe.learning_rate)
        with quiet_transformers():
            self._draft.to(device="cpu", dtype=torch.bfloat16).save_pretrained(directory)
        save_file({"token_ids": self._token_ids.cpu().to(torch.int32)}, directory / VOCAB_MAP_FILE)

    def _states(self, answers: Sequence[Answer]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The draft's and the target's hidden state before every answer token [n, H], and the target's choice [n]."""
        import torch

        ids, places = self._sent(padded_texts(answers)), AnswerPlaces.of(answers)
        state = self._draft.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        argmax = torch.cat([answer.argmax for answer in answers])
        chosen = state[self._sent(places.texts), self._sent(places.columns)]
        return chosen, self._wanted(answers), self._sent(argmax)

    def _wanted(self, answers: Sequence[Answer]) -> torch.Tensor:
        """The target's hidden state before every answer token, float32 [n, H]."""
        import torch

        return self._sent(torch.cat([answer.hidden for answer in answers])).float()

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device. The copy is queued, not waited for, where the driver can do that."""
        return tensor.to(self._device, non_blocking=True)


def _some(answers: Sequence[Answer], tokens: int) -> list[Answer]:
    """The first answers, as many as it takes to have `tokens` answer tokens together."""
    before = accumulate((answer.num_answer_tokens for answer in answers), initial=0)
    return [answer for answer, count in zip(answers, before, strict=False) if count < tokens]
