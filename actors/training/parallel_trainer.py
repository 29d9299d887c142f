"""Distils parallel draft models: mask tokens after a text guess several of the target's next tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.models.parallel_draft import DEPTH_KEY, KIND, KIND_KEY, MASK_TOKEN_KEY
from actors.training.drafter_trainer import Agreement, DrafterTrainer
from actors.training.parallel_rows import ParallelRows, lay_out, random_lengths
from actors.training.recipes import DrafterRecipe
from actors.training.target_text import Answer
from actors.training.training_loop import batches_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MEASURED_TOKENS = 1024  # of a batch without its mask tokens, which are several times as many


class ParallelTrainer(DrafterTrainer):
    """The mask token is a new token of the draft model, after those of the target."""

    def __init__(self, draft: PreTrainedModel, token_ids: torch.Tensor, recipe: DrafterRecipe, device: str) -> None:
        import torch

        super().__init__(draft, token_ids, recipe, device)
        self.chain_length = recipe.parallel
        embeddings = draft.get_input_embeddings()
        self._mask_embedding = torch.nn.Parameter(embeddings.weight.detach().mean(0))
        self._embedding_scale = float(getattr(embeddings, "scalar_embed_scale", 1.0))  # of Gemma's
        self._more_parameters = [self._mask_embedding]

    def _training_states(self, answers: Sequence[Answer], seed: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if share < self.recipe.masks_from:
            return super()._training_states(answers, seed, share)
        generator = torch.Generator().manual_seed(seed)
        most, retention = self.recipe.parallel - 1, self.recipe.retention
        count = sum(answer.num_answer_tokens for answer in answers)
        rows = lay_out(answers, random_lengths(count, most, retention, generator))
        return self._states_of(rows), self._wanted(answers)[self._sent(rows.places)]

    def _states_of(self, rows: ParallelRows) -> torch.Tensor:
        """The draft's hidden state of each row that guesses, [n, H]."""
        import torch

        with torch.no_grad():
            real = self._draft.get_input_embeddings()(self._sent(rows.token_ids))
        masks = (self._mask_embedding * self._embedding_scale).expand(len(real), rows.num_masks, -1)
        state = self._draft.get_decoder()(
            inputs_embeds=torch.cat([real, masks.to(real.dtype)], 1),
            attention_mask=self._attention_mask(rows),
            position_ids=self._sent(rows.positions),
            use_cache=False,
        ).last_hidden_state
        chosen: torch.Tensor = state[self._sent(rows.texts), self._sent(rows.columns)]
        return chosen

    def _attention_mask(self, rows: ParallelRows) -> torch.Tensor | dict[str, torch.Tensor]:
        """bool [B, 1, rows, columns], or one for each type of layer."""
        config = self._draft.config
        visible = rows.visible(self._device)
        window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        if window is None:
            return visible
        positions = self._sent(rows.positions)[:, None]
        near = visible & (positions[..., :, None] - positions[..., None, :] < window)
        return near if types is None else {"full_attention": visible, "sliding_attention": near}

    def agreement(self, answers: Sequence[Answer]) -> Agreement:
        """Agreement at the first token after every text, and at each depth."""
        import torch

        known, most = 0, self.recipe.parallel - 1
        rounds: list[list[list[bool]]] = []
        with torch.inference_mode():
            for batch in batches_of(answers, _MEASURED_TOKENS):
                rows = lay_out(batch, torch.full((sum(answer.num_answer_tokens for answer in batch),), most))
                argmax = torch.cat([answer.argmax for answer in batch])
                logits = torch.nn.functional.linear(self._states_of(rows), self._readout, self._bias)
                hits = self._token_ids[logits.argmax(-1)].cpu() == argmax[rows.places]
                known += int((self._column[argmax.to(self._device)] >= 0).sum())
                counts = [answer.num_answer_tokens for answer in batch]
                rounds += _by_place(rows, hits, counts)
        by_depth = [
            [chain[depth] for chains in rounds for chain in chains if depth < len(chain)] for depth in range(most + 1)
        ]
        shares = tuple(sum(found) / max(1, len(found)) for found in by_depth)
        return Agreement(shares[0], known / max(1, len(by_depth[0])), parallel_tokens_per_round(rounds), shares)

    def save(self, directory: Path) -> None:
        import torch

        embeddings = self._draft.get_input_embeddings()
        mask_token = embeddings.num_embeddings
        self._draft.resize_token_embeddings(mask_token + 1, mean_resizing=False)
        with torch.no_grad():
            self._draft.get_input_embeddings().weight[mask_token] = self._mask_embedding
            self._draft.get_output_embeddings().weight[mask_token] = 0.0
        setattr(self._draft.config, MASK_TOKEN_KEY, mask_token)
        setattr(self._draft.config, KIND_KEY, KIND)
        setattr(self._draft.config, DEPTH_KEY, self.recipe.parallel)
        super().save(directory)


def _by_place(rows: ParallelRows, hits: torch.Tensor, counts: Sequence[int]) -> list[list[list[bool]]]:
    """For each text, for each of its places, whether each guess after it is right, in order of depth."""
    found: list[list[list[bool]]] = [[[] for _ in range(count)] for count in counts]
    firsts = [sum(counts[:text]) for text in range(len(counts))]
    for text, place, depth, hit in zip(
        rows.texts.tolist(), rows.places.tolist(), rows.depths.tolist(), hits.tolist(), strict=True
    ):
        found[text][place - depth - firsts[text]].append(hit)
    return found


def parallel_tokens_per_round(answers: Sequence[Sequence[Sequence[bool]]]) -> float:
    """Tokens a round with one forward of the draft a round. answers: for each answer, for each place in it, which
    guesses of the tokens from there on are right. Exact, not an estimate."""
    rounds = tokens = 0
    for chains in answers:
        done = 0
        while done < len(chains):
            chain = chains[done]
            done += next((index for index, hit in enumerate(chain) if not hit), len(chain)) + 1
            rounds += 1
        tokens += len(chains)
    return tokens / rounds if rounds else 1.0
