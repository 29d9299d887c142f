"""Trains the parallel draft model that Paceline ships for its demo target.

    python tests/bench/train_demo_drafter.py write --texts texts --chunks 3 --device cuda
    python tests/bench/train_demo_drafter.py write --texts texts --chunks 3 --device cuda --first 3  # at the same time
    python tests/bench/train_demo_drafter.py train --texts texts --out DIRECTORY --device cuda
    paceline drafter pack DIRECTORY actors/training/shipped/FINGERPRINT.safetensors

A quarter of the prompts are the built-in ones. The target writes the others itself: after the chat template's frame of
a user's turn, and the first words of a task, it goes on as a user would (Magpie, Xu et al. 2024, arXiv:2406.08464).
Labels are the target's distributions at all tokens after the system prompt, those of the user's turn included. The
first part of the training has no mask tokens, which do not help the guess of the next token and make a step longer.
Made for a GPU of 80 GB.
"""

import argparse
import itertools
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel

from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.loader import load_model, load_tokenizer, read_model_info
from actors.models.source import ModelSource
from actors.models.staging import directory_lock
from actors.training.drafter_build import card_of, new_trainer, save_drafter
from actors.training.drafter_card import DrafterCard
from actors.training.recipes import DrafterRecipe
from actors.training.seed_prompts import built_in_prompts
from actors.training.target_text import Answer, AnswerPlaces, padded_texts
from actors.training.target_writer import Writing
from actors.training.training_loop import batches_of, fast_dtype

RECIPE = DrafterRecipe(
    layers=3,
    vocab_size=8192,
    parallel=4,
    retention=0.6,
    epochs=40,
    masks_from=0.55,
    answer_tokens=128,
    write_rows=4096,
    batch_tokens=16_384,
    learning_rate=2e-3,
)
SEED, HELD_OUT = 1000, 64
TURNS = [  # first words of a user's turn, its most tokens, and what follows a passage
    *[("", 120, "")] * 10,
    *(
        (words, most, "")
        for words in ("Summarize the following article:\n\n", "Write a short summary of this text.\n\n", "Summarize: ")
        for most in (260, 560)
    ),
    *(("Read the passage and answer the question.\n\nPassage:", most, "\n\nQuestion:") for most in (240, 480)),
    *(("Use these notes to answer. Notes:\n\n1.", most, "\n\nQuestion:") for most in (240, 560)),
    ("Here is a text:", 200, "\n\nBased on the text,"),
    *((words, 70, "") for words in ("Translate this German sentence into English:", "Translate from German:") * 2),
    *((words, 50, "") for words in ("Question:", "Who", "When", "What", "Where", "Which", "Why")),
    *((words, 65, "") for words in ("How many", "Write", "Explain", "Imagine", "Give", "Compare", "How")),
    *((words, 100, "") for words in ("Solve this problem step by step.", "A shop sells", "If", "You are")),
]
LIKELY = 64  # tokens to sample from
CACHE_TOKENS = 700_000  # of the texts that are written at a time
LABEL_TOKENS = 32_768  # of the texts whose labels are computed at a time
LOOK_EVERY = 8  # steps between looks at which texts have ended


@dataclass(frozen=True)
class Wish:
    """A text that the target is to go on with. heat: the temperature, 0 for the likeliest token."""

    prompt: list[int]
    heat: float
    most: int  # tokens


class Writer:
    """Writes with a Llama of heads in groups: several times as fast as token by token through `transformers`."""

    def __init__(self, source: ModelSource, device: str = "cpu") -> None:
        self.model, self.device = load_model(source, "bfloat16", device), device
        self.end = read_model_info(source).eos_token_ids[0]

    def write(self, wishes: Sequence[Wish], draw: torch.Generator) -> list[list[int]]:
        """The tokens after each prompt, the end token included. draw: of the writer's device."""
        order = sorted(range(len(wishes)), key=lambda row: len(wishes[row].prompt) + wishes[row].most)
        parts: list[list[int]] = []
        for row in order:
            if not parts or (len(parts[-1]) + 1) * (len(wishes[row].prompt) + wishes[row].most) > CACHE_TOKENS:
                parts.append([])
            parts[-1].append(row)
        found = {}
        for part in parts:
            found |= zip(part, self._write([wishes[row] for row in part], draw), strict=True)
        return [found[row] for row in range(len(wishes))]

    @torch.inference_mode()
    def _write(self, wishes: Sequence[Wish], draw: torch.Generator) -> list[list[int]]:
        head, device = self.model.get_output_embeddings(), self.device
        batch, most = len(wishes), max(wish.most for wish in wishes)
        width = -(-max(len(wish.prompt) for wish in wishes) // 16) * 16
        pads = [width - len(wish.prompt) for wish in wishes]
        ids = torch.tensor([[0] * pad + wish.prompt for pad, wish in zip(pads, wishes, strict=True)]).to(device)
        real = torch.arange(width, device=device) >= torch.tensor(pads, device=device)[:, None]
        positions = (real.cumsum(1) - 1).clamp(min=0)
        room = width + -(-most // 16) * 16
        state, keys, values = self._read(ids, real, positions, room)
        hidden_by = state.new_full((batch, 1, 1, room), -math.inf)
        hidden_by[:, 0, 0, :width][real] = 0
        written = torch.full((batch, most), self.end, device=device)
        heat, limits = (
            torch.tensor(part, device=device)
            for part in ([wish.heat for wish in wishes], [wish.most for wish in wishes])
        )
        live, position = torch.arange(batch, device=device), positions[:, -1:]
        for step in range(most):
            chosen = _draw(head(state), heat[live], draw)
            written[live, step] = chosen
            if step + 1 == most:
                break
            if step % LOOK_EVERY == LOOK_EVERY - 1:  # what a row writes after its end is cut off below
                is_over = (written[live, : step + 1] == self.end).any(1) | (limits[live] <= step + 1)
                going = (~is_over).nonzero()[:, 0]
                if not len(going):
                    break
                if len(going) < 0.85 * len(live):
                    for cache in (keys, values):
                        for layer, part in enumerate(cache):
                            cache[layer] = part[going]
                    hidden_by, live, chosen, position = hidden_by[going], live[going], chosen[going], position[going]
            position = position + 1
            hidden_by[..., width + step] = 0
            shown = width + (step // 16 + 1) * 16  # of few lengths: attention is planned for each, and aligned
            state = self._forward(chosen, position, (keys, values), width + step, hidden_by[..., :shown])
        return [
            tokens[: tokens.index(self.end) + 1] if self.end in tokens else tokens
            for tokens in (row[: wish.most] for row, wish in zip(written.tolist(), wishes, strict=True))
        ]

    def _read(
        self, ids: torch.Tensor, real: torch.Tensor, positions: torch.Tensor, room: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The last hidden state of each row [batch, H]; keys and values of each layer [batch, heads, room, size]."""
        cache = DynamicCache(config=self.model.config)
        states = self.model.get_decoder()(ids, real.long(), positions, past_key_values=cache, use_cache=True)
        caches: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for layer in cache.layers:
            for found, kept in zip((layer.keys, layer.values), caches, strict=True):
                kept.append(found.new_zeros(*found.shape[:2], room, found.shape[3]))
                kept[-1][:, :, : ids.shape[1]] = found
            layer.keys = layer.values = None  # of many rows, two caches would be too much
        return states.last_hidden_state[:, -1], *caches

    def _forward(
        self, ids: torch.Tensor, position: torch.Tensor, cache: tuple[list, list], place: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """The last hidden state after one more token of each row, [batch, H]. mask: [batch, 1, 1, more than place]."""
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
            seen = (part[:, :, : mask.shape[-1]] for part in (keys, values))
            found = scaled_dot_product_attention(query.view(batch, groups, heads // groups, size), *seen, mask)
            state = state + own.o_proj(found.reshape(batch, heads * size))
            rows = normed(layer.post_attention_layernorm, state)
            state = state + layer.mlp.down_proj(silu(layer.mlp.gate_proj(rows)) * layer.mlp.up_proj(rows))
        return normed(decoder.norm, state)


def _draw(logits: torch.Tensor, heat: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A token of each row, int64 [n]. logits: [n, vocabulary]."""
    values, tokens = logits.topk(LIKELY)
    below = torch.softmax(values.float() / heat.clamp(min=1e-4)[:, None], -1).cumsum(-1)
    point = torch.rand(len(below), 1, generator=draw, device=below.device) * below[:, -1:]
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

    def gone_on(begun: list[list[int]], most: Sequence[int], heat: float) -> list[list[int]]:
        wishes = [Wish(frame.before + ids, heat, limit) for ids, limit in zip(begun, most, strict=True)]
        found = zip(begun, writer.write(wishes, draw), strict=True)
        return [ids + [token for token in written if token != writer.end] for ids, written in found]

    kinds = [rng.choice(TURNS) for _ in range(count)]
    begun = gone_on([frame.encode(words.rstrip()) for words, _, _ in kinds], [kind[1] for kind in kinds], heat=0.9)
    turns = [turn for turn, (_, _, then) in zip(begun, kinds, strict=True) if turn and not then]
    passages = [turn + frame.encode(then) for turn, (_, _, then) in zip(begun, kinds, strict=True) if then]
    return turns + gone_on(passages, [30] * len(passages), heat=0.8)


def write_chunk(writer: Writer, frame: Frame, seed: int) -> list[dict]:
    """Texts of the target. first: tokens before those with labels, which are the user's turn and the answer."""
    rng, draw = random.Random(seed), torch.Generator(writer.device).manual_seed(seed)
    turns = own_turns(writer, frame, RECIPE.write_rows * 3 // 4, rng, draw)
    built_in = itertools.islice(built_in_prompts(seed), RECIPE.write_rows - len(turns))
    turns += [frame.encode(prompt) for prompt in built_in]
    prompts = [frame.before + turn[:900] + frame.after for turn in turns]
    wishes = [Wish(prompt, 0.0 if rng.random() < 0.6 else 0.8, RECIPE.answer_tokens) for prompt in prompts]
    return [
        {"token_ids": torch.tensor(wish.prompt + answer, dtype=torch.int32), "first": len(frame.before)}
        for wish, answer in zip(wishes, writer.write(wishes, draw), strict=True)
    ]


def texts_in(directory: Path) -> list[Answer]:
    """Without their labels."""
    files = sorted(directory.glob("*.pt"), key=lambda path: int(path.stem))
    none = torch.empty(0)
    texts = (text for path in files for text in torch.load(path))
    return [Answer(text["token_ids"].long(), text["first"], none, none) for text in texts]


@torch.no_grad()
def labelled(target: PreTrainedModel, texts: Sequence[Answer]) -> list[Answer]:
    """The same with the target's hidden states, on its device."""
    found: dict[int, Answer] = {}
    for batch in batches_of(texts, LABEL_TOKENS):
        states = target.get_decoder()(input_ids=padded_texts(batch).to(target.device), use_cache=False)
        counts = [len(text.token_ids) - text.num_prompt_tokens for text in batch]
        places = AnswerPlaces.at([text.num_prompt_tokens for text in batch], counts)
        hidden = states.last_hidden_state[places.texts.to(target.device), places.columns.to(target.device)]
        best = target.get_output_embeddings()(hidden).argmax(-1).cpu()
        for text, part, choices in zip(batch, hidden.split(counts), best.split(counts), strict=True):
            found[id(text)] = replace(text, hidden=part, argmax=choices)
    return [found[id(text)] for text in texts]


def train(
    source: ModelSource, texts: list[Answer], out: Path, device: str = "cpu", most_s: float | None = None
) -> DrafterCard:
    """most_s: seconds until the last training step, loading, labels and the readout included."""
    started = time.monotonic()
    target = load_model(source, fast_dtype(device), device)
    random.Random(RECIPE.seed).shuffle(texts)
    held_out, answers = (labelled(target, part) for part in (texts[:HELD_OUT], texts[HELD_OUT:]))
    tokens = [part for answer in answers for part in (answer.argmax, answer.token_ids[answer.num_prompt_tokens :])]
    mass = torch.bincount(torch.cat(tokens), minlength=target.config.vocab_size).float()
    writing = Writing(answers, mass, held_out)
    recipe = replace(RECIPE, text_tokens=sum(answer.num_answer_tokens for answer in answers))
    trainer = new_trainer(source, target, writing, recipe, device)
    del target
    trainer.fit_readout(answers, lambda *progress: None)
    before = trainer.agreement(held_out).share
    left_s = None if most_s is None else max(1.0, most_s - (time.monotonic() - started))
    print(f"{recipe.text_tokens} tokens, {before:.3f} before, {left_s} s left", flush=True)
    trainer.distil(answers, show, most_s=left_s)
    info, seconds = read_model_info(source), time.monotonic() - started
    card = card_of(trainer, writing, info, agreement_before=before, evaluation={}, seconds=seconds)
    with directory_lock(out):
        save_drafter(trainer, load_tokenizer(source), card, out)
    return card


def show(stage: str, done: int, total: int) -> None:
    if done % 500 == 0:
        print(f"{time.strftime('%X')} {stage} {done} of {total}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("write", "train"))
    parser.add_argument("--texts", type=Path, required=True, help="directory of the written texts")
    parser.add_argument("--first", type=int, default=0, help="of write: the number of the first chunk")
    parser.add_argument("--chunks", type=int, default=1, help="how many to write, each of about 685,000 tokens")
    parser.add_argument("--out", type=Path, help="directory of the draft model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, help="until the last chunk is begun, or the last step is over")
    arguments = parser.parse_args()
    if arguments.step == "train" and (arguments.out is None or not any(arguments.texts.glob("*.pt"))):
        parser.error("train needs --out, and texts that were written")
    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for each length
    source = resolve_model("smollm2", paceline_home())
    most_s = None if arguments.minutes is None else 60 * arguments.minutes
    if arguments.step == "train":
        print(train(source, texts_in(arguments.texts), arguments.out, arguments.device, most_s))
        return
    started = time.monotonic()
    arguments.texts.mkdir(parents=True, exist_ok=True)
    writer, frame = Writer(source, arguments.device), Frame(source)
    for number in range(arguments.first, arguments.first + arguments.chunks):
        if most_s is not None and time.monotonic() - started > most_s:
            break
        if not (path := arguments.texts / f"{number}.pt").exists():
            texts = write_chunk(writer, frame, SEED + number)
            torch.save(texts, new := path.with_suffix(".new"))
            os.replace(new, path)  # whole or not at all
            tokens = sum(len(text["token_ids"]) - text["first"] for text in texts)
            print(f"{time.strftime('%X')} {path}: {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
