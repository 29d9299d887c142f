"""Training of parallel draft models: rows with mask tokens are those of a plain forward, and chains get as long as
they should."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.training.parallel_rows import lay_out, random_lengths
from actors.training.parallel_trainer import ParallelTrainer, parallel_tokens_per_round
from actors.training.recipes import DrafterRecipe
from actors.training.target_text import Answer
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model

VOCAB, HIDDEN = 61, 64


def answer(num_prompt: int, count: int, seed: int) -> Answer:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB, (num_prompt + count,), generator=generator)
    hidden = torch.randn((count, HIDDEN), generator=generator)
    return Answer(token_ids, num_prompt, hidden, token_ids[num_prompt:].clone())


ANSWERS = [answer(3, 6, 1), answer(7, 1, 2), answer(1, 4, 3)]


def trainer_of(kind: str = "llama", **recipe: float) -> ParallelTrainer:
    model = make_tiny_model(kind, seed=3, vocab_size=VOCAB, hidden_size=HIDDEN, sliding_window=4)  # type: ignore[arg-type]
    return ParallelTrainer(model, torch.arange(VOCAB), DrafterRecipe(**{"parallel": 4} | recipe), "cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_states_are_those_of_a_plain_forward_with_mask_tokens_after_each_text(kind):
    trainer = trainer_of(kind)
    lengths = [torch.tensor([3, 0, 2, 9, 1, 5]), torch.tensor([4]), torch.tensor([1, 3, 0, 2])]
    rows = lay_out(ANSWERS, torch.cat(lengths))
    found = trainer._states_of(rows).detach()
    embed, decoder = trainer._draft.get_input_embeddings(), trainer._draft.get_decoder()
    firsts, deeper = [], []  # states, and the tokens that they guess
    first = 0
    for text, one in zip(ANSWERS, lengths, strict=True):
        count = text.num_answer_tokens
        for place in range(count):
            length = min(int(one[place]), count - 1 - place)  # chains end with the answer
            real = embed(text.token_ids[: text.num_prompt_tokens + place])
            masks = trainer._mask_embedding.detach().expand(length, -1)
            with torch.no_grad():
                state = decoder(inputs_embeds=torch.cat([real, masks])[None]).last_hidden_state[0]
            firsts.append((state[-1 - length], first + place))
            deeper += [(state[-length + depth], first + place + depth + 1) for depth in range(length)]
        first += count
    wanted, places = zip(*firsts, *deeper, strict=True)
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-4, rtol=0)
    assert rows.places.tolist() == list(places)


def test_chains_are_kept_with_the_retention():
    lengths = random_lengths(20_000, 7, 0.6, torch.Generator().manual_seed(1)).numpy()
    assert lengths.max() == 7
    for depth in range(1, 8):
        assert np.mean(lengths >= depth) == pytest.approx(0.6**depth, abs=0.015)
    assert random_lengths(5, 7, 1.0, torch.Generator()).tolist() == [7] * 5


def test_a_step_teaches_layers_readout_and_the_mask_token():
    trainer = trainer_of()
    before = [parameter.detach().clone() for parameter in (trainer._mask_embedding, trainer._readout)]
    first = trainer._loss(ANSWERS, seed=5, share=0.0).item()
    trainer.distil(ANSWERS, lambda *progress: None)
    assert trainer._loss(ANSWERS, seed=5, share=0.0).item() < first
    for old, new in zip(before, (trainer._mask_embedding, trainer._readout), strict=True):
        assert not torch.equal(old, new)


def test_mask_tokens_learn_nothing_before_their_time():
    trainer = trainer_of(masks_from=1.0)
    mask, readout = trainer._mask_embedding.detach().clone(), trainer._readout.detach().clone()
    trainer.distil(ANSWERS, lambda *progress: None)
    assert torch.equal(trainer._mask_embedding, mask)
    assert not torch.equal(trainer._readout, readout)


def test_tokens_of_a_round_are_the_right_guesses_in_a_row_and_one_more():
    yes, no = True, False
    assert parallel_tokens_per_round([[[yes, no], [no], [no, yes], [yes]]]) == 4 / 3
    assert parallel_tokens_per_round([[[no]] * 3, [[yes, yes, yes]] * 4]) == 7 / 4
    assert parallel_tokens_per_round([]) == 1.0


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_saved_model_guesses_what_was_trained(kind, tmp_path):
    trainer = trainer_of(kind, parallel=3)
    text = answer(9, 5, 4)
    rows = lay_out([text], torch.tensor([2, 2, 2, 2, 2]))
    wanted = torch.nn.functional.linear(trainer._states_of(rows), trainer._readout, trainer._bias).detach()
    trainer.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    mask = model.config.pard_token
    assert (mask, model.config.spd_type, model.config.vocab_size) == (VOCAB, "pard", VOCAB + 1)
    ends = text.num_prompt_tokens + torch.arange(5)
    found = torch.empty_like(wanted)
    for row, (place, depth) in enumerate(zip(rows.places.tolist(), rows.depths.tolist(), strict=True)):
        ids = [*text.token_ids[: ends[place - depth]].tolist(), *[mask] * depth]
        with torch.no_grad():
            found[row] = model(torch.tensor([ids])).logits[0, -1, :VOCAB]
    torch.testing.assert_close(found, wanted, atol=0.3, rtol=0.02)  # saved in bfloat16
