"""What a tenant is answered does not depend on what another one has asked before: neither the text nor its steps.

The steps of greedy and seeded answers are deterministic, so this needs no statistics: tenant B's requests give the same
trace whether tenant A came before or not. Clock and step times are the test's own; all else is as it is served.
"""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest

from actors.draft_model.draft_engine import DraftEngine
from actors.drafters.registry import CPU_DRAFTER_NAMES, create_drafters
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, TokenChunk
from cluster.router.calibration import NamespaceSlots
from cluster.router.run_round import RoundHooks, run_local_round
from cluster.router.step_time import StepTimeCurve
from cluster.router.traffic import Traffic, TrafficRecords
from cluster.tenants.scope import Scope, Sharing, scope_of
from paceline_testing.rounds import learning_core, toy_info, toy_request
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 40
SERVER_KEY = bytes(range(32))
PROFILE = [(1, 0.020), (8, 0.024), (64, 0.060)]  # (rows, seconds): rows cost something, so confidences count


@pytest.fixture(scope="module")
def models():
    """Target and draft model; the latter knows little."""
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 512}
    return make_tiny_model("llama", 3, **shape), make_tiny_model("llama", 4, **shape)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Step times are measured on the clock, which is nobody's secret but never the same twice."""
    monkeypatch.setattr(StepTimeCurve, "observe", lambda self, rows, seconds: None)


class Cluster:
    """Router, target and draft worker in one thread, with a clock that tells what the work would take."""

    def __init__(self, models):
        target, draft = (copy.deepcopy(model) for model in models)
        self.target = TargetEngine(target, EngineOptions(512, 4))
        self.draft = DraftEngine(draft, EngineOptions(512, 4))
        info = toy_info(VOCAB, 512, 4, step_times=list(PROFILE))
        self.core = learning_core(info, create_drafters(CPU_DRAFTER_NAMES))
        self.core.set_draft_workers(["worker"])
        self.now = 0.0

    def round(self):
        """Verifying takes what the profile says, everything else 1 ms, or 20 with drafts of the draft model."""
        outside_s = 0.001

        def draft(worker_id, batch):
            nonlocal outside_s
            if any(item.max_nodes for item in batch.items):
                outside_s = 0.02
            return msgspec.structs.replace(self.draft.draft(batch), elapsed_s=0.002)

        def verify(batch):
            result = self.target.verify(batch)
            verify_s = self.core.step_times.seconds(max(1, result.rows))
            self.now += verify_s + outside_s
            return msgspec.structs.replace(result, elapsed_s=verify_s, head_s=0.0)

        return run_local_round(self.core, verify, draft, RoundHooks(now=lambda: self.now))

    def answer(self, request):
        """What each of its rounds verified and emitted."""
        self.core.add(request, self.now)
        trace = []
        while True:
            outcome = self.round()
            chunks = [event for event in outcome.events if isinstance(event, TokenChunk)]
            nodes = [(item.tree.token_ids.tolist(), item.tree.parents.tolist()) for item in outcome.batch.items]
            sources = [(chunk.token_ids, chunk.sources) for chunk in chunks]
            trace.append((nodes, outcome.result.rows, outcome.round.asked.draft_model, sources))
            if chunks and chunks[-1].finish_reason is not None:
                return trace


def isolated(tenant):
    return scope_of(Sharing(tenant, "isolated", None, SERVER_KEY))


def requests_of(tenant, prompts, scope, num_tokens=90):
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(seed=7, temperature=1.0 if number % 2 else 0.0)
        reach = {"namespace": scope.namespace, "cache": scope.cache, "readable": scope.readable}
        yield toy_request(f"{tenant}{number}", prompt, num_tokens, sampling=sampling, tenant=tenant, **reach)


def prompts(seed, count=4):
    """Each with something in it that comes again."""
    random = np.random.default_rng(seed)
    return [np.tile(random.integers(0, VOCAB, 12), 2).tolist() for _ in range(count)]


PROBES = prompts(0)
SECRETS = PROBES + prompts(1)  # the worst case: A has asked just what B will


def trace_of_b(models, after, scope=isolated):
    cluster = Cluster(models)
    for request in requests_of("a", after, scope("a")):
        cluster.answer(request)
    return [cluster.answer(request) for request in requests_of("b", PROBES, scope("b"))]


def text_of(traces):
    return [[token for *_, chunks in trace for tokens, _ in chunks for token in tokens] for trace in traces]


@pytest.fixture(scope="module")
def alone(models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimeCurve, "observe", lambda self, rows, seconds: None)
        return trace_of_b(models, [])


def test_the_steps_of_a_tenant_are_the_same_whatever_another_one_has_asked(models, alone):
    accepted = [source for trace in alone for *_, chunks in trace for _, sources in chunks for source in sources]
    assert len(set(accepted)) > 3  # several sources have been right, or this would prove little
    assert max(len(trace) for trace in alone) > 33  # and a round has explored
    assert trace_of_b(models, SECRETS) == alone


def one_calibration(monkeypatch):
    monkeypatch.setattr(NamespaceSlots, "slot", lambda self, namespace: (0, False))
    monkeypatch.setattr(NamespaceSlots, "known", lambda self, namespace: 0)


def one_record_of_rounds(monkeypatch):
    record = Traffic()
    monkeypatch.setattr(TrafficRecords, "of", lambda self, namespaces: record)


def one_namespace(monkeypatch):
    def everybody(sharing):
        return Scope("everybody", "everybody")

    monkeypatch.setitem(globals(), "scope_of", everybody)


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(one_calibration, marks=pytest.mark.slow),
        pytest.param(one_record_of_rounds, marks=pytest.mark.slow),
        one_namespace,
    ],
)
def test_it_would_show_if_tenants_were_not_kept_apart(models, alone, monkeypatch, mutate):
    """Mutations: each lets something that A's requests have taught into B's."""
    mutate(monkeypatch)
    traces = trace_of_b(models, SECRETS)
    assert traces != alone
    assert text_of(traces) == text_of(alone)  # that never depends on drafts
