"""What is known of a target before its first request."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import warm_up
from actors.messages import (
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyItem,
    decode_message,
    encode_message,
)
from actors.options import Exactness
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("num_blocks", "rows"), [(40, [1, 4, 8, 16, 32]), (4, [1, 4, 8])], ids=["small vocabulary", "small KV cache"]
)
def test_times_of_forwards_up_to_what_the_engine_has_room_for(num_blocks, rows):
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(num_blocks, 4, True))
    profile = warm_up(engine)
    assert [measured for measured, _ in profile] == rows
    assert all(0.0 < seconds < 5.0 for _, seconds in profile)


def test_the_largest_rows_come_first_and_often_enough_for_a_replay():
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, True))
    rows: list[int] = []
    verify = engine.verify
    engine.verify = lambda *given: (rows.append((result := verify(*given)).rows), result)[1]
    warm_up(engine)
    assert [count for count in rows[2:] if count] == [32] * 4 + [16] * 4 + [8] * 4 + [4] * 4 + [1] * 4


def test_nothing_of_it_stays_in_the_engine():
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, True))
    warm_up(engine)
    assert engine.num_sequences == 0
    assert engine.pool.num_free == engine.pool.num_blocks
    check_integrity(engine)


def test_a_rank_that_does_not_sample_runs_the_same_forwards():
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, True), rank=1)
    assert [rows for rows, _ in warm_up(engine)] == [1, 4, 8, 16, 32]


def test_no_kernel_is_compiled_after_it():
    """In a process of its own, since other tests compile other versions of the same kernels."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "compiled while serving: []\n"), done.stderr


def serve_after_warm_up(exact: Exactness) -> list[str]:
    """Names of the kernels that rounds compile: prompts in chunks, chains and trees, as they come from messages."""
    engine = TargetEngine(make_tiny_model("gemma3", vocab_size=61), EngineOptions(60, 4, exact=exact))
    warm_up(engine)
    before = versions()
    kinds = [
        SamplingParams(seed=1, temperature=0.0),
        SamplingParams(seed=2, temperature=0.9, top_p=0.9),
        SamplingParams(seed=3, temperature=0.9, presence_penalty=0.5),
        SamplingParams(seed=4, temperature=0.9, acceptance="rejection"),
    ]
    shapes = [[], [-1], [-1, 0, 1], [-1, -1, 0, 1]]
    lengths = [0] * len(kinds)
    texts = [list(range(10 * index, 10 * index + 9)) for index in range(len(kinds))]
    for number in range(6):
        items = []
        for index, (sampling, text) in enumerate(zip(kinds, texts, strict=True)):
            parents = shapes[(number + index) % len(shapes)]
            tree = tree_to_verify(list(range(len(parents))), parents)
            begin = None if lengths[index] else SequenceStart(sampling, 9)
            delta = SequenceDelta(index + 1, lengths[index], np.array(text[lengths[index] :], np.int32))
            items.append(VerifyItem(delta, 5, tree, begin))
            lengths[index] = len(text)
        batch = decode_message(encode_message(VerifyBatch(number, items[: 1 + number])))
        assert isinstance(batch, VerifyBatch)
        for verdict in engine.verify(batch).verdicts:
            text = texts[verdict.seq_id - 1]
            text += [*verdict.path.tolist(), verdict.next_token] if verdict.next_token >= 0 else []
        lengths[1 + number :] = [0] * len(lengths[1 + number :])
    after = versions()
    return sorted(name for name in after if after[name] > before.get(name, 0))


def versions() -> dict[str, int]:
    """How many versions of each kernel there are."""
    return {
        f"{name}.{kernel}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("actors.")
        for kernel, value in vars(module).items()
        if isinstance(value, CPUDispatcher) and value.py_func.__module__ == name
    }


if __name__ == "__main__":
    print(f"compiled while serving: {serve_after_warm_up('default') + serve_after_warm_up('bitwise')}")
