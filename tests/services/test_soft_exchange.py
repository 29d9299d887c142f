"""Soft counts through real servers: what replicas learn adds up at all of them, through folds, purges and outages."""

import gc
import time
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.drafters.contract import MAX_CONTEXT, VerifiedRows
from actors.drafters.soft_ngram import SoftNgramDrafter
from cache_service.admin.administration import CacheAdministration
from cache_service.counts.soft_codec import area_of, decode_delta
from cache_service.counts.soft_compactor import SoftCompactor, SoftCompactorSettings
from cache_service.counts.soft_exchange import SoftExchange, SoftExchangeSettings
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.namespaces import PUBLIC
from cache_service.store.connection import ConnectionSettings
from paceline_testing.cache_stores import Namespace, kill, run_histories, until

ORDER = 2
RING = KeyRing({1: b"1" * 32})


class ManualTurns:
    """Takes the place of a background thread: its tasks have their turns when the test says so."""

    def __init__(self, name):
        self.tasks = {}

    def add(self, name, task, delay_s=0.0):
        self.tasks[name] = task

    def hasten(self, name):
        assert name in self.tasks

    def remove(self, name):
        self.tasks.pop(name, None)

    def close(self, timeout_s):
        return True

    def run(self):
        """A turn of each task; true if one has more to do at once."""
        pauses = [task() for task in list(self.tasks.values())]
        return 0.0 in pauses


class Replica:
    """A drafter and its exchange, stepped by hand."""

    def __init__(self, namespace, *, folds=False, drafter=None, **options):
        self.name = namespace.keys.namespace
        self.drafter = drafter or SoftNgramDrafter(
            order=ORDER, delta_bytes=1 << 16, table_bytes=1 << 20, merged_rows=32
        )
        given = SoftExchangeSettings(order=ORDER, export_every_s=0, tick_s=1, folds=folds, **options)
        self.exchange = SoftExchange(namespace.open, given, ManualTurns)
        self.exchange.follow(self.name)

    def learn(self, *contexts, may_share=True, namespace=None):
        rows = np.full((len(contexts), MAX_CONTEXT), -1, np.int32)
        for row, context in enumerate(contexts):
            rows[row, MAX_CONTEXT - len(context) :] = context
        token_ids = np.array([[10 * context[-1], 10 * context[-1] + 1] for context in contexts], np.int32)
        probs = np.tile(np.array([[0.75, 0.25]], np.float32), (len(contexts), 1))
        name = self.name if namespace is None else namespace
        self.drafter.remember(VerifiedRows(name, rows, token_ids, probs, may_share=may_share))

    def turn(self):
        """One round: a tick, and a turn of the thread."""
        self.exchange.tick(self.drafter, time.monotonic())
        return self.exchange._turns.run()

    def catch_up(self):
        for _ in range(3):  # a reset is found, applied, and read after
            while self.turn():
                pass
        self.exchange.tick(self.drafter, time.monotonic())
        assert self.exchange.stats.faults == 0

    @property
    def contents(self):
        table = self.drafter.table_of(self.name)
        return Counter() if table is None else counts(table.entries())


def counts(entries):
    """{(context, successor): mass}, without the context of no tokens: it fades after a few rows."""
    found = Counter()
    for key, tokens, masses in zip(entries.keys, entries.tokens, entries.masses, strict=True):
        if key != np.uint64(0x2545F4914F6CDD1D):
            found.update({(int(key), int(t)): int(m) for t, m in zip(tokens, masses, strict=True) if m})
    return found


def fold(namespace, **options):
    store, codec = namespace.open()
    compactor = SoftCompactor(store, codec, ORDER, SoftCompactorSettings(**options))
    while compactor.fold():
        pass
    compactor.release()
    return compactor.counters


def log_entries(namespace):
    store, codec = namespace.open()
    return [
        decode_delta(codec, ORDER, frame) for _, frame in store.beside(area_of(ORDER)).read_log("0-0", 1000).entries
    ]


@pytest.mark.parametrize("ring", [None, RING], ids=["plain", "encrypted"])
def test_what_one_replica_learns_another_knows(shared_server, ring):
    namespace = Namespace(shared_server.settings, ring=ring)
    one, other = Replica(namespace), Replica(namespace)
    one.learn([1], [1, 2], [1, 2], [5, 2])
    other.learn([7])
    for replica in (one, other, one, other):
        replica.catch_up()
    assert one.contents == other.contents
    assert len(one.contents) >= 8
    assert one.exchange.stats.exported_contexts > 0
    assert one.exchange.stats.corrupt == 0


def test_what_is_exchanged_no_longer_does_not_wait_for_the_garbage_collector(namespace):
    replica = Replica(namespace)
    replica.turn()
    gc.disable()
    try:
        gone = weakref.ref(replica.exchange._feeds[replica.name].codec)
        replica.exchange.forget(replica.name)
        assert gone() is None
    finally:
        gc.enable()


def test_verifying_a_namespace_checks_its_counts_too(namespace):
    replica = Replica(namespace)
    replica.learn([1], [2])
    replica.catch_up()
    fold(namespace)
    replica.learn([3])
    replica.catch_up()
    administration = CacheAdministration(namespace.connection)
    checked = administration.verify(namespace.keys)
    assert (checked.objects, checked.problems, checked.other_keys) == (1 + 1 + 2, (), ())  # manifest, part, entries
    (part,) = (key.decode() for key in namespace.redis.keys(namespace.keys.beside(area_of(ORDER)).segment("*")))
    namespace.redis.setrange(part, 40, b"x")
    namespace.redis.set(part[:-64] + "0" * 64, b"garbage", ex=60)
    namespace.redis.xadd(namespace.keys.beside(area_of(ORDER)).log, {b"e": b"garbage"})
    problems = {problem.kind: problem.detail for problem in administration.verify(namespace.keys).problems}
    kind = part.rpartition("}:")[2]
    assert problems.keys() == {kind, kind[:-64] + "0" * 64, f"{area_of(ORDER)}:log"}
    assert "other bytes" in problems[kind]


def test_what_must_not_leave_stays(namespace):
    one, other = Replica(namespace), Replica(namespace)
    one.learn([1], may_share=False)
    one.learn([2])
    one.catch_up()
    other.catch_up()
    assert {token for _, token in other.contents} == {20, 21}
    assert {token for _, token in one.contents} == {10, 11, 20, 21}
    assert all(10 not in delta.entries.tokens for delta in log_entries(namespace))


def test_namespaces_know_nothing_of_each_other(namespace):
    one = Replica(namespace)
    one.learn([1])
    one.learn([3], namespace="stranger")
    stranger = Replica(Namespace(namespace.connection.settings))
    for replica in (one, stranger):
        replica.catch_up()
    assert stranger.contents == Counter()
    assert 30 not in {token for _, token in one.contents}


def test_a_late_replica_starts_from_parts_and_log(namespace):
    one = Replica(namespace)
    for step in range(1, 30):
        one.learn([step], [step, step + 1])
        one.catch_up()
        if step % 3 == 0:
            folding = fold(namespace, fold_entries=2)
            assert folding.corrupt_entries + folding.lost_segments == 0
    late = Replica(namespace)
    late.catch_up()
    assert late.contents == one.contents
    reader = late.exchange._feeds[late.name].reader
    assert reader.counters.segments > 0
    assert 0 < reader.counters.entries < 10, "the log has been trimmed"
    assert late.exchange.stats.warm_ratio == 1.0


def test_a_purge_ends_what_everybody_knew_and_lets_nothing_old_back_in(namespace):
    one, other = Replica(namespace), Replica(namespace)
    one.learn([1])
    one.catch_up()
    other.catch_up()
    one.learn([2])
    one.exchange.tick(one.drafter, time.monotonic())  # taken, not written
    namespace.redis.set(namespace.keys.epoch, "another")
    log = namespace.keys.beside(area_of(ORDER)).log
    before = namespace.redis.xlen(log)
    for replica in (one, other, one, other):
        replica.catch_up()
    assert one.contents == other.contents == Counter()
    assert namespace.redis.xlen(log) == before, "what was on its way does not come to lie there again"
    assert Replica(namespace).contents == Counter()
    late = Replica(namespace)
    late.catch_up()
    assert late.contents == Counter(), "though log and parts still lie there"
    one.learn([3])
    one.catch_up()
    other.catch_up()
    assert one.contents == other.contents != Counter()
    assert fold(namespace).folds > 0
    late = Replica(namespace)
    late.catch_up()
    assert late.contents == one.contents, "a fold of the new data set leaves the old one out"


def test_a_forgotten_namespace_is_dropped(namespace):
    one = Replica(namespace)
    one.learn([1])
    one.catch_up()
    one.exchange.forget(one.name)
    one.turn()
    assert one.drafter.namespaces == []
    assert one.exchange.stats.namespaces == 0
    one.exchange.follow(one.name)
    one.catch_up()
    assert one.contents != Counter(), "it is read again where it is asked for again"


def test_a_table_that_made_room_is_filled_anew_when_it_is_used_again(namespace):
    one = Replica(namespace)
    one.learn([1])
    one.catch_up()
    one.drafter.drop_namespace(one.name)
    one.learn([2])
    one.catch_up()
    assert {token for _, token in one.contents} >= {10, 11}
    one.drafter.drop_namespace(one.name)
    one.catch_up()
    assert one.exchange.stats.namespaces == 0, "nobody uses it"


def test_the_public_pool_has_no_counts(namespace):
    one = Replica(namespace)
    before = one.exchange.stats.namespaces
    one.exchange.follow(PUBLIC)
    assert one.exchange.stats.namespaces == before == 1


def test_the_namespaces_longest_unasked_for_give_way(namespace):
    one = Replica(namespace, max_namespaces=2)
    for name in ("b", one.name, "c"):
        one.exchange.follow(name)
    assert set(one.exchange._feeds) == {one.name, "c"}
    assert one.exchange.stats.namespaces == 2


def test_an_owner_with_ever_new_namespaces_pushes_out_its_own(namespace):
    one = Replica(namespace, max_namespaces=3)
    one.learn([1])
    one.catch_up()
    contents = one.contents
    for salt in range(50):
        one.exchange.follow(f"restless{one.name}-{salt}")
    assert list(one.exchange._feeds)[-2:] == [f"restless{one.name}-{salt}" for salt in (48, 49)]
    one.catch_up()
    assert one.contents == contents != {}


def test_a_reader_that_was_away_too_long_begins_again(namespace):
    one, other = Replica(namespace), Replica(namespace)
    for step in range(1, 12):
        one.learn([step])
        one.catch_up()
        if step == 2:
            other.catch_up()
        fold(namespace, fold_entries=1)
    other.catch_up()
    assert other.contents == one.contents
    assert other.exchange.stats.resets == 1


def test_damage_is_counted_and_left_out(namespace):
    one = Replica(namespace)
    one.learn([1])
    one.catch_up()
    fold(namespace)
    one.learn([2])
    one.catch_up()
    keys = namespace.keys.beside(area_of(ORDER))
    (part,) = namespace.redis.keys(keys.segment("*"))
    namespace.redis.setrange(part, 40, b"garbage")
    namespace.redis.xadd(keys.log, {"e": b"garbage"})
    namespace.redis.xadd(keys.log, {"other": b"field"})
    late = Replica(namespace)
    late.catch_up()
    assert {token for _, token in late.contents} == {20, 21}
    assert late.exchange.stats.corrupt == 3
    namespace.redis.hset(keys.manifest, "body", b"garbage")
    late = Replica(namespace)
    late.catch_up()
    assert late.exchange.stats.corrupt == 3
    assert fold(namespace).folds > 0, "a manifest that nobody can read is replaced"


def test_a_full_namespace_keeps_what_is_of_most_use(namespace):
    one = Replica(namespace)
    for step in range(6):
        for _ in range(3):
            one.learn([1], [2])
        one.learn(*([100 + 50 * step + row] for row in range(50)))
        one.catch_up()
        folding = fold(namespace, max_contexts=128, fold_entries=1)
    assert folding.folds > 0
    late = Replica(namespace)
    late.catch_up()
    known = {token for _, token in late.contents}
    assert {10, 20} <= known
    assert len({key for key, _ in late.contents}) <= 128


def test_everything_has_a_time_to_live(namespace):
    one = Replica(namespace)
    for step in (1, 2):
        one.learn([step])
        one.catch_up()
        fold(namespace)
    keys = namespace.names()
    lives = {key: namespace.redis.ttl(key) for key in keys}
    assert len(lives) >= 5
    assert all(life > 0 for key, life in lives.items() if not key.endswith(b":lease")), lives


def test_without_a_server_nothing_happens_and_nothing_fails():
    away = Namespace(ConnectionSettings("redis://127.0.0.1:1", connect_timeout_s=0.1))
    one = Replica(away)
    for step in range(1, 5):
        one.learn([step])
        one.turn()
    assert len({token for _, token in one.contents}) == 8
    assert one.exchange.stats.failures > 0
    assert one.exchange.stats.faults == 0


def test_threads_bring_it_across_and_survive_an_outage(server):
    """The one test with real threads: two replicas, a server that goes away and comes back."""
    quick = SoftExchangeSettings(
        order=ORDER, export_every_s=0, poll_s=0.01, idle_poll_s=0.02, retry_s=0.01, max_retry_s=0.05,
        compactor=SoftCompactorSettings(fold_every_s=0.02),
    )  # fmt: skip
    namespace = Namespace(server.settings)
    replicas = [Replica(namespace) for _ in range(2)]
    for replica in replicas:
        replica.exchange = SoftExchange(namespace.open, quick)
        replica.exchange.follow(replica.name)

    def agree(wanted):
        for replica in replicas:
            replica.exchange.tick(replica.drafter, time.monotonic())
        known = [{token for _, token in replica.contents} for replica in replicas]
        return known[0] == known[1] == wanted

    try:
        replicas[0].learn([1], [2])
        assert until(lambda: agree({10, 11, 20, 21}))
        kill(server)
        failures = [replica.exchange.stats.failures for replica in replicas]
        replicas[1].learn([3])
        assert until(
            lambda: (
                not agree({0}) and all(r.exchange.stats.failures > f for r, f in zip(replicas, failures, strict=True))
            )
        )
        server.restart()
        replicas[0].learn([4])
        assert until(lambda: agree({10, 11, 20, 21, 30, 31, 40, 41}))
    finally:
        assert all(replica.exchange.close(20) for replica in replicas)
    assert [replica.exchange.stats.faults for replica in replicas] == [0, 0]


class History(RuleBasedStateMachine):
    """Replicas against a plain sum of what was written to this data set."""

    server_settings = None

    @initialize()
    def begin(self):
        self.namespace = Namespace(self.server_settings)
        self.replicas = [Replica(self.namespace), Replica(self.namespace)]
        for replica in self.replicas:
            replica.catch_up()
        self.next_token = 1
        self.written = Counter()  # by anybody, to this data set
        self.unwritten = [Counter() for _ in self.replicas]  # by each replica
        self.is_behind = [False, False]  # its data set is gone, and it has not seen that

    def settle(self, number):
        """A replica writes what it has and reads what there is. If the data set is another one, what it had not
        written is gone too: it cannot tell what was purged."""
        if self.is_behind[number]:
            self.unwritten[number] = Counter()
            self.is_behind[number] = False
        self.replicas[number].catch_up()
        self.written += self.unwritten[number]
        self.unwritten[number] = Counter()

    def add(self, number, contexts):
        replica = self.replicas[number]
        before = replica.contents
        replica.learn(*contexts)
        self.unwritten[number] += replica.contents - before

    @rule(number=st.integers(0, 1), repeats=st.integers(1, 3))
    def learn(self, number, repeats):
        token = self.next_token
        self.next_token += 2
        for _ in range(repeats):
            self.add(number, [[token], [token, token + 1]])

    @rule(number=st.integers(0, 1))
    def catch_up(self, number):
        self.settle(number)
        assert self.replicas[number].contents == self.written

    @rule(number=st.integers(0, 1))
    def restart(self, number):
        """What it has not written is lost."""
        self.replicas[number] = Replica(self.namespace)
        self.unwritten[number] = Counter()
        self.is_behind[number] = False

    @rule(entries=st.integers(1, 3))
    def fold(self, entries):
        fold(self.namespace, fold_entries=entries)

    @rule()
    def a_compactor_dies_before_its_manifest_is_written(self):
        SoftCompactor(*self.namespace.open(), ORDER).prepare()
        self.namespace.redis.delete(self.namespace.keys.beside(area_of(ORDER)).lease)  # in time it runs out

    @rule()
    def purge(self):
        self.namespace.redis.set(self.namespace.keys.epoch, f"epoch {self.next_token} {time.monotonic_ns()}")
        self.everything_is_gone()

    @rule()
    def lose_everything(self):
        if names := self.namespace.names():
            self.namespace.redis.delete(*names)
        self.everything_is_gone()

    def everything_is_gone(self):
        for number, replica in enumerate(self.replicas):
            self.is_behind[number] = replica.exchange._feeds[replica.name].reader.epoch is not None
        self.written = Counter()

    @precondition(lambda self: hasattr(self, "namespace"))
    @invariant()
    def a_new_replica_knows_what_was_written(self):
        late = Replica(self.namespace)
        late.catch_up()
        assert late.contents == self.written
        assert late.exchange.stats.corrupt == 0

    def teardown(self):
        if hasattr(self, "namespace"):
            self.namespace.connection.close()


def test_any_history_adds_up_at_every_replica(machine_server):
    run_histories(History, machine_server, max_examples=12, steps=25)
