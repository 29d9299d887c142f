"""Tenants with policy `promoted`, end to end: what enough of them are answered becomes public, and nothing else does.

Drafts can only come from the shared cache here, and who probes adds nothing to it: so the steps of a probe depend on
what the pool holds alone, and are the same every time.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from actors.drafters.registry import create_drafters
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, TokenChunk
from actors.models.loader import load_model
from actors.models.source import ModelSource
from cache_service.formats.namespaces import PUBLIC
from cache_service.log.publisher import PublisherSettings
from cache_service.promotion import promotion_gate as promotion
from cache_service.promotion.promotion_gate import PromotionGate, nothing_blocked
from cache_service.promotion.promotion_policy import batch_time
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.promotion import PromotionSource, terms_of
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.config import PromotionConfig
from cluster.router.step_time import StepTimeCurve
from cluster.tenants.registry import Registry, StoredTenant
from cluster.tenants.registry_file import write_registry
from cluster.tenants.scope import Sharing, scope_of
from paceline_testing.cache_stores import until
from paceline_testing.rounds import learning_core, toy_info, toy_request
from paceline_testing.tiny_models import save_tiny_model

VOCAB = 259
K = 5
POLICY = PromotionConfig(min_tenants=K, min_age_s=100, release_every_s=60)
PROFILE = [(1, 0.020), (8, 0.024), (64, 0.060)]  # (rows, seconds)
SAID = list(b"what all of them ask for")
UNSAID = list(b"what nobody else has ever")
NOW_S = 1_000_020


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, hidden_size=48, heads=4, kv_heads=2)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Step times are measured on the clock, which is never the same twice."""
    monkeypatch.setattr(StepTimeCurve, "observe", lambda self, rows, seconds: None)


class Cluster:
    """Tenants, a server, and one router at a time, with the gate's clock in the test's hand."""

    def __init__(self, directory, model, server):
        self.source, self.server = ModelSource("tiny", "tiny", model), server
        self.loaded = load_model(self.source)
        self.file = directory / "tenants.json"
        self.index_directory = directory / "index"
        self.now_s = NOW_S
        self.registry = Registry(
            tenants=tuple(
                StoredTenant(id=f"{number:08x}", name=f"t{number}", created=datetime.now(UTC), policy="promoted")
                for number in range(K + 1)
            )
        )
        self.cache = None
        self.begin()

    def begin(self):
        """A router that knows nothing but what is stored."""
        self.end()
        write_registry(self.file, self.registry)
        source = PromotionSource(self.file, self.source, POLICY, clock=lambda: self.now_s, poll_s=0.01)
        settings = SharedCacheSettings(publisher=PublisherSettings(flush_s=0.01))
        self.cache = SharedCache(self.server.settings, "model", None, settings, source)
        self.cache.follow([PUBLIC])

    def end(self):
        if self.cache is not None:
            assert self.cache.close(20)
            assert self.cache._promotion._turns.num_faults == 0

    def change(self, number, **fields):
        tenants = list(self.registry.tenants)
        tenants[number] = replace(tenants[number], **fields)
        self.registry = Registry(tenants, self.registry.server_key)
        write_registry(self.file, self.registry)

    def scope(self, number, policy="promoted", **wishes):
        key = bytes.fromhex(self.registry.server_key)
        return scope_of(Sharing(f"{number:08x}", policy, None, key), **wishes)

    def ask(self, scope, prompt=SAID, seed=7, num_tokens=80):
        """What each round of an answer verified, and what it emitted."""
        target = TargetEngine(copy.deepcopy(self.loaded), EngineOptions(512, 4))
        drafters = create_drafters(("cache",), index=self.cache.index)
        info = toy_info(VOCAB, 512, 4, step_times=list(PROFILE))
        core = learning_core(info, drafters, token_sink=self.cache)
        sampling = SamplingParams(seed=seed, temperature=1.0)
        reach = {"namespace": scope.namespace, "cache": scope.cache, "readable": scope.readable}
        core.add(toy_request("r", prompt, num_tokens, sampling=sampling, promotes=scope.promotes, **reach), 0.0)
        trace, known = [], list(prompt)
        for step in range(1_000):
            round, _ = core.plan_round(step * 0.02)
            core.draft_locally(round)
            batch = core.assemble(round, {})
            result = msgspec.structs.replace(target.verify(batch), elapsed_s=0.02, head_s=0.0)
            chunks = [e for e in core.commit(round, result, step * 0.02) if isinstance(e, TokenChunk)]
            (item,) = batch.items
            drafts = paths(item.tree.token_ids.tolist(), item.tree.parents.tolist())
            emitted = [token for chunk in chunks for token in chunk.token_ids]
            trace.append((known[-2:], drafts, emitted))
            known += emitted
            if chunks and chunks[-1].finish_reason is not None:
                assert core.counters.sink_faults == 0
                return trace
        raise AssertionError("the answer does not come to an end")

    def probe(self, number=K, policy="promoted", **fields):
        """Without adding anything, and cold but for the pool."""
        return self.ask(self.scope(number, policy, cache="read"), **fields)

    def say(self, numbers, **fields):
        """Tenants are answered, and the gate has heard of it."""
        for number in numbers:
            self.ask(self.scope(number), **fields)
        assert until(lambda: self.cache.stats().promotion.queued_texts == 0)

    def tell(self, numbers, text):
        """As if they had been answered so."""
        for number in numbers:
            self.cache.answered(self.scope(number).promotes, np.array(text, np.int32))
        assert until(lambda: self.cache.stats().promotion.queued_texts == 0)

    def wait_for_registry(self):
        members = terms_of(self.registry, POLICY).members
        assert until(lambda: self.cache._promotion._members == members)

    def pass_time(self, seconds):
        """The gate has dealt with the batch that is due then."""
        self.now_s += seconds
        due_s = batch_time(self.now_s, self.cache._promotion._gate.policy)
        assert until(lambda: self.cache._promotion._counted_s == due_s)

    def public(self):
        """As a stranger to the router finds it in Redis."""
        terms = terms_of(self.registry, POLICY)
        gate = PromotionGate(*self.cache._open(PUBLIC), terms.secret, nothing_blocked, terms.policy)
        return gate.public()

    def publish(self, text):
        """What all but the last tenant say becomes public; the router can draft from it."""
        self.tell(range(K), text)
        self.pass_time(160)
        self.wait_for_drafts()

    def wait_for_drafts(self):
        """The router can draft from all that is public."""
        assert self.public()
        num_tokens = sum(map(len, self.public()))
        assert until(lambda: self.cache.stats().index.tokens >= num_tokens)

    def settle(self):
        """The router drafts from nothing any more."""
        assert until(lambda: not self.public())
        assert until(lambda: self.cache.index.automata(PUBLIC).base is None)
        assert until(lambda: len(self.cache.index.automata(PUBLIC).tail) == 0)


def paths(token_ids, parents):
    """Paths from a tree's root to each node."""
    found = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        found.append(([] if parent < 0 else found[parent]) + [token_id])
    return found


def text_of(trace):
    return [token for *_, emitted in trace for token in emitted]


def drafts_of(trace):
    """Each with the two tokens before it, by which it was found."""
    return [before + draft for before, drafts, _ in trace for draft in drafts]


def is_within(tokens, phrases):
    wanted = tuple(tokens)
    return any(phrase[begin : begin + len(wanted)] == wanted for phrase in phrases for begin in range(len(phrase)))


@pytest.fixture
def cluster(tmp_path, model):
    with EmbeddedServer(tmp_path / "server") as server:
        cluster = Cluster(tmp_path, model, server)
        yield cluster
        cluster.end()


def test_what_enough_tenants_are_answered_speeds_the_next_one_up_after_age_and_batch(cluster):
    cold = cluster.probe()
    alone = cluster.probe(policy="isolated")
    assert drafts_of(cold) == drafts_of(alone) == []
    cluster.say(range(K - 1))
    cluster.pass_time(3_600)
    cluster.tell([0, 0, 1], text_of(cold))  # whoever says it again is not somebody else
    cluster.pass_time(3_600)
    assert (cluster.public(), cluster.probe()) == (frozenset(), cold)
    cluster.tell([K - 1], text_of(cold))
    assert cluster.public() == frozenset(), "it is not old enough"
    cluster.pass_time(60)
    assert cluster.public() == frozenset(), "nor in the next batch"
    cluster.pass_time(120)
    cluster.wait_for_drafts()
    public = cluster.public()
    warm = cluster.probe()
    assert text_of(warm) == text_of(cold)
    assert len(warm) < 0.9 * len(cold)
    assert all(is_within(draft, public) for draft in drafts_of(warm))
    assert cluster.probe(policy="isolated") == alone


def test_an_outsiders_steps_differ_by_public_phrases_alone(cluster):
    cold = cluster.probe(), cluster.probe(prompt=UNSAID, seed=8)
    cluster.tell(range(K - 1), text_of(cold[1]))  # one too few
    cluster.publish(text_of(cold[0]))
    warm = cluster.probe(), cluster.probe(prompt=UNSAID, seed=8)
    public, said = cluster.public(), tuple(text_of(cold[0]))
    assert all(is_within(phrase, [said]) for phrase in public)
    assert len(drafts_of(warm[0])) > 20
    for one, before in zip(warm, cold, strict=True):
        assert text_of(one) == text_of(before)
        assert all(is_within(draft, public) for draft in drafts_of(one))
        first = next((number for number, (_, drafts, _) in enumerate(one) if drafts), len(one))
        assert one[:first] == before[:first]


def test_it_would_show_if_one_tenant_counted_as_often_as_it_speaks(cluster, monkeypatch):
    """A mutation of the gate."""
    cold = cluster.probe()
    monkeypatch.setattr(PromotionGate, "_organisation_id", lambda self, organisation: secrets.token_bytes(16))
    monkeypatch.setattr(promotion, "support_of", lambda candidate, *_, **__: len(candidate.seen_s))
    cluster.tell([0] * K, text_of(cold))
    cluster.pass_time(160)
    assert cluster.public()
    cluster.wait_for_drafts()
    assert cluster.probe() != cold


@pytest.mark.parametrize(
    "leave", [{"policy": "isolated"}, {"disabled": True}, None], ids=["policy", "disabled", "removed"]
)
def test_routers_stop_drafting_what_loses_a_supporter_and_take_it_in_again_only_when_it_is_said_again(cluster, leave):
    cold = cluster.probe()
    cluster.publish(text_of(cold))
    assert cluster.probe() != cold
    before = cluster.registry
    if leave is None:
        cluster.registry = Registry(before.tenants[1:], before.server_key)
        write_registry(cluster.file, cluster.registry)
    else:
        cluster.change(0, **leave)
    cluster.settle()
    assert cluster.probe() == cold
    cluster.registry = before
    write_registry(cluster.file, before)
    cluster.wait_for_registry()
    cluster.pass_time(3_600)
    assert cluster.public() == frozenset()
    cluster.tell([0], text_of(cold))
    cluster.pass_time(3_600)
    assert cluster.public()
