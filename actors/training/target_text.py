"""Text that a target writes, with its hidden state and greedy choice at every token. Drafters are fitted on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and the target's answer to it, with n answer tokens and hidden size H."""

    token_ids: torch.Tensor  # int64 [prompt + n]
    num_prompt_tokens: int
    hidden: torch.Tensor  # [n, H], the model's dtype: input of the output layer that gave each answer token
    argmax: torch.Tensor  # int64 [n]: the greedy choice at each answer token

    @property
    def num_answer_tokens(self) -> int:
        return len(self.argmax)


@dataclass(frozen=True, slots=True)
class AnswerPlaces:
    """Where the n answer tokens of a batch of texts are guessed, one answer after the other. int64 [n], on the CPU."""

    texts: torch.Tensor  # in the batch
    columns: torch.Tensor  # of the token before
    after: torch.Tensor  # tokens of the answer after it

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> AnswerPlaces:
        return cls.at(
            [answer.num_prompt_tokens for answer in answers], [answer.num_answer_tokens for answer in answers]
        )

    @classmethod
    def at(cls, num_prompt_tokens: Sequence[int], num_answer_tokens: Sequence[int]) -> AnswerPlaces:
        import torch

        counts, begins = torch.tensor(num_answer_tokens), torch.tensor(num_prompt_tokens) - 1
        texts = torch.arange(len(counts)).repeat_interleave(counts)
        offsets = torch.arange(len(texts)) - (counts.cumsum(0) - counts)[texts]
        return cls(texts, begins[texts] + offsets, counts[texts] - 1 - offsets)


def padded_texts(answers: Sequence[Answer]) -> torch.Tensor:
    """All tokens of each text but its last, int64 [texts, longest], padded behind: a causal model never sees that."""
    import torch

    texts = [answer.token_ids[:-1] for answer in answers]
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt, as a user's turn if there is a chat template. The last `max_tokens` are kept."""
    encoded = []
    for prompt in prompts:
        if tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        encoded.append([int(token) for token in ids[-max_tokens:]] or [0])
    return encoded


def write_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    seed: int,
    vocab_mass: torch.Tensor | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Answer one batch of prompts, each at its temperature (0: greedy).

    The target's probabilities at every sampled token are added to `vocab_mass` (float32 [vocabulary]). `on_tokens` is
    called after each step with the number of tokens written so far. Rows that end leave the batch.
    """
    import torch
    from transformers import DynamicCache

    device = model.device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids, mask = (tensor.to(device) for tensor in _left_padded(prompts))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = len(prompts)
    heat = torch.tensor(temperatures, dtype=torch.float32, device=device)
    ends = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
    live = torch.arange(batch, device=device)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden = torch.empty((batch, max_new_tokens, head.in_features), dtype=head.weight.dtype)
    written, greedy = torch.zeros((2, batch, max_new_tokens), dtype=torch.int64)
    lengths = torch.zeros(batch, dtype=torch.int64)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for step in range(max_new_tokens):
            state = decoder(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            logits = head(state).float()
            best = logits.argmax(-1)
            chosen = best.clone()
            if len(warm := (heat[live] > 0).nonzero()[:, 0]):
                chosen[warm] = _sample(logits[warm], heat[live][warm], generator, vocab_mass)
            rows = live.cpu()
            hidden[rows, step], written[rows, step], greedy[rows, step] = state.cpu(), chosen.cpu(), best.cpu()
            lengths[rows] = step + 1
            if on_tokens is not None:
                on_tokens(int(lengths.sum()))
            going = (~torch.isin(chosen, ends)).nonzero()[:, 0]
            if not len(going):
                break
            mask = torch.cat([mask, mask.new_ones((len(mask), 1))], 1)
            positions = positions[:, -1:] + 1
            if len(going) < len(live):
                cache.batch_select_indices(going)
                live, chosen, mask, positions = live[going], chosen[going], mask[going], positions[going]
            ids = chosen[:, None]
    answers = []
    for row, (prompt, n) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        token_ids = torch.cat([torch.tensor(list(prompt)), written[row, :n]])
        answers.append(Answer(token_ids, len(prompt), hidden[row, :n].clone(), greedy[row, :n].clone()))
    return answers


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 [batch, longest]. All prompts end in the last column."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _sample(
    logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator, vocab_mass: torch.Tensor | None
) -> torch.Tensor:
    """Draw a column of each row [n, V], int64 [n]. Ten times faster than torch.multinomial, which draws n V numbers.

    The probabilities at temperature 1 are added to `vocab_mass`.
    """
    import torch

    probs = torch.softmax(logits, -1)
    if vocab_mass is not None:
        vocab_mass += probs.sum(0).cpu()
    below = probs.pow(1 / temperatures[:, None]).cumsum(-1)
    point = torch.rand((len(below), 1), generator=generator, device=below.device) * below[:, -1:]
    return torch.searchsorted(below, point, right=True)[:, 0].clamp(max=below.shape[1] - 1)
