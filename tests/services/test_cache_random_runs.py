"""Random histories of a namespace against plain Python: what readers know is what the store should hold.

The oracle keeps pieces in two places, the log and generations, and does with them what the design says.
"""

from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_service.admin.administration import CacheAdministration
from cache_service.errors import NamespaceUnknown
from cache_service.log.compactor import Compactor, CompactorSettings
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.log_feed import LogFeed
from cache_service.log.log_reader import LogReader, ReaderSettings
from paceline_testing.cache_stores import Documents, Namespace, catch_up, contents, piece, run_histories, until

GENERATION_S, MAX_GENERATIONS, SEGMENT_TOKENS = 100, 3, 16


class Oracle:
    """Plain lists. generations: number -> pieces, the last open; log: what is not folded yet."""

    def __init__(self):
        self.generations, self.log, self.started_s = {0: []}, [], None

    def copy(self):
        twin = Oracle()
        twin.generations = {number: list(pieces) for number, pieces in self.generations.items()}
        twin.log, twin.started_s = list(self.log), self.started_s
        return twin

    def fold(self, now_s):
        if not self.log:
            return
        number = max(self.generations)
        self.started_s = now_s if self.started_s is None else self.started_s
        self.generations[number] += self.log
        self.log = []
        if now_s - self.started_s >= GENERATION_S:
            self.generations[number + 1], self.started_s = [], None
        for old in [n for n in self.generations if n <= max(self.generations) - MAX_GENERATIONS]:
            del self.generations[old]

    @property
    def contents(self):
        return contents([*(p for pieces in self.generations.values() for p in pieces), *self.log])


class History(RuleBasedStateMachine):
    server_settings = None

    @initialize()
    def begin(self):
        self.namespace = Namespace(self.server_settings)
        self.oracle = Oracle()
        self.now_s = 1_000
        self.published, self.ends, self.backup = [], {}, None
        self.is_restored = False  # since the reader started
        self.listener = Documents()
        self.reader = self.namespace.reader(self.listener, read_entries=2)
        self.feed = LogFeed(self.server_settings)
        self.told = None
        self.told_reader_restarts()
        self.renew_compactor()

    def renew_compactor(self):
        limits = FoldLimits(segment_tokens=SEGMENT_TOKENS, generation_s=GENERATION_S, max_generations=MAX_GENERATIONS)
        self.compactor = Compactor(
            self.namespace.store, self.namespace.codec, CompactorSettings(limits=limits, lease_s=60), lambda: self.now_s
        )

    @rule(document=st.sampled_from("abc"), length=st.integers(1, 12))
    def append(self, document, length):
        offset = self.ends.get(document, 0)
        self.ends[document] = offset + length
        self.write(piece(document, offset, range(offset, offset + length), self.now_s))

    @rule(data=st.data())
    def duplicate(self, data):
        if self.published:
            self.write(data.draw(st.sampled_from(self.published)))

    @rule(document=st.sampled_from("abc"))
    def append_out_of_order(self, document):
        offset = self.ends.get(document, 0)
        self.ends[document] = offset + 4
        self.write(piece(document, offset + 2, [offset + 2, offset + 3], self.now_s))
        self.write(piece(document, offset, [offset, offset + 1], self.now_s))

    def write(self, part):
        self.namespace.append(part)
        self.published.append(part)
        self.oracle.log.append(part)

    @rule(seconds=st.sampled_from([0, 1, GENERATION_S]))
    def fold(self, seconds):
        self.now_s += seconds
        while self.compactor.fold():
            pass
        self.oracle.fold(self.now_s)

    @rule()
    def compactor_dies_before_its_manifest_is_written(self):
        self.compactor.prepare()
        self.namespace.redis.delete(self.namespace.keys.lease)  # in time it runs out
        self.renew_compactor()

    @rule()
    def compactor_comes_late(self):
        """It wakes up when another has taken over."""
        late = self.compactor.prepare()
        self.namespace.redis.delete(self.namespace.keys.lease)
        self.renew_compactor()
        self.fold(0)
        if late is not None:
            assert not Compactor(self.namespace.store, self.namespace.codec).commit(late)

    @rule()
    def save(self):
        self.backup = ({name: self.namespace.redis.dump(name) for name in self.namespace.names()}, self.oracle.copy())

    @rule()
    def restore(self):
        if self.backup is not None:
            self.lose_everything()
            values, oracle = self.backup
            for name, value in values.items():
                self.namespace.redis.restore(name, 0, value)
            self.oracle = oracle.copy()
            self.is_restored = self.told_is_restored = True
            self.namespace.redis.delete(self.namespace.keys.lease)

    @rule()
    def lose_everything(self):
        if names := self.namespace.names():
            self.namespace.redis.delete(*names)
        self.oracle = Oracle()

    @rule(is_folding=st.booleans())
    def purge(self, is_folding):
        """is_folding: a compactor is at work meanwhile."""
        late = self.compactor.prepare() if is_folding else None
        with suppress(NamespaceUnknown):
            CacheAdministration(self.namespace.connection).purge(self.namespace.keys)
        if late is not None:
            assert not self.compactor.commit(late)
        left = {name.rpartition(b"}:")[2] for name in self.namespace.names()}
        assert left <= {b"purges"}
        self.oracle = Oracle()
        self.renew_compactor()

    @rule()
    def nothing_is_left_of_what_is_purged_for_a_reader_that_was_there(self):
        self.purge(is_folding=False)
        self.reader_catches_up()

    @rule()
    def reader_restarts(self):
        self.listener = Documents()
        self.reader = self.namespace.reader(self.listener, read_entries=2)
        self.is_restored = False

    @rule()
    def reader_takes_a_step(self):
        self.reader.step()

    @rule()
    def reader_catches_up(self):
        catch_up(self.reader)
        known, wanted = self.listener.contents, self.oracle.contents
        # A reader that was there before a restore may keep what the restored data have lost, but misses nothing.
        assert tokens(wanted) <= tokens(known)
        assert tokens(known) <= tokens(contents(self.published))
        if not self.is_restored:
            assert known == wanted

    @rule()
    def told_reader_restarts(self):
        if self.told is not None:
            self.subscription.close()
        self.subscription = self.feed.follow(self.namespace.store, 2, 0.02, lambda: None)
        self.told = Documents()
        settings = ReaderSettings(read_entries=2)
        self.told_reader = LogReader(self.namespace.store, self.namespace.codec, self.told, settings, self.subscription)
        self.told_is_restored = False

    @rule()
    def told_reader_takes_a_step(self):
        self.told_reader.step()

    @rule()
    def told_reader_waits_for_news(self):
        """It is not asked to read until it is told."""

        def is_up_to_date():
            if not self.told_reader.is_current:
                self.told_reader.step()
            known, wanted = self.told.contents, self.oracle.contents
            return known == wanted or (self.told_is_restored and tokens(wanted) <= tokens(known))

        assert until(is_up_to_date, 20), (self.told.contents, self.oracle.contents)
        assert until(lambda: self.told_reader.step() or self.told_reader.is_current, 20)

    @invariant()
    def a_new_reader_finds_what_there_is(self):
        documents, counters = self.namespace.read(read_entries=3)
        assert documents.contents == self.oracle.contents
        assert not counters.corrupt_segments + counters.missing_segments + counters.corrupt_entries
        assert not counters.resets

    def teardown(self):
        if hasattr(self, "namespace"):
            assert self.feed.close(20)
            self.namespace.connection.close()


def tokens(documents):
    return {(*key[:2], key[2] + row, token) for key, run in documents.items() for row, token in enumerate(run)}


def test_any_history_leaves_readers_and_store_in_agreement(machine_server):
    run_histories(History, machine_server, max_examples=20, steps=30)
