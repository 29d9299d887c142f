"""Writes training text: the target answers many prompts at a time, on all cores."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.training.seed_prompts import built_in_prompts
from actors.training.target_text import Answer, encode_prompts, write_answers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from actors.models.loader import ModelInfo
    from actors.training.recipes import DrafterRecipe, HeadRecipe
    from actors.training.training_loop import Report

_STAGE = "writing text"
_HELD_OUT_PROMPTS = 24  # answered greedily, for measuring; not trained on
_SAMPLED_TEMPERATURE = 0.8  # every other training answer is sampled, for contexts that greedy text never visits
_MAX_PROMPT_TOKENS = 1024
_MAX_CACHE_BYTES = 4 << 30  # approximate limit of the keys and values of all batches at work
_MIN_WORKER_ROWS = 16  # smaller batches do not keep a core busy
_WRITTEN_SHARE = 0.75  # expected length of an answer relative to its limit, until lengths are known
_ENOUGH = 0.9  # share of the wanted tokens; a small last batch takes as many steps as a full one


@dataclass(frozen=True, slots=True)
class Writing:
    """What a target wrote for a training."""

    answers: list[Answer]
    # float32 [vocabulary]: number of times each token was the greedy choice, plus its probabilities at sampled tokens
    vocab_mass: torch.Tensor
    held_out: list[Answer]  # greedy, to prompts that are not trained on

    def state(self) -> dict[str, Any]:
        """Tensors, lists and numbers only, for a checkpoint."""
        return {
            "vocab_mass": self.vocab_mass,
            "answers": [_answer_state(answer) for answer in self.answers],
            "held_out": [_answer_state(answer) for answer in self.held_out],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Writing:
        return cls(
            answers=[Answer(**answer) for answer in state["answers"]],
            vocab_mass=state["vocab_mass"],
            held_out=[Answer(**answer) for answer in state["held_out"]],
        )


class TargetWriter:
    """Answers of at most `answer_tokens` tokens, `write_rows` at a time. Reproducible for one seed."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        info: ModelInfo,
        recipe: DrafterRecipe | HeadRecipe,
    ) -> None:
        from actors.engine.kv_bytes import unpaged_kv_bytes_per_token

        self._target = target
        self._tokenizer = tokenizer
        self._eos_token_ids = info.eos_token_ids
        self._answer_tokens = min(recipe.answer_tokens, max(1, info.max_model_len // 2))
        self._prompt_tokens = max(1, min(_MAX_PROMPT_TOKENS, info.max_model_len - self._answer_tokens))
        self._rows = recipe.write_rows
        self._bytes_per_token = unpaged_kv_bytes_per_token(target)
        self._seed = recipe.seed

    def split(self, prompts: Sequence[str] | None) -> tuple[list[str], Iterator[str]]:
        """Held-out prompts, and an endless stream of others. None: the built-in ones. Raises ModelError."""
        if prompts is None:
            stream = built_in_prompts(self._seed)
            held_out = list(dict.fromkeys(islice(stream, _HELD_OUT_PROMPTS)))
            known = set(held_out)
            return held_out, (prompt for prompt in stream if prompt not in known)
        deck = list(dict.fromkeys(prompts))
        if len(deck) < 2:
            raise ModelError(f"drafter prompts are {len(deck)}; it takes at least 2, one of them held out")
        random.Random(self._seed).shuffle(deck)
        count = min(_HELD_OUT_PROMPTS, max(1, len(deck) // 8))
        return deck[:count], cycle(deck[count:])

    def answer(self, prompts: Sequence[str]) -> list[Answer]:
        """The greedy answer to each prompt."""
        answers: list[Answer] = []
        for start in range(0, len(prompts), self._rows):
            rows = [(prompt, 0.0) for prompt in prompts[start : start + self._rows]]
            answers += self._write(rows, start, lambda tokens: None)[0]
        return answers

    def write(
        self,
        prompts: Iterator[str],
        wanted: int,
        held_out: Sequence[str],
        report: Report,
    ) -> Writing:
        """About `wanted` tokens of training answers, half of them greedy, and the held-out answers."""
        import torch

        mass = torch.zeros(self._target.get_output_embeddings().weight.shape[0])
        answers: list[Answer] = []
        rows = [(prompt, 0.0) for prompt in held_out]
        done, length = 0, self._answer_tokens * _WRITTEN_SHARE
        while done < _ENOUGH * wanted:
            count = min(max(1, self._rows - len(rows)), math.ceil((wanted - done) / length))
            heat = (0.0 if index % 2 else _SAMPLED_TEMPERATURE for index in range(count))
            rows += zip(islice(prompts, count), heat, strict=True)
            before = sum(answer.num_answer_tokens for answer in answers)
            written, weight = self._write(rows, len(answers), _reporter(report, before, wanted))
            answers += written
            mass += weight
            done = sum(answer.num_answer_tokens for answer in answers[len(held_out) :])
            length = done / (len(answers) - len(held_out))
            rows = []
        report(_STAGE, wanted, wanted)
        training = answers[len(held_out) :]
        mass += torch.bincount(torch.cat([answer.argmax for answer in training]), minlength=len(mass))
        return Writing(training, mass, answers[: len(held_out)])

    def _write(
        self, rows: Sequence[tuple[str, float]], offset: int, on_tokens: Callable[[int], None]
    ) -> tuple[list[Answer], torch.Tensor]:
        """Answers to (prompt, temperature), one batch a core: the small steps of a batch do not keep two cores busy.

        The second result is the target's probability of each token, summed over the sampled tokens.
        """
        import torch

        encoded = encode_prompts(self._tokenizer, [prompt for prompt, _ in rows], self._prompt_tokens)
        answers: list[Answer | None] = [None] * len(rows)
        written: dict[int, int] = {}
        telling, stopped = threading.Lock(), threading.Event()

        def work(index: int) -> torch.Tensor:
            def progress(tokens: int) -> None:
                if stopped.is_set():
                    raise CancelledError
                with telling:  # so that the sum only grows
                    written[index] = tokens
                    on_tokens(sum(written.values()))

            batch = batches[index]
            mass = torch.zeros(self._target.get_output_embeddings().weight.shape[0])
            batch_answers = write_answers(
                self._target,
                [encoded[row] for row in batch],
                temperatures=[rows[row][1] for row in batch],
                max_new_tokens=self._answer_tokens,
                eos_token_ids=self._eos_token_ids,
                seed=self._seed + offset + index,
                vocab_mass=mass,
                on_tokens=progress,
            )
            for row, answer in zip(batch, batch_answers, strict=True):
                answers[row] = answer
            return mass

        with _core_pool(self._target.device.type, len(rows) // _MIN_WORKER_ROWS) as (pool, workers):
            tokens = sum(len(prompt) + self._answer_tokens for prompt in encoded)
            room = _MAX_CACHE_BYTES / workers
            batches = batches_by_length(encoded, workers, math.ceil(tokens * self._bytes_per_token / room))
            try:
                mass = torch.stack(list(pool.map(work, range(len(batches))))).sum(0)
            except BaseException:  # KeyboardInterrupt, too: the other workers would write on for a minute
                stopped.set()
                raise
        return [answer for answer in answers if answer is not None], mass


def batches_by_length(prompts: Sequence[Sequence[int]], workers: int, at_least: int = 1) -> list[list[int]]:
    """Rows of each batch, the longest prompts first. Prompts of similar length share a batch, for little padding.

    Two batches a worker if there are enough rows: one long prompt costs its length times the rows of its batch.
    """
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]), reverse=True)
    count = max(at_least, workers * (2 if len(prompts) >= 2 * workers * _MIN_WORKER_ROWS else 1))
    size = math.ceil(len(prompts) / count)
    return [order[start : start + size] for start in range(0, len(prompts), size)]


@contextmanager
def _core_pool(device: str, most_workers: int) -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """Workers that share torch's threads, and their number. One worker if the device is not the CPU."""
    import torch

    threads = torch.get_num_threads()
    workers = max(1, min(threads, most_workers)) if device == "cpu" else 1
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            yield pool, workers
    finally:
        torch.set_num_threads(threads)  # for new threads: the setting is per thread


def _answer_state(answer: Answer) -> dict[str, Any]:
    return {field.name: getattr(answer, field.name) for field in fields(Answer)}


def _reporter(report: Report, base: int, wanted: int) -> Callable[[int], None]:
    return lambda count: report(_STAGE, min(base + count, wanted), wanted)
