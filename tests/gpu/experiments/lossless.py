"""Tokens with draft trees on the device against the unpatched model's, and against the host's path of the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from actors.messages import SamplingParams
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model
from tests.gpu.experiments.decoding import Decoding, Drafted
from tests.gpu.experiments.setting import Setting

_SAMPLINGS = {
    "greedy": SamplingParams(1, temperature=0.0),
    "sampled": SamplingParams(2, temperature=0.9),
    "truncated": SamplingParams(3, temperature=1.2, top_p=0.8, top_k=20, repetition_penalty=1.2),
}


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    steps = setting.of(24, 3)
    for kind in setting.of(TINY_KINDS, TINY_KINDS[:1]):
        for dtype in setting.of((torch.float32, torch.bfloat16), (torch.float32,)):
            model = make_tiny_model(kind, vocab_size=193).to(setting.device, dtype)
            prompts = [[5, 9, 33, 2, 7], [40, 41, 42, 43, 44], [7, 8, 9, 7, 8]]
            truths = [greedy(copy.deepcopy(model), prompt, steps + 8) for prompt in prompts]
            for is_eager in setting.of((True, False), (True,)):
                engine = setting.engine(copy.deepcopy(model), 2048, is_eager=is_eager)
                decoding = Drafted(engine, truths, prompts, right=3)
                outputs = decoding.until(steps, nodes=7)
                same = sum(common(output, truth[:steps]) for output, truth in zip(outputs, truths, strict=True))
                yield {
                    "kind": kind, "dtype": str(dtype), "compiled": not is_eager,
                    "same as transformers": f"{same}/{steps * len(prompts)}", "accepted": decoding.accepted,
                    "equal": same == steps * len(prompts),
                }  # fmt: skip
    model = make_tiny_model("llama", vocab_size=193).to(setting.device)
    for name, sampling in _SAMPLINGS.items():
        outputs: list[list[list[int]]] = []
        for attention, nodes in (("padded", 0), ("padded", 7), ("triton_tree", 0), ("triton_tree", 7)):
            decoding = Decoding(setting.engine(copy.deepcopy(model), 2048, attention), 3, 9, sampling, seed=4)
            outputs.append(decoding.until(steps, nodes))
        yield {
            "sampling": name,
            "equal": all(output == outputs[0] for output in outputs),
            "of": "host, device, drafted",
        }


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text], device=model.device), use_cache=False).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def common(one: list[int], two: list[int]) -> int:
    """Tokens until the first that differs."""
    return next((index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))
