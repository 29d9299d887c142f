"""The scripted target under the real router core."""

import numpy as np
import pytest

from actors.drafters.registry import create_drafters
from actors.messages import SamplingParams, VerifyBatch, VerifyResult
from cluster.config import RouterConfig
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import ForwardOptions
from cluster.simulate.scripts import Script, Scripts
from cluster.simulate.target import ScriptedTarget
from paceline_testing.rounds import serve, texts_of, toy_core, toy_request

ANSWER = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6, 7], np.int32)


class Case:
    def __init__(self, num_blocks=64, answers=(ANSWER,), drafters=()):
        self.scripts = Scripts()
        self.seeds = [self.scripts.add(Script(answer, 0)) for answer in answers]
        self.target = ScriptedTarget(
            self.scripts,
            MeasuredTimes(ForwardOptions(row_times=((1, 0.01), (10, 0.02)))),
            vocab_size=100,
            max_model_len=200,
            block_size=4,
            num_blocks=num_blocks,
        )
        self.core = toy_core(self.target.info(), drafters=create_drafters(drafters), config=RouterConfig(max_running=4))

    def ask(self, seed, prompt=range(10, 30), **fields):
        count = len(self.scripts[seed].answer)
        sampling = SamplingParams(seed, temperature=0.0)
        self.core.add(toy_request(f"r{seed}", prompt, count, sampling=sampling, **fields), 0.0)

    def answered(self, **options):
        return texts_of(serve(self.core, self.target.verify, **options))


@pytest.mark.parametrize("drafters", [(), ("suffix", "soft_ngram")])
def test_the_router_emits_the_script_with_and_without_drafts(drafters):
    case = Case(drafters=drafters)
    case.ask(case.seeds[0])
    assert case.answered() == {"r1": ANSWER.tolist()}
    assert case.core.counters.rounds < len(ANSWER) if drafters else case.core.counters.rounds >= len(ANSWER)
    assert case.target.num_sequences == 0


def test_sequences_that_the_target_loses_are_sent_again():
    case = Case(drafters=("suffix",))
    case.ask(case.seeds[0])
    rounds = iter(range(1000))
    assert case.answered(between=lambda: next(rounds) == 3 and case.target.forget_all()) == {"r1": ANSWER.tolist()}
    assert case.core.counters.stale_sequences == 1


def test_too_few_blocks_cost_time_and_no_token():
    answers = [ANSWER + shift for shift in range(3)]
    case = Case(num_blocks=14, answers=answers)
    for seed in case.seeds:
        case.ask(seed, range(10 * seed, 10 * seed + 20))
    assert case.answered() == {f"r{seed}": answer.tolist() for seed, answer in zip(case.seeds, answers, strict=True)}
    assert case.core.counters.preempted > 0


def test_prefixes_are_found_again_within_a_namespace_only():
    case = Case(answers=[ANSWER] * 3)
    cached = {}
    for seed, namespace in zip(case.seeds, ("a", "a", "b"), strict=True):
        case.ask(seed, namespace=namespace)
        cached[seed] = next(
            event.num_cached_tokens for event in serve(case.core, case.target.verify) if event.index == 0
        )
    assert list(cached.values()) == [0, 16, 0]  # whole blocks before the last token


def test_rows_with_logits_are_draft_nodes_and_the_last_token_of_a_sequence():
    case = Case(drafters=("suffix",))
    case.target._times = MeasuredTimes(ForwardOptions(row_times=((1, 0.5),), scored_row_s=1.0))
    results: list[VerifyResult] = []

    def verify(batch: VerifyBatch) -> VerifyResult:
        results.append(case.target.verify(batch))
        return results[-1]

    case.ask(case.seeds[0])
    serve(case.core, verify)
    seconds = [(verdict.num_nodes, result.elapsed_s) for result in results for verdict in result.verdicts]
    assert seconds[0] == (0, 1.5)  # a prompt of 20 rows
    assert all(elapsed == 1.5 + nodes for nodes, elapsed in seconds)
    assert any(nodes for nodes, _ in seconds)


def test_beyond_the_table_forwards_go_on_with_its_last_slope():
    points = ((2, 0.01), (10, 0.02))
    assert MeasuredTimes(ForwardOptions(row_times=points, row_steps=(6,))).seconds(3, 1, 0) == pytest.approx(0.015)
    times = MeasuredTimes(ForwardOptions(row_times=points, context_token_s=1e-6))
    assert [times.seconds(rows, 1, 0) for rows in (1, 2, 6, 18)] == pytest.approx([0.01, 0.01, 0.015, 0.03])
    assert times.seconds(2, 4, 1000) == pytest.approx(0.011)
