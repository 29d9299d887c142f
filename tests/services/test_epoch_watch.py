"""A router hears of every purge of what it has learnt, within a second, and keeps nothing it would not hear of."""

import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest

from actors.drafters.registry import create_drafters
from cache_service.admin.administration import CacheAdministration
from cache_service.counts.soft_exchange import DELTA_BYTES
from cache_service.errors import SettingError
from cache_service.formats.purged_times import TimeRange
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.epoch_watch import EpochWatch, EpochWatchSettings
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.log.log_feed import LogFeed
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from paceline_testing.cache_stores import FINGERPRINT, piece, until
from paceline_testing.rounds import learning_core, serve, toy_info, toy_request
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 97
QUICK = {"look_s": 0.01, "retry_s": 0.01}


@pytest.fixture(params=["polled", "told"], autouse=True)
def is_told(request, monkeypatch):
    """Whether a feed tells of the epochs; else they are polled."""
    monkeypatch.setattr(sys.modules[__name__], "IS_TOLD", request.param == "told")


IS_TOLD = False


@contextmanager
def watching(namespace, **settings):
    feed = LogFeed(namespace.connection.settings) if IS_TOLD else None
    watch = EpochWatch(
        namespace.connection,
        lambda name: StoreKeys(FINGERPRINT, name),
        EpochWatchSettings(**QUICK | settings),
        feed,
    )
    try:
        yield watch
    finally:
        assert watch.close(20)
        assert feed is None or feed.close(20)
        assert watch._turns.num_faults == 0


def has_looked(namespace, watch, name):
    return until(lambda: watch._watched[name].epoch is not None)


def purge(namespace, times=TimeRange()):  # noqa: B008
    CacheAdministration(namespace.connection, namespace.ring).purge(namespace.keys, times)


def ended(watch):
    found = []
    assert until(lambda: found.extend(watch.ended()) or found)
    return found


@pytest.mark.parametrize("times", [TimeRange(), TimeRange(0, 5)], ids=["all", "some time"])
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "nothing was ever stored"])
def test_a_purge_is_heard_of_once_and_by_nobody_else(namespace, times, is_stored):
    mine, other = namespace.keys.namespace, namespace.keys.namespace + "-other"
    with watching(namespace) as watch:
        if is_stored:
            namespace.append(piece("a", 0, [1, 2, 3]))
        for name in (mine, other):
            watch.watch(name)
            assert has_looked(namespace, watch, name)
        namespace.append(piece("b", 0, [4]))
        purge(namespace, times)
        assert ended(watch) == [mine]
        namespace.append(piece("b", 1, [5]))
        looks = watch._watched[mine].epoch
        time.sleep(0.1)
        assert (watch.ended(), watch._watched[mine].epoch) == ((), looks)
        purge(namespace)
        assert ended(watch) == [mine]


def test_everybody_who_learns_in_a_process_hears_of_a_purge(namespace):
    mine = namespace.keys.namespace
    namespace.append(piece("a", 0, [1, 2, 3]))

    class Learner:
        pass

    one, other, gone = Learner(), Learner(), Learner()
    with watching(namespace) as watch:
        for learner in (one, other, gone):
            watch.watch(mine, learner)
        del gone, learner
        assert has_looked(namespace, watch, mine)
        purge(namespace)
        for learner in (one, other):
            assert until(lambda who=learner: watch.ended(who) == (mine,))
            assert watch.ended(learner) == ()
        assert len(watch._ended) == 2


def test_what_is_not_watched_any_more_has_ended(namespace):
    names = [f"{namespace.keys.namespace}-{number}" for number in range(4)]
    with watching(namespace, max_namespaces=3) as watch:
        for name in (*names[:3], names[0], names[3]):
            watch.watch(name)
        assert (ended(watch), watch.ended()) == ([names[1]], ())


def test_ever_new_salts_of_one_owner_end_no_watch_of_another(namespace):
    mine = namespace.keys.namespace
    restless = [f"restless{mine}-{number}" for number in range(10)]
    with watching(namespace, max_namespaces=3) as watch:
        for name in (mine, *restless):
            watch.watch(name)
        assert (watch.ended(), list(watch._watched)) == (tuple(restless[:8]), [mine, *restless[8:]])


def test_a_purge_between_the_beginning_of_a_watch_and_its_first_look_is_heard_of(namespace):
    mine = namespace.keys.namespace
    namespace.append(piece("a", 0, [1, 2, 3]))
    with watching(namespace) as watch:
        assert watch._turns.close(20)  # no look but those below
        watch.watch(mine)
        purge(namespace)
        watch._look()
        assert watch.ended() == (mine,)
        watch._look()
        assert watch.ended() == ()


def test_what_was_learnt_before_anybody_could_look_has_ended(server):
    cache = SharedCache(server.settings, "model", settings=SharedCacheSettings(epochs=EpochWatchSettings(**QUICK)))
    try:
        watch = cache.epochs
        watch._settings = EpochWatchSettings(**QUICK, first_look_s=0.05)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            watch.watch("a")
            time.sleep(0.2)
            assert watch.ended() == ()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert ended(watch) == ["a"]
    finally:
        cache.close(20)


def test_what_has_expired_and_nobody_uses_is_watched_no_more(namespace):
    unused, used = namespace.keys.namespace, namespace.keys.namespace + "-used"
    with watching(namespace) as watch:
        for name in (unused, used):
            watch.watch(name)
            assert has_looked(namespace, watch, name)
        watch._watched[unused].used -= 3600
        for name in (unused, used):
            namespace.redis.delete(StoreKeys(FINGERPRINT, name).epoch)  # as if its time were over
        found = set()
        assert until(lambda: found.update(watch.ended()) or len(found) == 2)
        assert list(watch._watched) == [used]
        assert namespace.names() == []
        watch.watch(unused)
        assert has_looked(namespace, watch, unused)


def test_no_possible_name_and_no_server_are_no_fault_of_the_caller(namespace):
    def refused(name):
        raise SettingError("namespace", name, "it has no possible name")

    watch = EpochWatch(namespace.connection, refused, EpochWatchSettings(**QUICK))
    watch.watch("{}")
    assert watch.ended() == ()
    assert watch.close(20)


class Router:
    def __init__(self, settings, directory):
        index = WarmIndexSettings(directory=directory, vocab_size=VOCAB_SIZE)
        self.cache = SharedCache(settings, "model", settings=SharedCacheSettings(index=index))
        drafters = create_drafters(
            ("token_recycling", "ngram_table", "lookahead", "soft_ngram"), delta_bytes=DELTA_BYTES
        )
        self.drafters = drafters
        self.sharing = self.cache.share_counts(drafters)
        shared = {"token_sink": self.cache, "soft_sharing": self.sharing}
        self.core = learning_core(toy_info(VOCAB_SIZE), drafters, **shared)
        self.target = ToyTarget(VOCAB_SIZE)

    def answer(self, namespace, **fields):
        self.core.add(toy_request(prompt=range(1, 9), namespace=namespace, **fields), 0.0)
        serve(self.core, self.target.verify, between=lambda: self.core.exchange(time.monotonic()))

    def knows(self, namespace):
        """Which drafters have anything of a namespace."""
        recycling, ngrams, lookahead, soft = self.drafters.values()
        has = {
            "token_recycling": namespace in recycling._namespaces,
            "ngram_table": namespace in ngrams._tables and ngrams._tables[namespace].num_ngrams > 0,
            "lookahead": any(scope == namespace for scope, _ in lookahead._kept._phrases),
            "soft_ngram": soft.table_of(namespace) is not None and len(soft.table_of(namespace)) > 0,
            "traffic": namespace in self.core._traffic._records,
        }
        return {name for name, is_known in has.items() if is_known}

    def close(self):
        self.sharing.exchange.close(20)
        self.cache.close(20)


@pytest.mark.parametrize("cache", ["read_write", "read", "off"])
def test_a_purge_reaches_whatever_the_process_has_learnt(server, tmp_path, cache):
    router = Router(server.settings, tmp_path / "index")
    try:
        for namespace in ("a", "b"):
            router.answer(namespace, cache=cache)
            assert router.knows(namespace) == {"token_recycling", "ngram_table", "lookahead", "soft_ngram", "traffic"}
        assert until(lambda: all(one.epoch for one in router.cache.epochs._watched.values()))
        connection = router.cache._connection
        CacheAdministration(connection).purge(StoreKeys("model", "a"))
        began = time.monotonic()
        assert until(lambda: router.core.exchange(time.monotonic()) or not router.knows("a"))
        print(f"forgotten after {time.monotonic() - began:.2f} s")
        assert len(router.knows("b")) == 5
        router.answer("a", cache=cache)
        assert len(router.knows("a")) == 5
    finally:
        router.close()
