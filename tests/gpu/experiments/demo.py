"""The demo's target and its draft model, as users run them in one process: texts with drafts against those without, and
against the unpatched model's, and tokens a second. Each prompt is answered once before, which records launches, so
`auto` knows the answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.loader import load_model
from actors.training.seed_prompts import built_in_prompts
from cluster.cli.bench.prompts import user_says
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.offline.engine import LocalEngine
from tests.gpu.experiments.lossless import common
from tests.gpu.experiments.setting import Setting

_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "year": {"type": "integer"}}}
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.8, "seed": 3, "ignore_eos": True},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 4, "ignore_eos": True},
    "constrained": {"temperature": 0.0, "structured_outputs": StructuredOutputs(json_schema=_SCHEMA)},
}
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float32", {}),
    ("bfloat16", {}),
    ("bfloat16", {"quantization": "int8"}),
    ("float32", {"exact": "bitwise"}),
)


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    count, tokens = setting.of((8, 96), (1, 4))
    prompts = list(islice(built_in_prompts(5), count))
    truth: list[list[int]] = []
    for dtype, more in setting.of(_OPTIONS, _OPTIONS[:1]):
        plain: dict[str, list[list[int]]] = {}
        for drafters in (("none",), ("draft_model",), ("auto",)):
            engine = LocalEngine(
                "smollm2", device=setting.device.type, dtype=dtype, drafters=drafters, kv_cache_tokens=16_384,
                draft_model="none" if drafters == ("none",) else "auto", **more,
            )  # fmt: skip
            truth = truth or _greedy(setting, engine, prompts, tokens)
            for kind, asked in _KINDS.items():
                for batch in sorted({1, count}):
                    texts = [user_says(prompt) for prompt in prompts[:batch]]
                    engine.generate(texts, max_new_tokens=tokens, **asked)  # records
                    began = time.perf_counter()
                    found = engine.generate(texts, max_new_tokens=tokens, **asked)
                    seconds = time.perf_counter() - began
                    said = [answer.token_ids for answer in found]
                    usual = plain.setdefault(f"{kind} {batch}", said)
                    row = {
                        "dtype": dtype, **more, "drafters": " ".join(drafters), "kind": kind, "prompts": batch,
                        "tokens/s": sum(map(len, said)) / seconds, "as without drafts": _share(said, usual),
                        "tokens a round": sum(map(len, said)) / max(1, sum(answer.rounds for answer in found)),
                    }  # fmt: skip
                    if kind == "greedy":
                        row["as transformers"] = _share(said, truth[:batch])
                    if dtype == "float32":
                        row["equal"] = said == usual
                    yield row
            del engine
            setting.release()


def _greedy(setting: Setting, engine: LocalEngine, prompts: list[str], tokens: int) -> list[list[int]]:
    """What the unpatched model says in float32."""
    model = load_model(resolve_model("smollm2", paceline_home()), "float32", setting.device.type)
    found = []
    for prompt in prompts:
        ids = engine.tokenizer.apply_chat_template(user_says(prompt), add_generation_prompt=True, return_dict=True)
        text = torch.tensor([ids["input_ids"]], device=setting.device)
        answer = model.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            eos_token_id=None,
        )  # fmt: skip
        found.append(answer[0, text.shape[1] :].tolist())
    return found


def _share(one: list[list[int]], two: list[list[int]]) -> float:
    """Of tokens before the first that differs."""
    alike = sum(common(a[: len(b)], b[: len(a)]) for a, b in zip(one, two, strict=True))
    return alike / max(1, sum(map(len, two)))
