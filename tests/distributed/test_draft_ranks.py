"""A draft model on two ranks drafts what it drafts on one, and ends as one.

Covers `actors.draft_model.rank_forwards`, `actors.workers.draft_ranks`, `actors.workers.rank_options`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from actors.build import build_draft_engine, build_draft_runner
from actors.draft_model import draft_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.rank_forwards import follow_forwards
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.draft_tree import DraftTree
from actors.engine import model_runner
from actors.engine.rank_group import Leader
from actors.errors import EngineBroken, ModelError
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from actors.models.loader import check_draft_ranks
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.options import DraftOptions
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from paceline_testing.deployed import deployed, scale, wait_for
from paceline_testing.drafting import paths_of
from paceline_testing.integrity import check_integrity
from paceline_testing.other_vocabularies import TEXT, merging_tokenizer
from paceline_testing.rank_processes import ANSWER_WITHIN_S, ranks_at_work
from paceline_testing.ray_processes import ray_processes
from paceline_testing.right_drafts import target_and_right_draft
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model

MASK = 192
PROMPTS = [[5, 9, 33, 2], list(range(40, 60)), [7]]  # the second in two forwards
SAMPLINGS = (
    SamplingParams(1, temperature=0.0),
    SamplingParams(2, temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(3, temperature=0.9, acceptance="rejection"),
)
Drafts = list[tuple[list[tuple[int, ...]], list[float]]]  # paths and confidences of each tree


@dataclass(frozen=True)
class Case:
    model: Path
    ahead: int = 0
    method: str = "tree"
    attention: str = "padded"
    target: Path | None = None
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    num_rounds: int = 5


def source_of(path: Path) -> ModelSource:
    return ModelSource("tiny", "tiny", path)


@contextmanager
def prepared(case: Case) -> Iterator[None]:
    """The case's attention, and long prompts in several forwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "choose_attention", lambda device: case.attention)
        patch.setattr(draft_engine, "_MAX_PREFILL_ROWS", 16)
        yield


def engine_of(case: Case, **options: Any) -> DraftEngine | RetokenizedDraftEngine:
    target = None if case.target is None else source_of(case.target)
    return build_draft_engine(source_of(case.model), options_of(case), target=target, **options)


def options_of(case: Case) -> DraftOptions:
    return DraftOptions(device="cpu", dtype="float32", kv_cache_tokens=4096, block_size=4, ahead=case.ahead)


def drafts_of(engine, case: Case) -> Drafts:
    """Rounds in which a part of the best path is committed, with or without another token behind it; all sequences end
    once and begin anew, with their blocks in the cache."""
    texts, known, found = [list(prompt) for prompt in case.prompts], [0] * len(case.prompts), []
    for number in range(case.num_rounds):
        finished = [*range(1, len(texts) + 1)] if number == case.num_rounds - 2 else []
        known = [0] * len(texts) if finished else known
        items = []
        for index, text in enumerate(texts):
            begin = None if known[index] else SequenceStart(SAMPLINGS[index], len(case.prompts[index]))
            delta = SequenceDelta(index + 1, known[index], np.array(text[known[index] :], np.int32))
            items.append(DraftItem(delta, 10, begin, 4, method=case.method, branch=3))
            known[index] = len(text)
        result = engine.draft(DraftBatch(number, items, finished))
        assert result.stale_seq_ids == []
        check_integrity(engine)
        found += [(paths_of(tree), tree.confidence.tolist()) for tree in result.trees]
        for index, tree in enumerate(result.trees):
            texts[index] += committed(tree, number + index)
        while isinstance(engine, DraftEngine) and engine.work_ahead():
            check_integrity(engine)
    return found


def committed(tree: DraftTree, number: int) -> list[int]:
    longest = max(paths_of(tree), key=len, default=())
    return [*longest[: number % 4], *([7 + number] if number % 3 or not longest else [])] or [9]


def run_rank(rank: int, ring, answers, cases: list[Case]) -> None:
    for case in cases:
        with prepared(case):
            if rank:
                follow_forwards(build_draft_runner(source_of(case.model), options_of(case)), ring)
            else:
                leader = Leader(ring)
                answers.put(drafts_of(engine_of(case, leader=leader), case))
                leader.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A draft model, a parallel one, and one of another vocabulary."""
    directory = tmp_path_factory.mktemp("models")
    plain = save_tiny_model(directory / "plain", "llama", 5, layers=2)
    parallel = save_tiny_model(directory / "parallel", "qwen3", 6, layers=2)
    config = (parallel / "config.json").read_text()
    (parallel / "config.json").write_text(config.replace("{", f'{{"pard_token": {MASK},', 1))
    other = save_tiny_model(directory / "other", "llama", 7, tokenizer=merging_tokenizer(), layers=1)
    return plain, parallel, other


def check_drafts(cases: list[Case]) -> None:
    with ranks_at_work(2, run_rank, cases) as answers:
        found = [answers.get(timeout=ANSWER_WITHIN_S) for _ in cases]
    for case, ours in zip(cases, found, strict=True):
        with prepared(case):
            wanted = drafts_of(engine_of(case), case)
        assert sum(len(paths) for paths, _ in wanted) > 2 * len(case.prompts)
        assert [paths for paths, _ in ours] == [paths for paths, _ in wanted]
        for (_, mine), (_, theirs) in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-6)


def test_two_ranks_draft_what_one_drafts(models):
    plain, parallel, other = models
    texts = [list(TEXT[first : first + 30].encode()) for first in (0, 20, 40)]
    retokenized = Case(other, target=plain, prompts=texts)
    check_drafts([Case(plain, ahead=4), Case(plain, method="lookahead"), Case(parallel, ahead=2), retokenized])


@pytest.mark.slow  # the interpreter
def test_two_ranks_with_inputs_on_a_device_draft_what_one_drafts(models):
    check_drafts([Case(models[0], attention="triton_tree", prompts=PROMPTS[:2], num_rounds=2)])


def end_at_third_forward(rank: int, ring, answers, case: Case) -> None:
    """Rank 1 ends in the middle of a draft; rank 0 says what it finds then."""
    if rank:
        runner = build_draft_runner(source_of(case.model), options_of(case))
        forwards = iter(range(2))
        plain = runner.forward
        runner.forward = lambda *inputs: os._exit(0) if next(forwards, None) is None else plain(*inputs)
        follow_forwards(runner, ring)
    engine = engine_of(case, leader=Leader(ring))
    try:
        drafts_of(engine, case)
    except Exception as error:
        answers.put(type(error))
        answers.close()
        answers.join_thread()
    os._exit(0)


def test_the_end_of_a_rank_ends_the_engine(models):
    with ranks_at_work(2, end_at_third_forward, Case(models[0])) as answers:
        assert answers.get(timeout=ANSWER_WITHIN_S) is EngineBroken


def test_what_is_not_shared_out_is_refused_by_name(models, tmp_path):
    source = source_of(models[0])
    check_draft_ranks(source, 2)
    with pytest.raises(ModelError, match="tensor_parallel is 3; it must divide the 4 attention heads of model 'tiny'"):
        check_draft_ranks(source, 3)
    (models[0] / VOCAB_MAP_FILE).touch()
    with pytest.raises(ModelError, match="tensor_parallel is 2; model 'tiny' has a reduced vocabulary, which needs 1"):
        check_draft_ranks(source, 2)
    (models[0] / VOCAB_MAP_FILE).unlink()
    for kind, what in (("gpt2", "gpt2 has no tensor-parallel plan"), ("t5", "t5 has an encoder; tensor_parallel 2")):
        with pytest.raises(ModelError, match=what):
            check_draft_ranks(source_of(save_tiny_model(tmp_path / kind, kind, 1)), 2)


PROMPT, NEW_TOKENS = "oak and oak", 80


def text_of(url: str, in_the_middle=lambda: None) -> str:
    """A streamed answer. in_the_middle: called after some of it."""
    body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
                if len(pieces) == 3:
                    in_the_middle()
    return "".join(pieces)


def num_drafted(url: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return value_of(page, "paceline_spec_decode_num_draft_tokens_total", source="draft_model")


def check_return(url: str, wanted: str, before: int) -> None:
    """Another worker drafts."""
    wait_for(lambda: ray_processes("DraftRank") not in ([], [before]), "another rank")
    drafted = num_drafted(url)
    wait_for(lambda: text_of(url) == wanted and num_drafted(url) > drafted, "drafts")


@pytest.mark.slow  # a group takes seconds to start, and a hanging one to be found
def test_a_draft_rank_that_dies_or_hangs_costs_no_token_and_comes_back_and_both_change_the_model(
    ray_here, ports, tmp_path
):
    target, draft = target_and_right_draft(tmp_path)
    other = shutil.copytree(draft, draft.with_name("other"))
    (wanted,) = LocalEngine(str(target), drafters=("none",), device="cpu", kv_cache_tokens=8192).generate(
        [PROMPT], max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    on_cpu = {"device": "cpu", "kv_cache_tokens": 8192}
    config = ClusterConfig.model_validate(
        {
            "target": {"model": str(target), **on_cpu},
            "draft": {"model": str(draft), "tensor_parallel": 2, **on_cpu},
            "speculation": {"drafters": ["draft_model"]},
            "gateway": ports,
            "cache": {"url": "none"},
        }
    )
    with deployed(config) as url:
        wait_for(lambda: text_of(url) == wanted.text and num_drafted(url) > 0, "drafts")
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            (process,) = ray_processes("DraftRank")
            assert text_of(url, lambda fault=fault, process=process: os.kill(process, fault)) == wanted.text
            check_return(url, wanted.text, process)
        (process,) = ray_processes("DraftRank")
        replicas = ray_processes("ServeReplica:paceline:DraftPool")
        done = scale("draft", "--model", str(other), "--wait-s", "100")
        assert done.stdout.endswith("draft workers: 1 run it\n"), done.stderr
        check_return(url, wanted.text, process)
        done = scale("draft", "--model", str(save_tiny_model(tmp_path / "odd", "gpt2", 1)), "--wait-s", "100")
        assert "gpt2 has no tensor-parallel plan" in done.stderr
        assert ray_processes("ServeReplica:paceline:DraftPool") == replicas
