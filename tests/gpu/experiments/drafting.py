"""A 1B draft model: milliseconds a token, eager and recorded, alone and beside a target in another process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np

from actors.draft_model.draft_engine import DraftEngine
from actors.engine.options import EngineOptions
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from tests.gpu.experiments.decoding import Decoding
from tests.gpu.experiments.setting import BLOCK, Setting


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    for is_eager in setting.of((True, False), (True,)):
        for sequences in setting.of((1, 8), (1,)):
            yield {"compiled": not is_eager, **_chains(setting, sequences, is_eager)}
            setting.release()
    if setting.is_dry:
        yield {"beside": "skipped: a second process needs the GPU"}
        return
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    target = context.Process(target=verify_until, args=(ready, stop))
    target.start()
    try:
        assert ready.wait(120), "the target's process did not start"
        yield {"beside": "8B in another process", **_chains(setting, 1, is_eager=True)}
    finally:
        stop.set()
        target.join(30)


def _chains(setting: Setting, sequences: int, is_eager: bool, depth: int = 4) -> dict[str, Any]:
    model = setting.model("1B")
    tokens = sequences * setting.of(2048, 512)
    engine = DraftEngine(model, EngineOptions(tokens // BLOCK + 1, BLOCK, attention="triton_tree", is_eager=is_eager))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 250, setting.of(512, 20)).tolist() for _ in range(sequences)]
    known = [0] * sequences
    number = 0

    def draft() -> None:
        nonlocal number
        number += 1
        items = []
        for index, text in enumerate(texts):
            begin = None if known[index] else SequenceStart(SamplingParams(0, temperature=0.0), len(text))
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            items.append(DraftItem(delta, depth, begin=begin))
            known[index] = len(text)
            text.append(int(rng.integers(0, 250)))
        engine.answer(DraftBatch(number, items))

    ms = setting.wall(draft, repeats=20, warm=4)
    return {"sequences": sequences, "depth": depth, "ms": ms.median, "ms a token": ms.median / depth}


def verify_until(ready: Any, stop: Any) -> None:
    setting = Setting(is_dry=False)
    decoding = Decoding(setting.engine(setting.model("8B"), 65536), 1, 1024)
    ready.set()
    while not stop.is_set() and len(decoding.texts[0]) < 60_000:
        decoding.round(7)
