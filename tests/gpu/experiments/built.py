"""Engines as they are built of models on disk: each kind of weights, heads, and both kinds of exactness. Their tokens
with drafts, and of each sequence alone, against those of rounds without drafts."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from actors.build import build_target_engine
from actors.engine.options import RoundLimits
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import warm_up
from actors.messages import SamplingParams
from actors.models.source import ModelSource
from actors.options import TargetOptions
from paceline_testing.tiny_models import make_tiny_model, save_eagle_head, tiny_eagle_tensors
from tests.gpu.experiments.decoding import Drafted
from tests.gpu.experiments.lossless import common
from tests.gpu.experiments.setting import Setting

_CASES: tuple[dict[str, Any], ...] = (
    {"exact": "bitwise"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "exact": "bitwise"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "fp8"},
    {"quantization": "int4", "exact": "bitwise"},
    {"quantization": "fp8", "exact": "bitwise"},
    {"eagle_head": "eagle3"},
    {"eagle_head": "eagle"},
    {"eagle_head": "eagle3", "exact": "bitwise"},
    {"attention": "padded"},
    {"enforce_eager": True},
    {"kv_cache_tokens": None, "gpus": 0.6, "kv_cache_fraction": 0.3},
)
_LIMITS = RoundLimits(256, 4, 32)


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "target")
        model = make_tiny_model("llama", layers=3, hidden_size=256, heads=4, kv_heads=2, vocab_size=512)
        model.save_pretrained(target)
        heads = {
            kind: save_eagle_head(Path(directory, kind), model.config, tiny_eagle_tensors(model.config, kind))
            for kind in ("eagle3", "eagle")
        }
        for case in setting.of(_CASES, _CASES[:1] + _CASES[8:9]):
            fields = {"device": setting.device.type, "dtype": "float32", "kv_cache_tokens": 4096, **case}
            if "eagle_head" in case:
                fields["eagle_head"] = str(heads[case["eagle_head"]])
            row = {"case": " ".join(f"{name} {value}" for name, value in case.items())}
            try:
                engine = build_target_engine(
                    ModelSource("tiny", "tiny", target), TargetOptions(**fields), limits=_LIMITS
                )
                yield row | _told(engine, setting.of(32, 4), head_nodes=7 if "eagle_head" in case else -1)
                del engine
            except Exception as error:  # the other cases tell something, too
                traceback.print_exc()
                yield row | {"equal": False, "error": f"{type(error).__name__}: {error}"[:300]}
            setting.release()


def _told(engine: TargetEngine, steps: int, head_nodes: int) -> dict[str, Any]:
    profile = warm_up(engine)
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, engine.vocab_size, (4, 20)).tolist()
    found: dict[str, Any] = {"equal": True}
    for name, sampling in (("greedy", SamplingParams(1, temperature=0.0)), ("sampled", SamplingParams(2))):
        plain = _tokens(Drafted(engine, [], prompts, 0, sampling), steps, nodes=0)
        for kind, nodes in {"drafted": -1, "head": head_nodes}.items():
            if kind == "head" and nodes < 0:
                continue
            decoding = Drafted(engine, plain, prompts, 3, sampling, nodes)
            tokens = _tokens(decoding, steps, nodes=15)
            found[f"{name}, {kind}"] = _same(tokens, plain)
            found[f"{name}, {kind}, accepted"] = decoding.accepted
        alone = [_tokens(Drafted(engine, [], [prompt], 0, sampling), steps, nodes=0)[0] for prompt in prompts]
        found[f"{name}, alone"] = _same(alone, plain)
    found["equal"] = all(value == 1.0 for name, value in found.items() if "accepted" not in name)
    recorded = engine._runner.launches
    found["recorded"] = None if recorded is None else len(recorded._recorded)
    found["blocks"] = engine.options.num_blocks
    found["ms of 1 and 64 rows"] = " ".join(f"{seconds * 1e3:.2f}" for _, seconds in (profile[0], profile[-1]))
    return found


def _tokens(decoding: Drafted, steps: int, nodes: int) -> list[list[int]]:
    tokens = decoding.until(steps, nodes)
    decoding.finish()
    return tokens


def _same(one: list[list[int]], two: list[list[int]]) -> float:
    """Share of tokens before the first that differs."""
    return sum(common(a, b) for a, b in zip(one, two, strict=True)) / sum(map(len, two))
