"""When a namespace is dropped, nothing that rounds have taught of it is left in a router or at a draft worker."""

import numpy as np
import pytest

from actors.draft_model.draft_engine import DraftEngine
from actors.drafters.contract import Drafter
from actors.drafters.registry import create_drafters
from actors.engine.options import EngineOptions
from actors.lookahead.phrase_pool import PhrasePool
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from cluster.router.calibration import SourceCalibration
from cluster.router.draft_workers import DraftWorkers
from cluster.router.traffic import TrafficRecords
from paceline_testing.integrity import check_integrity
from paceline_testing.rounds import toy_core, toy_info, toy_request, toy_round
from paceline_testing.tiny_models import make_tiny_model
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 97
REMEMBERING = ("lookahead", "ngram_table", "soft_ngram", "token_recycling")
FORGETFUL = ("cache", "prediction", "prompt_lookup", "retrieval", "suffix")
PROMPT = np.arange(1, 9, dtype=np.int32)


class Router:
    def __init__(self, *names):
        self.drafters = create_drafters(names)
        self.core = toy_core(toy_info(VOCAB_SIZE), drafters=self.drafters)
        self.target = ToyTarget(VOCAB_SIZE)
        self.now = 0.0

    def answer(self, namespace):
        """The tokens of a request, and the first trees that were proposed for it."""
        self.core.add(request(namespace, 60), self.now)
        answer, proposals = [], []
        while self.core.has_work:
            outcome = toy_round(self.core, self.target.verify, self.now)
            self.now += 0.01
            if not proposals and outcome.round is not None and outcome.round.entries:
                trees = [(source, *contents(tree)) for source, tree in outcome.round.entries[0].proposals]
                proposals = [len(answer), *trees] if trees else []
            answer += [token for event in outcome.events for token in event.token_ids]
        assert self.core.counters.drafter_errors == {}
        return answer, proposals


def contents(tree):
    return tree.token_ids.tolist(), tree.parents.tolist(), tree.confidence.tolist()


def request(namespace, max_new_tokens):
    return toy_request("r", PROMPT, max_new_tokens, namespace=namespace)


@pytest.mark.parametrize("names", [*((name,) for name in REMEMBERING), REMEMBERING], ids="+".join)
def test_a_dropped_namespace_is_a_new_one_and_no_other_notices(names):
    router = Router(*names)
    cold = router.answer("a")
    assert router.answer("b") == cold, "namespaces know nothing of each other"
    warm = Router(*names)
    assert warm.answer("a") == cold
    assert warm.answer("b") == cold
    known = warm.answer("a")
    assert known[0] == cold[0]
    assert known != cold, "nothing was learnt"
    router.core.drop("a")
    assert router.answer("a") == cold
    assert router.answer("b") == warm.answer("b")
    router.core.drop("nobody")


def test_who_keeps_a_namespace_can_drop_it():
    drafters = create_drafters((*REMEMBERING, *FORGETFUL))
    remembering = {name for name, one in drafters.items() if type(one).drop_namespace is not Drafter.drop_namespace}
    assert remembering == set(REMEMBERING)


def test_counts_of_a_request_that_runs_begin_anew_with_what_it_says_then():
    (drafter,) = create_drafters(("ngram_table",)).values()
    core = toy_core(toy_info(VOCAB_SIZE), request("a", 40), drafters={"ngram_table": drafter})
    target, now = ToyTarget(VOCAB_SIZE), 0.0
    for turn in range(40):
        round, _ = core.plan_round(now)
        if round is None:
            break
        if turn == 5:
            core.drop("a")
            assert drafter._tables["a"].num_ngrams == 0
        core.draft_locally(round)
        if turn == 5:
            table, held = drafter._tables["a"], round.entries[0].num_tokens
            assert table.num_ngrams < 4 * 6 < 4 * held, "only the newest tokens"
        now += 0.01
        core.commit(round, target.verify(core.assemble(round, {})), now)
    assert drafter.memory_bytes() == sum(table.memory_bytes for table in drafter._tables.values())


def test_a_scope_of_phrases_goes_whole():
    pool = PhrasePool(2, 4, 100)
    for scope in ("a", "b"):
        pool.insert_runs(scope, [1, 2, 3, 4, 1, 2, 5])
    count = len(pool)
    pool.drop_scope("a")
    pool.drop_scope("a")
    assert len(pool) == count // 2
    check_integrity(pool)
    assert pool.newest("a", 1, 9) == []
    assert pool.newest("b", 1, 9) == [(2, 5), (2, 3)]


def test_records_and_curves_of_a_namespace_begin_anew():
    records = TrafficRecords()
    before, other = records.of("a"), records.of("b")
    records.drop("a")
    assert records.of("a") is not before
    assert records.of("b") is other
    calibration = SourceCalibration(1)

    def levels(namespace):
        return calibration.by_sources.curves["level"][3 * calibration.group(namespace)].tolist()

    new = levels("a")
    for namespace in ("a", "b"):
        calibration.by_sources.observe(3 * calibration.group(namespace), np.full(50, 0.9), np.zeros(50, np.bool_))
    calibration.end_round()
    learnt = levels("b")
    calibration.drop("a")
    calibration.drop("nobody")
    assert levels("a") == new
    assert levels("b") == learnt != new


def test_workers_hear_of_it_until_one_of_their_answers_has_come():
    workers = DraftWorkers()
    workers.set_workers(["w", "v"], [])
    assert not workers.has_notices, "what joins is told with its first batch"
    workers.drop_namespace("a")
    assert workers.has_notices
    sent = workers.batches({}, {}, 1, is_idle=False)
    assert [(name, batch.dropped, batch.drops_all) for name, batch in sent.items()] == [
        ("w", ["a"], True), ("v", ["a"], True)
    ]  # fmt: skip
    assert not workers.has_notices, "those that do not answer are not asked again and again"
    workers.count_answer("w", 1)
    items = {"w": [item("a")], "v": [item("a")]}
    sent = workers.batches(items, {}, 2, is_idle=False)
    assert (sent["w"].dropped, sent["w"].drops_all) == ([], False)
    assert (sent["v"].dropped, sent["v"].drops_all) == (["a"], True)
    workers.drop_namespace("b")
    workers.count_answer("v", 2)  # that was before
    assert workers.batches(items, {}, 3, is_idle=False)["v"].dropped == ["a", "b"]
    workers.count_answer("v", 3)
    assert workers.batches(items, {}, 4, is_idle=False)["v"].dropped == []
    for number in range(100):
        workers.drop_namespace(str(number))
    (batch, _) = workers.batches({}, {}, 5, is_idle=False).values()
    assert batch.drops_all
    assert len(batch.dropped) <= 64


def test_a_worker_that_comes_back_forgets_everything_because_it_may_have_missed_something():
    workers = DraftWorkers()
    workers.set_workers(["w"], [])
    workers.batches({"w": [item("a")]}, {}, 1, is_idle=False)
    workers.count_answer("w", 1)
    workers.set_workers([], [])
    workers.set_workers(["w"], [])
    assert workers.batches({"w": [item("a")]}, {}, 2, is_idle=False)["w"].drops_all


def item(namespace, seq_id=1):
    tokens = np.array([3, 4, 5, 6, 7, 8, 3, 4, 5], np.int32)
    begin = SequenceStart(SamplingParams(seed=1, temperature=0.0), len(tokens), namespace)
    return DraftItem(SequenceDelta(seq_id, 0, tokens), 8, begin, 4, method="lookahead")


@pytest.mark.parametrize("dropped", [(["a"], False), ([], True)], ids=["by name", "all"])
def test_a_draft_worker_forgets_phrases_before_it_drafts(dropped):
    engine = DraftEngine(make_tiny_model("llama", seed=3, vocab_size=61, layers=1), EngineOptions(256, 4))
    engine.draft(DraftBatch(1, [item("a", 1), item("b", 2)]))
    pool = engine._ouroboros.pool
    assert pool.newest("a", 3, 1)
    names, is_all = dropped
    engine.draft(DraftBatch(2, [], [1, 2], names, is_all))
    pool = engine._ouroboros.pool
    assert pool.newest("a", 3, 1) == []
    assert bool(pool.newest("b", 3, 1)) == (not is_all)
    check_integrity(engine)
