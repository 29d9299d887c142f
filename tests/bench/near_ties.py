"""Whether drafts change answers in bfloat16 at near-ties alone: tiny random models of each family that is given.

    python tests/bench/near_ties.py [--kinds qwen3_next,bamba] [--seeds 3] [--tokens 48]

Each model answers without drafts, then with its own answers as predictions, some tokens of which are wrong. All figures
are in thousandths of a nat, against the same weights in float32. Errors are root mean squares of the log-probabilities
of the tokens that were said: by the unpatched model for the whole text at once and token by token, by the engine
without and with drafts. Where two answers part, their gap is the difference of the two tokens' log-probabilities, told
as a multiple of the engine's error. A gap of a few errors is a near-tie, which another order of the same sums decides.
Were a state wrong, the errors with drafts would be larger.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.models.quiet import quiet_transformers
from actors.models.random_model import random_model
from actors.models.tiny_config import config_of_type, tiny_config
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, PADDING, make_byte_tokenizer

KINDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
    "llama",
)
WORDS = ("oak", "elm", "ash", "fir", "yew", "bay", "box")
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in WORDS]


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]


def save_model(kind: str, seed: int, directory: Path) -> None:
    config = tiny_config(config_of_type(kind))
    config.vocab_size, config.eos_token_id, config.pad_token_id = BYTE_VOCAB_SIZE, None, PADDING
    config.tie_word_embeddings = False
    with quiet_transformers():
        random_model(config, seed).bfloat16().save_pretrained(directory)
        make_byte_tokenizer().save_pretrained(directory)


def answers(directory: Path, tokens: int) -> tuple[list[Answer], list[Answer], int]:
    """Without drafts, with them, and how many draft tokens were accepted."""
    engine = LocalEngine(
        str(directory), dtype="bfloat16", device="cpu", drafters=("prediction",), kv_cache_tokens=4096,
        seconds_of_rows=lambda rows: 0.02 + 1e-6 * rows,
    )  # fmt: skip
    options = {"max_new_tokens": tokens, "ignore_eos": True, "logprobs": 1}
    plain = engine.generate(PROMPTS, drafters=(), **options)
    predictions = [[token if at % 9 else (token + 1) % 256 for at, token in enumerate(one.token_ids)] for one in plain]
    drafted = engine.generate(PROMPTS, predictions=predictions, **options)
    accepted = sum(sum(one.accepted_tokens.values()) for one in drafted)
    return [answer_of(one) for one in plain], [answer_of(one) for one in drafted], accepted


def answer_of(one: Generation) -> Answer:
    assert one.logprobs is not None
    return Answer(one.token_ids, one.logprobs.chosen.tolist())


def whole_logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[tokens, vocab] after the prompt, the text computed at once."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(dim=-1)


def step_logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The same, token by token with a cache."""
    output = model(input_ids=torch.tensor([prompt]), use_cache=True)
    rows = [output.logits[0, -1]]
    for token in answer[:-1]:
        output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        rows.append(output.logits[0, -1])
    return torch.stack(rows).double().log_softmax(dim=-1)


def rms(values: list[float]) -> float:
    return 1e3 * math.sqrt(sum(value * value for value in values) / len(values))


def measure(model: PreTrainedModel, plain: list[Answer], drafted: list[Answer]) -> tuple[list[float], list[float]]:
    """Errors of the four ways, and the gaps where answers part."""
    exact = copy.deepcopy(model).float()
    errors: list[list[float]] = [[], [], [], []]
    gaps: list[float] = []
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        right = whole_logprobs(exact, prompt, one.token_ids)
        said = torch.tensor(one.token_ids)[:, None]
        chosen = right.gather(1, said)[:, 0]
        for found, way in zip(errors, (whole_logprobs, step_logprobs), strict=False):
            found += (way(model, prompt, one.token_ids).gather(1, said)[:, 0] - chosen).tolist()
        errors[2] += (torch.tensor(one.logprobs).double() - chosen).tolist()
        own = whole_logprobs(exact, prompt, other.token_ids).gather(1, torch.tensor(other.token_ids)[:, None])[:, 0]
        errors[3] += (torch.tensor(other.logprobs).double() - own).tolist()
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        if (place := next((at for at, (a, b) in pairs if a != b), None)) is not None:
            gaps.append(1e3 * abs(right[place, one.token_ids[place]] - right[place, other.token_ids[place]]).item())
    return [rms(found) for found in errors], gaps


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind")
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    print(f"{'model':18}{'seed':>5}{'accepted':>10}{'at once':>9}{'by token':>9}{'engine':>8}{'drafts':>8}  parted")
    for kind in asked.kinds:
        for seed in range(asked.seeds):
            with tempfile.TemporaryDirectory() as directory:
                save_model(kind, seed, Path(directory))
                plain, drafted, accepted = answers(Path(directory), asked.tokens)
                with quiet_transformers():
                    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
            errors, gaps = measure(model, plain, drafted)
            at_once, by_token, engine, drafts = errors
            told = " ".join(f"{gap / engine:.1f}" for gap in sorted(gaps))
            print(
                f"{kind:18}{seed:5}{accepted:10}{at_once:9.1f}{by_token:9.1f}{engine:8.1f}{drafts:8.1f}  "
                f"{len(gaps)} of {len(plain)}: {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
