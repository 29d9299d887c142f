"""The promotion gate on real servers: what becomes public, when, through whom, and how it is gone again.

Covers also `cache_service.promotion.promotion_store`.
"""

import math
import threading
import time

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_service.admin.administration import CacheAdministration
from cache_service.errors import SettingError, StoreUnavailable
from cache_service.formats.key_ring import KeyRing
from cache_service.promotion.promotion_gate import PromotionGate
from cache_service.promotion.promotion_policy import MIN_TENANTS, PromotionPolicy, noise_of
from cache_service.promotion.promotion_thread import PromotionThread
from cache_service.promotion.sensitive_spans import SensitiveSpans
from cache_service.store.connection import ConnectionSettings
from paceline_testing.cache_stores import Documents, Namespace, catch_up, piece, run_histories, until

K = MIN_TENANTS
SECRET = b"s" * 32
POLICY = PromotionPolicy(min_tenants=K, min_age_s=100, release_every_s=60, window_s=2_000)
PHRASE = (1, 2, 3, 4)


def no_tokens_blocked(tokens):
    return np.zeros(len(tokens), bool)


class Clock:
    def __init__(self, now_s=100_000):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


class Pool:
    """A public namespace, a clock and a gate."""

    def __init__(self, namespace, policy=POLICY, blocks=no_tokens_blocked):
        self.namespace = namespace
        self.clock = Clock()
        self.policy = policy
        self.blocks = blocks
        self.gate = self.another_gate()

    def another_gate(self):
        store, codec = self.namespace.open()
        return PromotionGate(store, codec, SECRET, self.blocks, self.policy, self.clock)

    def say(self, phrase, tenants):
        for tenant in tenants:
            self.gate.offer(f"tenant {tenant}", [phrase])

    def pass_time(self, seconds):
        self.clock.now_s += seconds

    def release_after(self, seconds):
        self.pass_time(seconds)
        return self.gate.public() if self.gate.release() else None

    def read(self):
        """What a reader of the namespace finds, as every other namespace is read."""
        documents, counters = self.namespace.read()
        assert counters.corrupt_manifests + counters.corrupt_segments + counters.corrupt_entries == 0
        return {tuple(tokens) for tokens in documents.contents.values()}


@pytest.fixture
def pool(namespace):
    return Pool(namespace)


def test_batches_come_at_fixed_times_only(pool):
    pool.clock.now_s = 60 * 2_000
    assert pool.gate.release()
    pool.say(PHRASE, range(K))
    pool.pass_time(59)
    assert not pool.gate.release()
    pool.pass_time(60)
    assert (pool.gate.release(), pool.gate.released_s) == (True, 60 * 2_001)
    assert pool.read() == set(), "it is old enough now, but was not at the time of the batch"
    pool.pass_time(1)
    assert (pool.gate.release(), pool.gate.public()) == (True, {PHRASE})
    documents, _ = pool.namespace.read()
    ((_, pieces),) = documents.generations.items()
    assert [p.time_s for p in pieces] == [60 * 2_002], "nothing tells when it was said"


def test_nothing_below_the_threshold_is_stored_as_text(pool):
    ring = KeyRing({1: b"k" * 32})
    for secret_pool in (pool, Pool(Namespace(pool.namespace.connection.settings, ring=ring))):
        secret_pool.say((1_000_001, 1_000_002, 1_000_003), range(K - 1))
        token = np.array([1_000_002], "<i4").tobytes()
        redis = secret_pool.namespace.redis
        names = secret_pool.namespace.names()
        assert names
        assert not any(token in (redis.dump(name) or b"") for name in names)
        assert not any(b"tenant 1" in (redis.dump(name) or b"") + name for name in names)
        secret_pool.say((1_000_001, 1_000_002, 1_000_003), [K])
        assert secret_pool.release_after(200) == {(1_000_001, 1_000_002, 1_000_003)}


def test_revoking_adds_nothing_and_readers_forget_at_once(pool):
    other = (5, 6, 7, 8)
    pool.say(PHRASE, range(K))
    assert pool.release_after(160) == {PHRASE}
    documents = Documents()
    reader = pool.namespace.reader(documents)
    catch_up(reader)
    pool.say(other, range(1, K + 1))
    pool.pass_time(500)
    pool.gate.opt_out("tenant 0")
    assert (pool.gate.revoke(), pool.gate.public()) == (True, set())
    catch_up(reader)
    assert documents.contents == {}
    assert pool.release_after(60) == {other}
    catch_up(reader)
    assert [tuple(tokens) for tokens in documents.contents.values()] == [other]


def test_long_phrases_and_sensitive_ones_stay_out(namespace):
    table = {token: f"w{token} ".encode() for token in range(10)} | {50: b"12", 51: b"34", 52: b"jo@example.org "}
    rules = SensitiveSpans(lambda token: table.get(token, b"word "))
    pool = Pool(namespace, blocks=rules)
    pool.say(tuple(range(17)), range(K))
    pool.say((1, 50, 51), range(K))
    pool.say((1, 52), range(K))
    text = np.array([*range(1, 9), 50, 51, *range(1, 9), 52])
    for tenant in range(K):
        pool.gate.offer_text(f"tenant {tenant}", np.tile(text, 3))
    pool.say((1, 50, 2), range(K))
    public = pool.release_after(200)
    assert (1, 50, 2) in public
    assert all(len(phrase) <= 16 and not rules(phrase).any() for phrase in public)
    assert not any(token in phrase for phrase in public - {(1, 50, 2)} for token in (50, 51, 52))


def test_a_stricter_filter_takes_back_what_an_older_one_let_through(pool):
    pool.say(PHRASE, range(K))
    assert pool.release_after(160) == {PHRASE}
    pool.blocks = SensitiveSpans(lambda token: b"secret " if token == 3 else b"word ", never=("secret",))
    pool.gate = pool.another_gate()
    assert pool.release_after(60) == set()


def test_noise_keeps_phrases_waiting_and_lets_none_through(namespace):
    policy = PromotionPolicy(min_tenants=K, min_age_s=0, release_every_s=60, window_s=2_000, noise_epsilon=0.5)
    pool = Pool(namespace, policy)
    phrases = [(number, number) for number in range(40)]
    for tenant in range(K - 1):
        pool.gate.offer(f"tenant {tenant}", phrases)
    assert pool.release_after(60) == set()
    pool.gate.offer("tenant 99", phrases)
    wanted = {phrase for phrase in phrases if noise_of(SECRET, pool.gate._phrase_id(phrase), 0.5) >= 0}
    assert 5 < len(wanted) < 35
    assert pool.release_after(60) == pool.release_after(60) == wanted
    for tenant in range(K, 4 * K):
        pool.gate.offer(f"tenant {tenant}", phrases)
    assert pool.release_after(60) > wanted


def test_a_tenant_may_offer_so_much_a_day(namespace):
    pool = Pool(namespace, PromotionPolicy(min_tenants=K, min_age_s=0, tenant_offers=40))
    pool.gate.offer("tenant 0", [(number,) for number in range(60)])
    assert pool.gate.counters.refused_offers == 20
    pool.pass_time(24 * 3600)
    pool.gate.offer("tenant 0", [(number,) for number in range(40)])
    assert pool.gate.counters.refused_offers == 20
    pool.gate.opt_out("tenant 1")
    pool.gate.offer("tenant 1", [(1,)])
    assert pool.gate.counters.refused_offers == 21


def test_no_more_phrases_are_kept_than_may_be(namespace):
    pool = Pool(namespace, PromotionPolicy(min_tenants=K, min_age_s=0, release_every_s=60, max_phrases=3))
    for tenant in range(K):
        pool.gate.offer(f"tenant {tenant}", [(number,) for number in range(10)])
    assert len(pool.release_after(60)) == 3


def test_what_is_published_past_the_gate_does_not_stay(pool):
    pool.say(PHRASE, range(K))
    pool.namespace.append(piece("intruder", 0, [9, 9, 9]))
    assert (pool.release_after(160), pool.read(), pool.gate.counters.foreign_writes) == ({PHRASE}, {PHRASE}, 1)


def test_of_two_gates_one_releases_and_a_late_one_changes_nothing(pool):
    pool.say(PHRASE, range(K))
    pool.pass_time(160)
    late, other = pool.gate, pool.another_gate()
    token = late._store.acquire_lease(late._owner, 60_000)
    assert not other.release(), "the lease is held"
    pool.namespace.redis.delete(pool.namespace.keys.beside("gate").lease)  # in time it runs out
    assert (other.release(), other.public()) == (True, {PHRASE})
    pool.gate.opt_out("tenant 0")
    assert not late._release(token, 200_000)
    assert late.counters.refused_batches == 1
    assert pool.read() == {PHRASE}
    assert (late.revoke(), late.public()) == (True, set())


def test_damage_and_foreign_keys_are_left_out(pool):
    pool.say(PHRASE, range(K))
    phrases = pool.namespace.keys.beside("gate").key("phrases")
    ((phrase_id, frame),) = pool.namespace.redis.hgetall(phrases).items()
    pool.namespace.redis.hset(phrases, b"another id", frame)
    pool.namespace.redis.hset(phrases, b"garbage", b"garbage")
    assert (pool.release_after(160), pool.gate.counters.unreadable) == ({PHRASE}, 2)
    pool.namespace.redis.hset(phrases, phrase_id, b"garbage")
    pool.namespace.redis.hset(pool.namespace.keys.manifest, "body", b"garbage")
    assert pool.gate.public() == set()


def test_the_clock_is_that_of_the_server_and_everything_but_policy_ends(namespace):
    store, codec = namespace.open()
    gate = PromotionGate(
        store, codec, SECRET, no_tokens_blocked, PromotionPolicy(min_tenants=K, min_age_s=0, release_every_s=1)
    )
    for tenant in range(K):
        gate.offer(f"tenant {tenant}", [PHRASE])
    assert until(lambda: gate.release() and gate.public() == {PHRASE})
    gate.opt_out("tenant 77")
    redis = namespace.redis
    names = namespace.names()
    lives = {name: redis.ttl(name) for name in names if not name.endswith((b":left", b":lease"))}
    assert len(lives) >= 8
    assert min(lives.values()) > 0, lives


def test_a_weak_secret_is_refused(namespace):
    with pytest.raises(SettingError, match="secret"):
        PromotionGate(*namespace.open(), b"short", no_tokens_blocked)


def test_the_thread_promotes_and_revokes(namespace):
    store, codec = namespace.open()
    policy = PromotionPolicy(min_tenants=K, min_age_s=0, release_every_s=1)
    gate = PromotionGate(store, codec, SECRET, no_tokens_blocked, policy)
    members = [frozenset(f"tenant {tenant}" for tenant in range(K))]
    thread = PromotionThread(lambda: (gate, members[0]), poll_s=0.01)
    looking = PromotionGate(*namespace.open(), SECRET, no_tokens_blocked, policy)
    text = np.random.default_rng(1).integers(0, 1_000, 200)
    thread.submit("tenant 0", ["nonsense"])
    for tenant in range(K + 1):  # the last one is no member
        thread.submit(f"tenant {tenant}", text)
    try:
        assert until(lambda: len(looking.public()) > 10)
        members[0] -= {"tenant 0"}
        assert until(lambda: not looking.public())
    finally:
        assert thread.close(20)
    assert (thread.dropped_texts, thread.failures, thread._turns.num_faults) == (2, 0, 0)


def test_verify_checks_what_the_gate_keeps(pool):
    pool.say(PHRASE, range(K))
    pool.gate.opt_out("somebody else")
    pool.release_after(160)
    administration, keys = CacheAdministration(pool.namespace.connection), pool.namespace.keys
    checked = administration.verify(keys)
    assert (checked.problems, checked.other_keys) == ((), ())
    assert checked.objects == 1 + 1 + 1 + 1  # manifest, segment, phrase, who has left
    redis, phrases, left = pool.namespace.redis, keys.key("gate:phrases"), keys.key("gate:left")
    redis.hset(phrases, b"i" * 16, redis.hvals(phrases)[0][:-1])
    redis.hset(left, b"t" * 16, b"tomorrow")
    (supporters,) = redis.keys(keys.key("gate:supporters:*"))
    redis.persist(supporters)
    problems = {problem.kind: problem.detail for problem in administration.verify(keys).problems}
    assert problems.keys() == {"gate:phrases", "gate:left", supporters.decode().partition("}:")[2]}
    assert (b"i" * 16).hex() in problems["gate:phrases"]
    assert "tomorrow" in problems["gate:left"]


def test_revocation_does_not_wait_for_the_lease_of_a_gate_that_has_crashed(namespace):
    policy = PromotionPolicy(min_tenants=K, min_age_s=0, release_every_s=1)
    gate, crashed = (PromotionGate(*namespace.open(), SECRET, no_tokens_blocked, policy) for _ in range(2))
    organisations = [f"tenant {tenant}" for tenant in range(K)]
    for organisation in organisations:
        crashed.offer(organisation, [(1, 2, 3)])
    assert until(lambda: crashed.release() and crashed.public())
    assert crashed._store.acquire_lease(crashed._owner, 3_600_000)
    thread = PromotionThread(lambda: (gate, frozenset(organisations[1:])), poll_s=0.01)
    try:
        assert until(lambda: not crashed.public())
    finally:
        assert thread.close(20)
    assert (thread.failures, thread._turns.num_faults) == (0, 0)


def test_a_batch_that_takes_long_rests_on_its_way_and_keeps_its_lease(namespace, monkeypatch):
    rests = []

    def busy(tokens):
        until_s = time.perf_counter() + 0.002
        while time.perf_counter() < until_s:
            pass
        return no_tokens_blocked(tokens)

    def rest(seconds):
        rests.append(seconds)
        assert other._store.acquire_lease(other._owner, 1_000) is None

    policy = PromotionPolicy(min_tenants=K, min_age_s=0)
    gate = PromotionGate(*namespace.open(), SECRET, busy, policy, lambda: 3_600_000, 0.5)
    other = PromotionGate(*namespace.open(), SECRET, no_tokens_blocked, policy)
    phrases = [(number, number) for number in range(20)]
    for tenant in range(K):
        gate.offer(f"tenant {tenant}", phrases)
    monkeypatch.setattr("cache_service.promotion.promotion_gate.time.sleep", rest)
    assert (gate.release(), gate.public()) == (True, set(phrases))
    assert set(rests) == {0.5}
    assert len(rests) >= len(phrases) - 2
    rests.clear()
    assert (gate.revoke(), gate.public()) == (True, set(phrases))
    assert rests == []


def test_a_text_waits_until_the_gate_has_heard_of_it(namespace):
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(tokens):
        has_begun.set()
        assert may_end.wait(20)
        return no_tokens_blocked(tokens)

    gate = PromotionGate(*namespace.open(), SECRET, slow, POLICY)
    thread = PromotionThread(lambda: (gate, frozenset({"tenant"})), poll_s=0.01)
    try:
        thread.submit("tenant", list(range(8)))
        assert has_begun.wait(20)
        assert thread.queued_texts == 1
        may_end.set()
        assert until(lambda: thread.queued_texts == 0)
    finally:
        may_end.set()
        assert thread.close(20)
    assert thread._turns.num_faults == 0


def test_without_a_server_texts_wait_and_the_oldest_are_dropped():
    away = Namespace(ConnectionSettings("redis://127.0.0.1:1", connect_timeout_s=0.1))
    gate = PromotionGate(*away.open(), SECRET, no_tokens_blocked)
    with pytest.raises(StoreUnavailable):
        gate.release()
    thread = PromotionThread(lambda: (gate, frozenset({"tenant"})), max_queued_texts=3, poll_s=0.01)
    for number in range(10):
        thread.submit("tenant", [number] * 8)
    assert until(lambda: thread.failures > 0)
    assert thread.queued_texts <= 3
    assert thread.dropped_texts >= 6
    assert thread.close(20)
    assert thread._turns.num_faults == 0


TENANTS = range(9)
PHRASES = [(1,), (1, 2, 3, 4), tuple(range(16)), (5,) * 16]
TOO_LONG = tuple(range(17))
SENSITIVE = (666, 1, 2)


class Oracle:
    """The rules in plain Python."""

    def __init__(self):
        self.said = {}  # phrase -> {tenant: time}
        self.since = {}  # tenant that has opted out -> when it came back, or infinity
        self.reached = {}  # phrase -> time
        self.public = set()
        self.dealt_s = -1  # the batch that this gate has decided
        self.written_s = -1  # the batch that lies in Redis: one that is as the one before is not written

    def offer(self, tenant, phrase, now_s):
        if len(phrase) > 16 or self.since.get(tenant) == math.inf:
            return
        said = self.said.setdefault(phrase, {})
        said[tenant] = now_s
        for other in [t for t, time_s in said.items() if time_s < now_s - POLICY.window_s]:
            del said[other]
        if len(said) >= K and phrase != SENSITIVE:
            self.reached.setdefault(phrase, now_s)

    def support(self, phrase, now_s):
        return {
            tenant
            for tenant, time_s in self.said.get(phrase, {}).items()
            if time_s >= now_s - POLICY.window_s and time_s > self.since.get(tenant, -1)
        }

    def drop_unsupported(self, now_s):
        for phrase in [p for p in self.reached if len(self.support(p, now_s)) < K]:
            del self.reached[phrase]

    def old_enough(self, batch_s):
        return {phrase for phrase, reached_s in self.reached.items() if reached_s + POLICY.min_age_s <= batch_s}

    def release(self, now_s):
        """Whether a batch was due."""
        batch_s = now_s // POLICY.release_every_s * POLICY.release_every_s
        is_due = batch_s > max(self.dealt_s, self.written_s)
        if is_due:
            self.drop_unsupported(now_s)
            allowed = self.old_enough(batch_s)
            if allowed != self.public:
                self.public, self.written_s = allowed, batch_s
            self.dealt_s = batch_s
        return is_due

    def revoke(self, now_s):
        if self.written_s >= 0:
            self.drop_unsupported(now_s)
            self.public &= self.old_enough(self.written_s)


class History(RuleBasedStateMachine):
    server_settings = None

    @initialize()
    def begin(self):
        self.pool = Pool(Namespace(self.server_settings), blocks=lambda tokens: np.asarray(tokens) == 666)
        self.oracle = Oracle()
        self.is_settled = True

    @property
    def now_s(self):
        return self.pool.clock.now_s

    @rule(
        tenants=st.sets(st.sampled_from(TENANTS), min_size=1), phrase=st.sampled_from([*PHRASES, TOO_LONG, SENSITIVE])
    )
    def say(self, tenants, phrase):
        for tenant in sorted(tenants):
            self.pool.say(phrase, [tenant])
            self.oracle.offer(tenant, phrase, self.now_s)

    @rule(phrase=st.sampled_from(PHRASES), first=st.integers(0, len(TENANTS) - K))
    def promote(self, phrase, first):
        self.say(set(range(first, first + K)), phrase)
        self.pass_time(170)
        self.release()

    @rule(seconds=st.sampled_from([1, 61, 170, 1_000]))
    def pass_time(self, seconds):
        self.pool.pass_time(seconds)
        self.is_settled = False

    @rule()
    def release(self):
        self.pool.gate.release()
        self.is_settled = self.oracle.release(self.now_s) or self.is_settled

    @rule(tenant=st.sampled_from(TENANTS), revokes=st.booleans())
    def opt_out(self, tenant, revokes):
        self.pool.gate.opt_out(f"tenant {tenant}")
        self.oracle.since[tenant] = math.inf
        self.is_settled = False
        if revokes:
            self.revoke()

    @rule(number=st.integers(0, 8))
    def a_supporter_leaves(self, number):
        if self.oracle.public:
            supporters = sorted(self.oracle.support(sorted(self.oracle.public)[0], self.now_s))
            if supporters:
                self.opt_out(supporters[number % len(supporters)], revokes=True)

    @rule(tenant=st.sampled_from(TENANTS))
    def opt_in(self, tenant):
        self.pool.gate.opt_in(f"tenant {tenant}")
        if self.oracle.since.get(tenant) == math.inf:
            self.oracle.since[tenant] = self.now_s

    @rule()
    def revoke(self):
        self.pool.gate.revoke()
        self.oracle.revoke(self.now_s)
        self.is_settled = True

    @rule()
    def another_gate_takes_over(self):
        self.pool.gate = self.pool.another_gate()
        self.oracle.dealt_s = -1

    @rule(phrase=st.sampled_from(PHRASES))
    def supporters_are_evicted(self, phrase):
        """Redis was short of memory."""
        self.pool.namespace.redis.delete(self.pool.gate._store._supporters(self.pool.gate._phrase_id(phrase)))
        self.oracle.said.pop(phrase, None)
        self.is_settled = False

    @rule()
    def lose_everything(self):
        if names := self.pool.namespace.names():
            self.pool.namespace.redis.delete(*names)
        self.pool.gate = self.pool.another_gate()
        self.oracle = Oracle()

    @invariant()
    def the_pool_is_what_the_rules_say(self):
        public = self.pool.read()
        assert public == self.oracle.public
        assert TOO_LONG not in public
        assert SENSITIVE not in public
        for phrase in public:
            assert len(phrase) <= POLICY.max_tokens
            if self.is_settled:  # time and tenants that leave are seen with the next batch, or `revoke`
                assert len(self.oracle.support(phrase, self.now_s)) >= K
                assert self.now_s - self.oracle.reached[phrase] >= POLICY.min_age_s

    def teardown(self):
        if hasattr(self, "pool"):
            self.pool.namespace.connection.close()


def test_any_history_keeps_the_rules(machine_server):
    run_histories(History, machine_server, max_examples=30, steps=40)
