"""Trains the parallel draft model that Paceline ships for its demo target.

    python tests/bench/train_demo_drafter.py write --texts texts --chunks 8
    python tests/bench/train_demo_drafter.py train --texts texts --out DIRECTORY
    paceline drafter pack DIRECTORY actors/training/shipped/FINGERPRINT.safetensors

Half of the prompts are the built-in ones. The target writes the other half itself: after the chat template's frame of
a user's turn, and the first words of a task, it goes on as a user would (Magpie, Xu et al. 2024, arXiv:2406.08464).
Labels are the target's distributions at all tokens after the system prompt, those of the user's turn included. The
first part of the training has no mask tokens, which do not help the guess of the next token and make a step half as
long again.
"""

import argparse
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache

from actors.home import paceline_home
from actors.models.catalog import resolve_model, silent
from actors.models.loader import load_model, load_tokenizer, read_model_info
from actors.models.source import ModelSource
from actors.models.staging import directory_lock
from actors.training.drafter_build import card_of, new_trainer, save_drafter
from actors.training.drafter_card import DrafterCard
from actors.training.recipes import DrafterRecipe
from actors.training.seed_prompts import built_in_prompts
from actors.training.target_text import Answer
from actors.training.target_writer import Writing

RECIPE = DrafterRecipe(
    layers=3, vocab_size=8192, parallel=4, retention=0.5, epochs=4, masks_from=0.73, answer_tokens=96, write_rows=288
)
SEED, HELD_OUT = 1000, 32
TURNS = [  # first words of a user's turn, its most tokens, and what follows a passage
    *[("", 90, "")] * 10,
    *(
        (words, 260, "")
        for words in ("Summarize the following article:\n\n", "Write a short summary of this text.\n\n")
    ),
    ("Read the passage and answer the question.\n\nPassage:", 240, "\n\nQuestion:"),
    ("Use these notes to answer. Notes:\n\n1.", 240, "\n\nQuestion:"),
    ("Here is a text:", 200, "\n\nBased on the text,"),
    *((words, 60, "") for words in ("Translate this German sentence into English:", "Translate from German:")),
    *((words, 50, "") for words in ("Question:", "Who", "When", "What", "Where")),
    *((words, 65, "") for words in ("How many", "Write", "Explain", "Imagine", "Give", "Compare")),
    *((words, 100, "") for words in ("Solve this problem step by step.", "A shop sells", "If")),
]
LIKELY = 64  # tokens to sample from


@dataclass(frozen=True)
class Written:
    """What the target wrote after one prompt."""

    token_ids: torch.Tensor  # int64 [n]
    hidden: torch.Tensor  # [n, H]: input of the output layer that gave each token
    argmax: torch.Tensor  # int64 [n]
    prompt_states: torch.Tensor  # [prompt, H]


class Writer:
    """Writes with a Llama of heads in groups: several times as fast as token by token through `transformers`."""

    def __init__(self, source: ModelSource, device: str = "cpu") -> None:
        self.model, self.device = load_model(source, "bfloat16", device), device
        self.end = read_model_info(source).eos_token_ids[0]

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[list[int]], heat: Sequence[float], most: int, draw: torch.Generator
    ) -> list[Written]:
        """heat: the temperature of each prompt, 0 for the likeliest token. What is returned is on the CPU."""
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        batch, width = len(prompts), max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]).to(self.device)
        real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(self.device)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        states = decoder(ids, real, positions, past_key_values=cache, use_cache=True).last_hidden_state
        keys, values = [], []
        for layer in cache.layers:
            for found, kept in ((layer.keys, keys), (layer.values, values)):
                room = found.new_zeros(batch, found.shape[1], width + most, found.shape[3])
                room[:, :, :width] = found
                kept.append(room)
        del cache
        hidden_by = states.new_full((batch, 1, 1, width + most), -math.inf)
        hidden_by[:, 0, 0, :width][real.bool()] = 0
        hidden = states.new_empty(batch, most, states.shape[2])
        written, best = ids.new_zeros((2, batch, most))
        lengths, live = ids.new_zeros(batch), torch.arange(batch, device=self.device)
        state, position, warmth = states[:, -1], positions[:, -1:], torch.tensor(heat, device=self.device)
        for step in range(most):
            values_of, tokens = head(state).topk(LIKELY)
            chosen = _draw(values_of, tokens, warmth[live], draw)
            hidden[live, step], written[live, step], best[live, step] = state, chosen, tokens[:, 0]
            lengths[live] = step + 1
            going = (chosen != self.end).nonzero()[:, 0]
            if not len(going) or step + 1 == most:
                break
            if len(going) < 0.85 * len(live):  # what a row writes after its end is cut off below
                keys, values = [part[going] for part in keys], [part[going] for part in values]
                hidden_by, live, chosen, position = hidden_by[going], live[going], chosen[going], position[going]
            position = position + 1
            hidden_by[..., width + step] = 0
            state = self._forward(chosen, position, (keys, values), width + step, hidden_by[..., : width + step + 1])
        written, hidden, best, states = (part.cpu() for part in (written, hidden, best, states))
        found = []
        for row, prompt in enumerate(prompts):
            ends = (written[row, : lengths[row]] == self.end).nonzero()
            count = int(ends[0]) + 1 if len(ends) else int(lengths[row])
            parts = (part[row, :count].clone() for part in (written, hidden, best))
            found.append(Written(*parts, states[row, width - len(prompt) :].clone()))
        return found

    def _forward(
        self, ids: torch.Tensor, position: torch.Tensor, cache: tuple[list, list], place: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """The last hidden state after one more token of each row, [batch, H]."""
        decoder, config = self.model.get_decoder(), self.model.config
        size, heads, groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        angle = position.float() * decoder.rotary_emb.inv_freq.float()
        cos, sin = (torch.cat([part] * 2, -1)[:, None].bfloat16() for part in (angle.cos(), angle.sin()))

        def turned(rows: torch.Tensor) -> torch.Tensor:
            first, second = rows.chunk(2, -1)
            return rows * cos + torch.cat([-second, first], -1) * sin

        def normed(norm: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
            return rms_norm(rows, rows.shape[-1:], norm.weight, config.rms_norm_eps)

        state, batch = decoder.embed_tokens(ids), len(ids)
        for layer, keys, values in zip(decoder.layers, *cache, strict=True):
            own, rows = layer.self_attn, normed(layer.input_layernorm, state)
            query = turned(own.q_proj(rows).view(batch, heads, size))
            keys[:, :, place] = turned(own.k_proj(rows).view(batch, groups, size))
            values[:, :, place] = own.v_proj(rows).view(batch, groups, size)
            seen = (part[:, :, : place + 1] for part in (keys, values))
            found = scaled_dot_product_attention(query.view(batch, groups, heads // groups, size), *seen, mask)
            state = state + own.o_proj(found.reshape(batch, heads * size))
            rows = normed(layer.post_attention_layernorm, state)
            state = state + layer.mlp.down_proj(silu(layer.mlp.gate_proj(rows)) * layer.mlp.up_proj(rows))
        return normed(decoder.norm, state)


def _draw(values: torch.Tensor, tokens: torch.Tensor, heat: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A token of each row, int64 [n]. values, tokens: the likeliest, [n, LIKELY], in order."""
    below = torch.softmax(values.float() / heat.clamp(min=1e-4)[:, None], -1).cumsum(-1)
    point = torch.rand(len(below), 1, generator=draw).to(below.device) * below[:, -1:]
    place = torch.searchsorted(below, point, right=True).clamp(max=LIKELY - 1)
    return tokens.gather(1, place * (heat > 0)[:, None])[:, 0]


class Frame:
    """The token ids around a user's turn."""

    def __init__(self, source: ModelSource) -> None:
        self._tokenizer = load_tokenizer(source)
        message = [{"role": "user", "content": "<>"}]
        text = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        self.before, self.after = (self.encode(part) for part in text.split("<>"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def own_turns(writer: Writer, frame: Frame, count: int, rng: random.Random, draw: torch.Generator) -> list[list[int]]:
    """User's turns that the target writes."""
    kinds = sorted((rng.choice(TURNS) for _ in range(count)), key=lambda kind: kind[1])
    turns, passages = [], []
    for part in (kinds[: count // 2], kinds[count // 2 :]):
        begun = [frame.encode(words.rstrip()) for words, _, _ in part]
        heat = [rng.choice((0.8, 1.0)) for _ in part]
        found = writer.write([frame.before + ids for ids in begun], heat, part[-1][1], draw)
        for (_, most, then), ids, written in zip(part, begun, found, strict=True):
            turn = ids + [token for token in written.token_ids[:most].tolist() if token != writer.end]
            if then:
                passages.append(turn + frame.encode(then))
            elif turn:
                turns.append(turn)
    if passages:
        found = writer.write([frame.before + ids for ids in passages], [0.8] * len(passages), 30, draw)
        ends = ([token for token in written.token_ids.tolist() if token != writer.end] for written in found)
        turns += [turn + end for turn, end in zip(passages, ends, strict=True)]
    return turns


def write_chunk(writer: Writer, frame: Frame, seed: int) -> list[dict]:
    """Texts with labels from the user's turn on. first: tokens before it; prompt: tokens before the answer."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    turns = own_turns(writer, frame, RECIPE.write_rows // 2, rng, draw)
    built_in = itertools.islice(built_in_prompts(seed), RECIPE.write_rows - len(turns))
    turns = sorted(turns + [frame.encode(prompt) for prompt in built_in], key=len)
    texts, first = [], len(frame.before)
    for part in (turns[: len(turns) * 3 // 5], turns[len(turns) * 3 // 5 :]):
        prompts = [frame.before + turn[:900] + frame.after for turn in part]
        heat = [0.0 if rng.random() < 0.6 else 0.8 for _ in part]
        for prompt, written in zip(prompts, writer.write(prompts, heat, RECIPE.answer_tokens, draw), strict=True):
            states = written.prompt_states[first - 1 : -1]
            with torch.inference_mode():
                best = writer.model.get_output_embeddings()(states.to(writer.device)).argmax(-1).cpu()
            ids = torch.cat([torch.tensor(prompt), written.token_ids]).to(torch.int32)
            labels = torch.cat([states, written.hidden]), torch.cat([best, written.argmax]).to(torch.int32)
            texts.append(
                {"token_ids": ids, "first": first, "prompt": len(prompt), "hidden": labels[0], "argmax": labels[1]}
            )
    return texts


def answers_in(directory: Path) -> list[Answer]:
    files = sorted(directory.glob("*.pt"), key=lambda path: int(path.stem))
    texts = [text for path in files for text in torch.load(path)]
    return [Answer(t["token_ids"].long(), t["first"], t["hidden"], t["argmax"].long()) for t in texts]


def train(
    source: ModelSource, answers: list[Answer], out: Path, device: str = "cpu", most_s: float | None = None
) -> DrafterCard:
    """most_s: seconds until the last training step, loading and the readout included."""
    started = time.monotonic()
    random.Random(RECIPE.seed).shuffle(answers)
    held_out, answers = answers[:HELD_OUT], answers[HELD_OUT:]
    target = load_model(source, "bfloat16", device)
    tokens = [answer.argmax for answer in answers] + [
        answer.token_ids[answer.num_prompt_tokens :] for answer in answers
    ]
    mass = torch.bincount(torch.cat(tokens), minlength=target.config.vocab_size).float()
    writing = Writing(answers, mass, held_out)
    recipe = replace(RECIPE, text_tokens=sum(answer.num_answer_tokens for answer in answers))
    trainer = new_trainer(source, target, writing, recipe, device)
    del target
    trainer.fit_readout(answers, silent)
    before = trainer.agreement(held_out).share
    left_s = None if most_s is None else max(1.0, most_s - (time.monotonic() - started))
    trainer.distil(
        answers, lambda stage, done, total: print(f"\r{stage} {done} of {total}", end="", flush=True), most_s=left_s
    )
    info, seconds = read_model_info(source), time.monotonic() - started
    card = card_of(trainer, writing, info, agreement_before=before, evaluation={}, seconds=seconds)
    with directory_lock(out):
        save_drafter(trainer, load_tokenizer(source), card, out)
    return card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("write", "train"))
    parser.add_argument("--texts", type=Path, required=True, help="directory of the written texts")
    parser.add_argument("--chunks", type=int, default=8, help="how many to write, each of about 38,000 tokens")
    parser.add_argument("--out", type=Path, help="directory of the draft model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, help="of train: most until its last step; at most all epochs")
    arguments = parser.parse_args()
    if arguments.step == "train" and (arguments.out is None or not any(arguments.texts.glob("*.pt"))):
        parser.error("train needs --out, and texts that were written")
    torch.set_num_threads(arguments.threads)
    source = resolve_model("smollm2", paceline_home())
    if arguments.step == "train":
        most_s = None if arguments.minutes is None else 60 * arguments.minutes
        print(train(source, answers_in(arguments.texts), arguments.out, arguments.device, most_s))
        return
    arguments.texts.mkdir(parents=True, exist_ok=True)
    writer, frame = Writer(source, arguments.device), Frame(source)
    for number in range(arguments.chunks):
        if not (path := arguments.texts / f"{number}.pt").exists():
            texts = write_chunk(writer, frame, SEED + number)
            torch.save(texts, path)
            print(path, sum(len(text["argmax"]) for text in texts), flush=True)


if __name__ == "__main__":
    main()
