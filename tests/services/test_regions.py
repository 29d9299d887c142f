"""Two clusters with a Redis each and a directory between them: what the one has promoted and what its group has learnt
is drafted from in the other, until it is purged."""

from contextlib import ExitStack
from datetime import UTC, datetime

import numpy as np
import pytest

from actors.drafters.cache import CacheDrafter
from actors.drafters.contract import DraftContext
from actors.messages import SamplingParams
from actors.models.source import ModelSource
from cache_service.admin.administration import CacheAdministration
from cache_service.errors import SettingError
from cache_service.formats.documents import document_id_of
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.namespaces import PUBLIC, imported
from cache_service.log.compactor import CompactorSettings
from cache_service.log.publisher import PublisherSettings
from cache_service.store.connection import Connection
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.admin.names import Names
from cluster.cache.admin.service import CacheAdminService, NamespaceQuery
from cluster.cache.promotion import PromotionSource, organisation_of
from cluster.cache.regions import RegionsSource, storage_options
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.config import PromotionConfig, RegionsConfig
from cluster.router.metrics import cache_metrics
from cluster.tenants.registry import Registry, StoredTenant
from cluster.tenants.registry_file import read_registry, write_registry
from cluster.tenants.scope import Sharing, scope_of
from paceline_testing.cache_stores import until
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

K = 5
PROMOTION = PromotionConfig(min_tenants=K, min_age_s=0, release_every_s=1)
OF_THE_GROUP = [*range(100, 140)]
RING = KeyRing({1: bytes(range(32))})
SAID = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families. "
)


def ids(text):
    return list(make_byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


class Cluster:
    """Its Redis, its own registry of tenants, and a router's cache."""

    def __init__(self, name, home, url, model, stack):
        home.mkdir()
        self.server = stack.enter_context(EmbeddedServer(home / "cache"))
        self.file = home / "tenants.json"
        tenants = [
            StoredTenant(id=f"{number:08x}", name=f"t{number}", created=datetime.now(UTC), policy="promoted")
            for number in range(K)
        ]
        member = StoredTenant(id="a" * 8, name="member", created=datetime.now(UTC), policy="group", group="research")
        loner = StoredTenant(id="b" * 8, name="loner", created=datetime.now(UTC))
        write_registry(self.file, Registry((*tenants, member, loner)))
        config = RegionsConfig(url=url, cluster=name, interval_s=0.1, max_mb=16)
        self.cache = SharedCache(
            self.server.settings,
            "model",
            RING,
            SharedCacheSettings(
                publisher=PublisherSettings(flush_s=0.01), compactor=CompactorSettings(fold_every_s=0.05)
            ),
            promotion=PromotionSource(self.file, model, PROMOTION, poll_s=0.01),
            regions=RegionsSource(self.file, model, config, PROMOTION),
        )
        stack.callback(self.close)
        self.drafter = CacheDrafter(self.cache.index)
        self.number = 0

    @property
    def registry(self):
        return read_registry(self.file)

    def scope(self, tenant):
        stored = next(each for each in self.registry.tenants if each.name == tenant)
        key = bytes.fromhex(self.registry.server_key)
        return scope_of(Sharing(stored.id, stored.policy, stored.group, key, has_regions=True))

    def commit(self, tenant, tokens):
        self.number += 1
        tokens = np.array(tokens, np.int32)
        self.cache.committed(self.scope(tenant).namespace, document_id_of(f"{self.number}"), 0, tokens)

    def say(self, text):
        for number in range(K):
            self.cache.answered(organisation_of(self.registry, f"{number:08x}"), np.array(ids(text), np.int32))

    def drafts(self, tenant, tokens):
        """Whether a request of the tenant gets a draft after these tokens."""
        scope, array = self.scope(tenant), np.array(tokens, np.int32)
        array.flags.writeable = False
        self.number += 1
        context = DraftContext(
            self.number, array, 0, 1, 16, SamplingParams(seed=1), scope.namespace, readable=scope.readable
        )
        (tree,) = self.drafter.propose([context])
        self.drafter.forget(self.number)
        return len(tree) > 0

    def service(self):
        administration = CacheAdministration(Connection(self.server.settings), RING)
        return CacheAdminService(administration, lambda: None, lambda: Names(self.registry), PROMOTION)

    def close(self):
        assert self.cache.close(20)
        assert self.cache._regions._turns.num_faults == 0


@pytest.fixture
def clusters(tmp_path):
    """Two of them, and the directory between them."""
    model = ModelSource("tiny", "tiny", save_tiny_model(tmp_path / "model"))
    shared = tmp_path / "between"
    with ExitStack() as stack:
        names = ("asia", "europe")
        yield *(Cluster(name, tmp_path / name, shared.as_uri(), model, stack) for name in names), shared


def test_what_one_cluster_shares_the_other_drafts_from_until_it_is_purged(clusters):
    asia, europe, shared = clusters
    asia.commit("member", OF_THE_GROUP)
    asia.commit("loner", [*range(200, 240)])
    asia.say(SAID)
    phrase = ids("truth universally acknowledged")
    assert until(lambda: europe.drafts("member", OF_THE_GROUP[:8]))
    assert until(lambda: any(europe.drafts("t0", phrase[begin : begin + 6]) for begin in range(12)))
    assert not europe.drafts("member", phrase[:8])
    assert not europe.drafts("loner", [*range(200, 208)])
    assert not europe.drafts("loner", OF_THE_GROUP[:8])
    stored = [path.read_bytes() for path in shared.rglob("*") if path.is_file()]
    assert stored
    assert not any(b"research" in data for data in stored)

    (own, other) = europe.service().regions()
    assert (own.cluster, own.is_own, other.cluster, other.is_own) == ("europe", True, "asia", False)
    assert own.segments == 0 < other.segments == other.imported_segments
    assert other.age_s < 60
    metrics = {one.name: one.samples[0].value for one in cache_metrics(europe.cache.stats())}
    assert metrics["paceline_cache_regions_segments"] == other.segments
    assert metrics["paceline_cache_regions_rejected_objects"] == 0
    listed = {each.namespace for each in europe.service().namespaces()}
    assert {imported(PUBLIC), imported(europe.scope("member").namespace)} == listed
    assert not [each.problems for each in map(europe.service().verify, map(NamespaceQuery, listed)) if each.problems]

    asia.service().purge(NamespaceQuery(asia.scope("member").namespace))
    assert until(lambda: not europe.drafts("member", OF_THE_GROUP[:8]))
    assert until(lambda: sum(1 for path in shared.rglob("*") if len(path.name) == 64) == 1)  # the public pool


def test_a_purge_of_what_was_imported_lasts_and_an_outage_of_the_store_harms_nobody(clusters):
    asia, europe, shared = clusters
    asia.commit("member", OF_THE_GROUP)
    assert until(lambda: europe.drafts("member", OF_THE_GROUP[:8]))
    shared.rename(shared.with_name("elsewhere"))
    shared.write_text("no directory")
    failures = europe.cache.stats().regions.counters.failures
    assert until(lambda: europe.cache.stats().regions.counters.failures > failures + 1)
    assert europe.drafts("member", OF_THE_GROUP[:8])
    shared.unlink()
    shared.with_name("elsewhere").rename(shared)
    namespace = europe.scope("member").namespace
    done = europe.service().purge(NamespaceQuery(namespace))
    assert [each.namespace for each in done] == [imported(namespace)]
    exchanges = europe.cache.stats().regions.counters.exchanges
    assert until(lambda: europe.cache.stats().regions.counters.exchanges > exchanges + 2)
    assert not europe.drafts("member", OF_THE_GROUP[:8])
    assert until(lambda: asia.drafts("member", OF_THE_GROUP[:8]))  # it is its origin's


def test_options_of_the_file_system_are_read_and_never_shown(tmp_path, monkeypatch):
    file = tmp_path / "options.json"
    file.write_text('{"key": "k", "secret": "hidden"}')
    assert storage_options(RegionsConfig(options_file=file)) == {"key": "k", "secret": "hidden"}
    monkeypatch.setenv("PACELINE_REGIONS_OPTIONS", '["hidden"]')
    with pytest.raises(SettingError, match="JSON") as told:
        storage_options(RegionsConfig())
    assert "hidden" not in str(told.value)
