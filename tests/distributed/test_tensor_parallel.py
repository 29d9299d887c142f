"""Three ranks in three processes give the tokens of one, with and without drafts, or one clear error."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from actors.build import build_target_engine
from actors.engine import model_runner
from actors.engine.rank_group import LeadingRank, begin_rounds, follow, least_of_ranks, open_meeting
from actors.errors import EngineBroken, ModelError, Unavailable
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.loader import check_tensor_parallel, load_model
from actors.models.quantization import Int4Linear, Int8Linear
from actors.models.shards import VocabularyShard
from actors.models.source import ModelSource
from actors.options import Quantization, TargetGroupOptions
from actors.workers.settings import TargetSettings
from actors.workers.target_group import TargetGroup
from actors.workers.target_rank import RankHealth
from paceline_testing.drafting import tree_to_verify
from paceline_testing.free_ports import free_ports
from paceline_testing.integrity import check_integrity
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = ([5, 9, 33, 2], list(range(40, 51)), [7])  # the second comes in two chunks
SAMPLING = (SamplingParams(1, temperature=0.0), SamplingParams(2, temperature=0.8, top_p=0.9), SamplingParams(3))
STEPS = 8
ADJUSTED = (
    SamplingParams(1, temperature=0.0, logit_bias=((190, 2.0), (3, 2.0), (66, -9.0))),
    SamplingParams(2, temperature=0.8, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(3, frequency_penalty=0.5),
)
# Of nearly all tokens, which are more than the ranks' leaders; the last needs none.
WIDE = (
    SamplingParams(1, temperature=20.0, top_p=0.97, logit_bias=tuple((token, -100.0) for token in range(60))),
    SamplingParams(2, temperature=20.0, top_k=230, top_p=0.99, frequency_penalty=1.0),
    SamplingParams(3, temperature=2.0, min_p=0.2),
)
OPTIONS = TargetGroupOptions(device="cpu", kv_cache_tokens=512, block_size=4)


def decode(
    engine, samplings=SAMPLING, steps: int = STEPS, record=lambda outputs: None, successors: list | None = None
) -> list[list[int]]:
    """Decode all prompts in one batch; from round 3 on with a draft tree that is partly right by construction. record
    is given the tokens after each round. successors: is given those of all rows, which are not asked for if None."""
    sequences = [list(prompt) for prompt in PROMPTS]
    known = [0, 0, 0]
    outputs: list[list[int]] = [[], [], []]
    while min(len(output) for output in outputs) < steps:
        items = []
        for index, tokens in enumerate(sequences):
            begin = SequenceStart(samplings[index], len(PROMPTS[index])) if known[index] == 0 else None
            delta = SequenceDelta(index + 1, known[index], np.array(tokens[known[index] :], np.int32))
            tree, parents = [1, tokens[-1], 2, 3], [-1, -1, 1, 0]
            if tree[0] == tree[1]:
                tree, parents = [], []
            items.append(VerifyItem(delta, 7, tree_to_verify(tree, parents), begin))
            known[index] = len(tokens)
        batch = VerifyBatch(1, items, num_successors=0 if successors is None else 3)
        result = engine.answer(batch)
        if successors is not None:
            found = result.successors
            successors.append((found.token_ids.tolist(), found.probs.round(4).tolist()))
        for verdict in result.verdicts:
            if verdict.next_token < 0:
                continue
            index = verdict.seq_id - 1
            new = [int(items[index].tree.token_ids[node]) for node in verdict.path] + [verdict.next_token]
            sequences[index] += new
            outputs[index] += new
        record([list(output) for output in outputs])
    return [output[:steps] for output in outputs]


def fail_at_collective(number: int) -> None:
    """Raise instead of entering the collective of this number, counted from now on."""
    calls = iter(range(number))

    def failing(collective):
        def call(*args, **kwargs):
            if next(calls, None) is None:
                raise RuntimeError("injected")
            return collective(*args, **kwargs)

        return call

    dist.all_reduce, dist.all_gather_into_tensor = failing(dist.all_reduce), failing(dist.all_gather_into_tensor)


def be_late(engine) -> None:
    """In each forward, before a collective that the others are in."""
    engine.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.2))


def run_rank(
    rank: int,
    ring,
    answers,
    path: Path,
    num_ranks: int,
    *,
    faults: dict[int, int] | None = None,
    quantization: Quantization = "none",
    samplings: tuple[SamplingParams, ...] | None = None,
    sleepy: int | None = None,
    steps: int = STEPS,
) -> None:
    """faults: number of the collective that fails, by rank. samplings: of rounds as on a device; None: as on the host.
    sleepy: the rank that is late in every round."""
    if samplings is not None:
        model_runner.choose_attention = lambda device: "triton_tree"
    gathered: list[int] = []  # rows of logits

    def gather(self, logits, plain=VocabularyShard.gather):
        gathered.append(len(logits))
        return plain(self, logits)

    VocabularyShard.gather = gather
    source = ModelSource("tiny", "tiny", path)
    # The ranks have memory for pools of 32, 64 and 128 blocks.
    options = OPTIONS.model_copy(
        update={"tensor_parallel": num_ranks, "kv_cache_tokens": 128 << rank, "quantization": quantization}
    )
    engine = build_target_engine(source, options, rank=rank)
    assert engine.pool.num_blocks == 32
    if rank in (faults or {}):
        fail_at_collective(faults[rank])
    if rank == sleepy:
        be_late(engine)
    if rank == 0:
        leading = LeadingRank(engine, ring)
        if faults:
            with pytest.raises(EngineBroken, match="round 1: RuntimeError: "):
                decode(leading, record=answers.put)
            answers.put("broken")
            answers.close()
            answers.join_thread()
            os._exit(0)  # the link of the others would wait for this one
        successors = None if samplings is None else []
        answers.put((decode(leading, samplings or SAMPLING, steps, successors=successors), successors, gathered))
        check_integrity(engine)
        leading.stop()
    else:
        try:
            follow(engine, ring)
        except RuntimeError:
            assert faults
            os._exit(0)
        check_integrity(engine)


class LogitBits:
    """The bytes of every row of logits, by the tokens before it."""

    def __init__(self, engine) -> None:
        self.found: dict[tuple[int, ...], set[bytes]] = {}
        plain = engine._rounds._logits

        def logits_of(round):
            logits = plain(round)
            rows = iter(logits.numpy())
            for part, emits in zip(round.parts(), round.items["is_last"].tolist(), strict=True):
                known = part.sequence.tokens[: part.sequence.num_computed + part.count].tolist()
                for node in range(-1, len(part.tree_tokens) if emits else -1):
                    path = []
                    while node >= 0:
                        path.insert(0, int(part.tree_tokens[node]))
                        node = int(part.tree_parents[node])
                    self.found.setdefault(tuple(known + path), set()).add(next(rows).tobytes())
            assert next(rows, None) is None
            return logits

        engine._rounds._logits = logits_of


def compute_bitwise(rank: int, ring, said, path: Path) -> None:
    """One of three ranks that decode three prompts together, with trees, and then each alone, without."""
    options = OPTIONS.model_copy(update={"tensor_parallel": 3, "exact": "bitwise"})
    engine = build_target_engine(ModelSource("tiny", "tiny", path), options, rank=rank)
    if rank:
        follow(engine, ring)
        return
    bits, leading = LogitBits(engine), LeadingRank(engine, ring)
    together = decode(leading)
    for index, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for known in (0, *range(len(prompt), len(prompt) + STEPS - 1)):
            begin = SequenceStart(SAMPLING[index], len(prompt)) if known == 0 else None
            delta = SequenceDelta(index + 11, known, np.array(tokens[known:], np.int32))
            verdicts = leading.answer(VerifyBatch(1, [VerifyItem(delta, len(tokens) - known, begin=begin)])).verdicts
            tokens.append(verdicts[0].next_token)
        assert tokens[len(prompt) :] == together[index]
    said.put([len(different) for different in bits.found.values()])
    leading.stop()


def decoding_ranks(model_dir: Path, count: int = 3, **options: object) -> contextlib.AbstractContextManager:
    """Ranks that end well; the queue of rank 0's answers."""
    return ranks_at_work(count, functools.partial(run_rank, path=model_dir, num_ranks=count, **options))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", 5, layers=3, hidden_size=96, heads=6, kv_heads=3)


def test_three_ranks_of_which_one_is_always_late_give_the_tokens_of_one(model_dir):
    alone = build_target_engine(ModelSource("tiny", "tiny", model_dir), OPTIONS)
    wanted = decode(alone)
    assert any(len(set(output)) > 2 for output in wanted)

    with decoding_ranks(model_dir, sleepy=1) as answers:
        got, *_ = answers.get(timeout=ANSWER_WITHIN_S)
    assert got == wanted


def test_bitwise_logits_of_three_ranks_do_not_depend_on_company_or_tree(model_dir):
    with ranks_at_work(3, compute_bitwise, model_dir) as said:
        counts = said.get(timeout=ANSWER_WITHIN_S)
    assert len(counts) > 60
    assert set(counts) == {1}


@pytest.fixture(scope="module")
def two_ranks_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", 5, layers=2, hidden_size=64, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    "samplings",
    [
        pytest.param(ADJUSTED, id="adjusted"),
        pytest.param(SAMPLING, id="truncated", marks=pytest.mark.slow),
        pytest.param(WIDE, id="wide", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_draw_from_their_shares_of_the_vocabulary_give_tokens_and_successors_of_one(
    two_ranks_dir, samplings
):
    """No rank ever has the logits of another, but for some rows that are drawn from more tokens than ranks exchange."""
    expected: list = []
    alone = build_target_engine(ModelSource("tiny", "tiny", two_ranks_dir), OPTIONS)
    steps = 3  # the interpreter is slow
    wanted = decode(alone, samplings, steps, successors=expected)
    assert any(len(set(output)) > 2 for output in wanted)

    with decoding_ranks(two_ranks_dir, 2, samplings=samplings, steps=steps) as answers:
        got, successors, gathered = answers.get(timeout=ANSWER_WITHIN_S)
    assert got == wanted
    assert [ids for ids, _ in successors] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(successors, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert (0 < sum(gathered) < sum(map(len, wanted))) == (samplings == WIDE), gathered


@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.slow), "int4"])  # int4 has both
def test_three_quantized_ranks_give_the_tokens_of_one(tmp_path, quantization):
    # Shapes that int4 takes in three parts.
    model_dir = save_tiny_model(tmp_path / "tiny", "llama", 5, layers=2, hidden_size=192, heads=6, kv_heads=3)
    source = ModelSource("tiny", "tiny", model_dir)
    alone = build_target_engine(source, OPTIONS.model_copy(update={"quantization": quantization}))
    kinds = {type(module) for module in load_model(source, quantization=quantization).modules()}
    assert (Int4Linear in kinds, Int8Linear in kinds) == (quantization == "int4", True)
    wanted = decode(alone)
    assert any(len(set(output)) > 2 for output in wanted)

    with decoding_ranks(model_dir, quantization=quantization) as answers:
        got, *_ = answers.get(timeout=ANSWER_WITHIN_S)
    assert got == wanted


COLLECTIVES = 8  # of a round: of embeddings, two of each of three layers, of logits


PLACES = {"embeddings": 0, "layer": 3, "logits": COLLECTIVES - 1} | {f"of {n}": n for n in (1, 2, 4, 5, 6)}


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        # Each rank and each place once; the others are slow together.
        pytest.param(rank, place, id=f"{name}-{rank}", marks=[] if rank == index else pytest.mark.slow)
        for rank in range(3)
        for index, (name, place) in enumerate(PLACES.items())
    ],
)
def test_a_failure_at_any_collective_of_any_rank_ends_the_group_after_right_tokens_alone(model_dir, rank, place):
    wanted = decode(build_target_engine(ModelSource("tiny", "tiny", model_dir), OPTIONS))
    fault = {rank: 2 * COLLECTIVES + place}
    rounds = []
    with decoding_ranks(model_dir, faults=fault) as answers:
        while (said := answers.get(timeout=ANSWER_WITHIN_S)) != "broken":
            rounds.append(said)
    assert len(rounds) == 2
    for outputs in rounds:
        assert [output[: len(mine)] for output, mine in zip(wanted, outputs, strict=True)] == [
            mine[: len(output)] for output, mine in zip(wanted, outputs, strict=True)
        ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_do_not_divide_the_heads_are_refused(model_dir, ranks):
    with pytest.raises(
        ModelError, match=f"tensor_parallel is {ranks}; it must divide the [63] .* heads of model 'tiny'"
    ):
        check_tensor_parallel(ModelSource("tiny", "tiny", model_dir), ranks)


def wait_for_a_late_rank(rank: int, ring, waits) -> None:
    """Rank 1 is late, once while it loads and once in a round. Rank 0 tells how long it waited for it."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))  # as transformers does
    least_of_ranks(rank)  # both are here
    for late_s in (2.0, 60.0):
        started = time.monotonic()
        if rank == 1:
            time.sleep(late_s)
        try:
            if late_s == 2.0:
                least_of_ranks(rank)
            else:
                dist.all_reduce(torch.zeros(1), group=mesh["shard"].get_group())
        except RuntimeError:
            assert late_s == 60.0
        if rank == 0:
            waits.put(time.monotonic() - started)
        begin_rounds(timedelta(seconds=0.5))


def test_ranks_wait_for_one_that_loads_longer_than_for_one_that_is_late_in_a_round():
    with ranks_at_work(2, wait_for_a_late_rank, end=False) as waits:
        assert waits.get(timeout=ANSWER_WITHIN_S) > 1.5
        assert 0.4 < waits.get(timeout=ANSWER_WITHIN_S) < 40.0  # the late one is still late


def test_nobody_else_can_take_the_port_where_the_ranks_will_meet():
    meeting = open_meeting("127.0.0.1", 60.0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", meeting.port))
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.2", meeting.port))  # on the given address only


@pytest.mark.slow
def test_a_rank_that_cannot_load_ends_serve_in_one_clear_line(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "torn")
    os.truncate(tmp_path / "torn" / "model.safetensors", 20_000)
    ports = free_ports(2)
    settings = [f"target.model={tmp_path / 'torn'}", "target.tensor_parallel=3", "draft.model=none"]
    settings += [f"gateway.http_port={ports[0]}", f"gateway.grpc_port={ports[1]}"]
    command = [sys.executable, "-m", "cluster.cli.main", "serve"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "did not start" in line]
    assert line.startswith("paceline: TargetGroup did not start: actors.errors.ModelError: model ")
    assert "the weights cannot be loaded" in line


async def test_a_group_fails_with_the_error_of_the_one_rank_that_cannot_load_though_the_other_waits_for_it(
    ray_here, two_ranks_dir, tmp_path
):
    source = ModelSource("tiny", "tiny", two_ranks_dir)
    fields = (
        source,
        OPTIONS.model_copy(update={"tensor_parallel": 2, "start_timeout_s": 240.0, "health_timeout_s": 60.0}),
    )

    class Settings(TargetSettings):
        """The first rank to ask for the source fails; by then all have met."""

        @property
        def source(self):
            with contextlib.suppress(FileExistsError):
                (tmp_path / "failed").touch(exist_ok=False)
                raise OSError("no more memory on this device")
            return source

        @source.setter
        def source(self, value):
            pass

        def __reduce__(self):
            return Settings, fields

    class Group(TargetGroup):
        def __del__(self):
            """There is nothing to stop."""

    group = Group.__new__(Group)
    with pytest.raises(OSError, match="no more memory on this device"):
        await group.__init__(Settings(*fields), "directory", batch_limit_s=60.0)
    assert (tmp_path / "failed").exists()
    for rank in group._ranks:
        ray.kill(rank)


async def test_a_rank_that_hangs_is_named_by_the_groups_health_check(ray_here):
    class Rank:
        def health(self) -> RankHealth:
            return RankHealth(None, 0, 0.0, os.getpid())

    class Group(TargetGroup):
        def __del__(self):
            """There is nothing to stop."""

    group = Group.__new__(Group)
    group._ranks = [ray.remote(Rank).remote() for _ in range(2)]
    group._batch_limit_s, group._health_timeout_s = 60.0, 60.0
    processes = [rank.process_id for rank in await group.health()]
    await group.check_health()
    os.kill(processes[1], signal.SIGSTOP)
    group._health_timeout_s = 3.0
    with pytest.raises(Unavailable, match="target rank 1: no answer within 3 s"):
        await group.check_health()
    os.kill(processes[1], signal.SIGKILL)
    group._health_timeout_s = 60.0
    with pytest.raises(ray.exceptions.RayActorError):
        await group.check_health()
