"""The public pool as a cluster has it: the registry says who feeds it, administrators take out of it, metrics and
statistics tell of it, and what looks sensitive never gets in."""

import json
import pickle
import sys
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from pydantic import ValidationError

from actors.models.loader import load_tokenizer
from actors.models.source import ModelSource
from cache_service.admin.administration import CacheAdministration
from cache_service.formats.documents import document_id_of
from cache_service.formats.namespaces import PUBLIC
from cache_service.promotion.promotion_gate import MAX_TEXT_TOKENS, PromotionGate, nothing_blocked
from cache_service.promotion.promotion_policy import PromotionPolicy
from cache_service.store.connection import ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.admin.names import Names
from cluster.cache.admin.service import CacheAdminService, NamespaceQuery
from cluster.cache.promotion import PromotionSource, organisation_of, sensitive_spans, terms_of
from cluster.cache.shared_cache import SharedCache, open_shared_cache
from cluster.cli import main as cli
from cluster.config import CacheConfig, ClusterConfig, PromotionConfig, load_config
from cluster.errors import ConfigError
from cluster.router.metrics import cache_metrics
from cluster.serve import plan_cluster
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.registry import Registry, StoredTenant
from cluster.tenants.registry_file import read_registry, write_registry
from paceline_testing.cache_stores import Namespace, until
from paceline_testing.other_vocabularies import merging_tokenizer, sentence_piece_tokenizer
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

K = 5
CONFIG = PromotionConfig(min_tenants=K, min_age_s=0, release_every_s=1, never=("Project Hush",))
SAID = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families. "
)
SECRETS = {
    "mail": "Ask jane.doe@example.com about it.",
    "key": "The key is sk-abcdefghijkl1234567890 as ever.",
    "number": "Call +44 20 7946 0958 at noon.",
    "password": "Say password: swordfish at the gate.",
    "phrase": "We never speak of project hush here.",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelSource("tiny", "tiny", save_tiny_model(tmp_path_factory.mktemp("model")))


def ids(text):
    return list(make_byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


class Cluster:
    """A registry of K promoted tenants, and a router's cache."""

    def __init__(self, home, server, model):
        self.home, self.server = home, server
        self.file = home / "tenants.json"
        names = [f"t{number}" for number in range(K)]
        tenants = [
            StoredTenant(id=f"{number:08x}", name=name, created=datetime.now(UTC), policy="promoted")
            for number, name in enumerate(names)
        ]
        home.mkdir(exist_ok=True)
        write_registry(self.file, Registry(tenants=tuple(tenants)))
        self.cache = SharedCache(
            server.settings, "model", promotion=PromotionSource(self.file, model, CONFIG, poll_s=0.01)
        )
        self.namespace = Namespace(server.settings)

    @property
    def registry(self):
        return read_registry(self.file)

    def say(self, text, numbers=range(K)):
        for number in numbers:
            self.cache.answered(organisation_of(self.registry, f"{number:08x}"), np.array(ids(text), np.int32))
        assert until(lambda: self.cache.stats().promotion.queued_texts == 0)

    def public(self):
        terms = terms_of(self.registry, CONFIG)
        found = PromotionGate(*self.cache._open(PUBLIC), terms.secret, nothing_blocked, terms.policy).public()
        return {make_byte_tokenizer().decode(list(phrase)) for phrase in found}

    def service(self):
        administration = CacheAdministration(self.namespace.connection)
        return CacheAdminService(administration, lambda: None, lambda: Names(self.registry), CONFIG)

    def close(self):
        assert self.cache.close(20)
        assert self.cache._promotion._turns.num_faults == 0


@pytest.fixture
def cluster(tmp_path, model):
    with EmbeddedServer(tmp_path / "home" / "cache") as server:
        cluster = Cluster(tmp_path / "home", server, model)
        yield cluster
        cluster.close()


@pytest.fixture
def run(monkeypatch, capfd, cluster):
    """`paceline` with the cluster's home: (exit status, stdout, stderr)."""
    monkeypatch.setenv("PACELINE_HOME", str(cluster.home))

    def call(*arguments):
        promotion = [f"--set=cache.promotion.{name}={getattr(CONFIG, name)}" for name in ("min_tenants", "min_age_s")]
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments, *promotion])
        status = 0
        try:
            cli.main()
        except SystemExit as exit:
            status = exit.code or 0
        return status, *capfd.readouterr()

    return call


def test_what_looks_sensitive_never_becomes_public(cluster):
    cluster.say(SAID + " ".join(SECRETS.values()) + " " + SAID)
    assert until(lambda: len(cluster.public()) > 10)
    time.sleep(1.1)  # another batch
    spans = (
        "jane.doe@example.com",
        "sk-abcdefghijkl1234567890",
        "+44 20 7946 0958",
        "password: swordfish",
        "project hush",
    )
    parts = {span[begin : begin + 4] for span in spans for begin in range(len(span) - 3)}
    assert not [phrase for phrase in cluster.public() for part in parts if part in phrase]


@pytest.mark.parametrize("make", [make_byte_tokenizer, merging_tokenizer, sentence_piece_tokenizer])
@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_the_filter_reads_every_kind_of_vocabulary(make, secret, tmp_path):
    source = ModelSource("tiny", "tiny", save_tiny_model(tmp_path, tokenizer=make()))
    blocks = sensitive_spans(source, CONFIG.never)
    token_ids = load_tokenizer(source)(f"the cat and {secret} the dog", add_special_tokens=False)["input_ids"]
    table = blocks.piece_of
    blocked = blocks(token_ids)
    left = b"".join(table(token) for token, bad in zip(token_ids, blocked, strict=True) if not bad)
    hidden = {"jane.doe@example.com", "sk-abcdefghijkl1234567890", "7946", "swordfish", "project hush"}
    (word,) = [word for word in hidden if word in secret]
    assert not blocked.all()
    assert word.encode() not in left
    assert word.encode() in b"".join(map(table, token_ids))


def test_the_filter_reads_the_demo_models_tokens(smollm2_dir):
    source = ModelSource("smollm2", "smollm2", smollm2_dir)
    blocks = sensitive_spans(source)
    tokenizer = load_tokenizer(source)
    for text, wanted in (("Write to jane.doe@example.com soon.", "Write to"), (SAID, SAID)):
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        left = [token for token, bad in zip(token_ids, blocks(token_ids), strict=True) if not bad]
        assert tokenizer.decode(left).startswith(wanted)
        assert "jane" not in tokenizer.decode(left)
    assert blocks([10**6]).tolist() == [True], "no token that the tokenizer knows"


def test_of_a_text_that_is_cut_the_end_is_left_out(cluster):
    long = (SAID * (1 + MAX_TEXT_TOKENS // len(SAID)))[:MAX_TEXT_TOKENS]
    cut = long[:-16] + "The key is sk-ab" + "cdefghijkl1234567890"
    cluster.say(cut)
    assert until(lambda: len(cluster.public()) > 10)
    assert not [phrase for phrase in cluster.public() if "sk-" in phrase]


def test_nobody_but_members_is_counted(cluster):
    cluster.say(SAID, range(K - 1))
    stranger = organisation_of(cluster.registry, "ffffffff")
    cluster.cache.answered(stranger, np.array(ids(SAID), np.int32))
    time.sleep(1.5)  # a batch at least
    assert cluster.public() == set()
    assert cluster.cache.stats().promotion.dropped_texts == 1


def commands(name):
    return {
        "policy": ("tenant", "set", name, "--policy", "isolated"),
        "disabled": ("tenant", "set", name, "--disabled"),
        "no bytes": ("tenant", "set", name, "--cache-bytes", "0"),
        "removed": ("tenant", "remove", name),
        "purged": ("cache", "purge", "--tenant", name, "--yes"),
    }


@pytest.mark.parametrize("how", commands(""))
def test_a_command_takes_a_tenants_support_out_of_the_pool_before_it_ends(cluster, run, how):
    """Without a router: the command alone does it."""
    cluster.say(SAID)
    assert until(lambda: len(cluster.public()) > 10)
    assert cluster.cache._promotion.close(20)
    status, _, err = run(*commands("t0")[how])
    assert status == 0, err
    assert cluster.public() == set()
    assert ("no longer is" in err) == (how != "purged")


def test_a_purge_leaves_not_even_hashes_of_what_a_tenant_has_said(cluster):
    def supporters():
        redis = cluster.namespace.redis
        keys = redis.scan_iter("sd:{model:public}:gate:supporters:*")
        return {tenant for key in keys for tenant in redis.zrange(key, 0, -1)}

    cluster.say(SAID)
    assert until(lambda: len(supporters()) == K)
    cluster.service().purge(NamespaceQuery(tenant="t0"))
    assert len(supporters()) == K - 1
    terms = terms_of(cluster.registry, CONFIG)
    gate = PromotionGate(*cluster.cache._open(PUBLIC), terms.secret, nothing_blocked, terms.policy)
    own = organisation_of(cluster.registry, "00000000")
    gate.offer(own, [(1, 2, 3, 4)], age_s=60.0)  # that has waited in a queue since before the purge
    assert len(supporters()) == K - 1
    time.sleep(1.1)
    gate.offer(own, [(1, 2, 3, 4)])
    assert len(supporters()) == K


def test_a_purge_of_its_namespace_or_of_one_that_has_been_removed_does_so_too(cluster):
    own = organisation_of(cluster.registry, "00000000")
    cluster.cache.committed(own, document_id_of("d"), 0, [1, 2, 3])
    assert until(lambda: own in [each.namespace for each in cluster.service().namespaces()])
    for query in (NamespaceQuery(namespace=own), NamespaceQuery(tenant="00000000")):
        if query.tenant:
            time.sleep(2.1)  # only what is said later than the first purge counts
        cluster.say(SAID)
        assert until(lambda: len(cluster.public()) > 10)
        if query.tenant:
            TenantAdministration(cluster.file).remove("t0")
        cluster.service().purge(query)
        assert cluster.public() == set()


@pytest.mark.parametrize("how", ["leaves and returns", "is purged"])
def test_a_tenant_that_comes_back_counts_with_what_it_says_then(cluster, run, how):
    cluster.say(SAID)
    assert until(lambda: len(cluster.public()) > 10)
    if how == "is purged":
        cluster.service().purge(NamespaceQuery(tenant="t0"))
        assert cluster.public() == set()
    else:
        assert run("tenant", "set", "t0", "--policy", "isolated")[0] == 0
        assert run("tenant", "set", "t0", "--policy", "promoted")[0] == 0
    members = terms_of(cluster.registry, CONFIG).members
    time.sleep(2.5)
    assert cluster.public() == set()
    assert until(lambda: cluster.cache._promotion._members == members)
    cluster.say(SAID, [0])
    assert until(lambda: len(cluster.public()) > 10)


def test_without_a_server_a_tenant_is_changed_and_the_command_says_what_is_left_to_do(cluster, run):
    status, _, err = run("tenant", "set", "t0", "--disabled", "--set", "cache.url=redis://127.0.0.1:1")
    assert status == 0
    assert "the public pool could not be told" in err
    assert cluster.registry.tenants[-1].disabled


def test_statistics_and_metrics_tell_of_the_pool(cluster, run):
    cluster.say(SAID)
    assert until(lambda: len(cluster.public()) > 10)
    status, out, err = run("cache", "stats", "--namespace", PUBLIC, "--json")
    assert status == 0, err
    (stats,) = json.loads(out)
    assert stats["phrases"] == stats["documents"] == len(cluster.public())
    assert (stats["generations"], stats["segments"], stats["log_entries"], stats["unread"]) == (1, 1, 0, 0)
    assert run("cache", "verify", "--namespace", PUBLIC)[0] == 0
    assert until(lambda: cluster.cache.stats().promotion.counters.batches > 0)
    values = {sample.name: sample for metric in cache_metrics(cluster.cache.stats()) for sample in metric.samples}
    told = {name: sample.value for name, sample in values.items() if name.startswith("paceline_cache_promotion_")}
    assert told["paceline_cache_promotion_kept_phrases_total"] == len(cluster.public())
    assert told["paceline_cache_promotion_offered_phrases_total"] >= K * len(cluster.public())
    assert told["paceline_cache_promotion_batches_total"] >= 1
    assert told["paceline_cache_promotion_failures_total"] == 0
    assert told["paceline_cache_promotion_queued_answers"] == 0
    assert not any(sample.labels for sample in values.values() if sample.name in told)


def test_counts_are_told_with_a_batch_and_not_before(tmp_path, model):
    """Or one who has all supporters but one could see when the last one comes."""
    clock = [1_000_000.0]
    with EmbeddedServer(tmp_path / "server") as server:
        cluster = Cluster(tmp_path / "home", server, model)
        cluster.close()
        config = CONFIG.model_copy(update={"release_every_s": 60})
        source = PromotionSource(cluster.file, model, config, clock=lambda: clock[0], poll_s=0.01)
        cluster.cache = SharedCache(server.settings, "model", promotion=source)
        cluster.say(SAID)
        thread = cluster.cache._promotion
        assert until(lambda: thread._gate.counters.kept > 10)
        assert cluster.cache.stats().promotion.counters.offered == 0
        clock[0] += 60
        assert until(lambda: cluster.cache.stats().promotion.counters.kept > 10)
        cluster.close()


def test_nothing_is_promoted_without_tenants_or_where_it_is_off(tmp_path, model):
    with EmbeddedServer(tmp_path / "server") as server:
        config = CacheConfig(url=server.url, password_file=server.password_file)
        source = PromotionSource(tmp_path / "tenants.json", model, CONFIG, poll_s=0.01)
        cache = open_shared_cache(config, "model", 259, source)
        cache.answered("somebody", np.array(ids(SAID), np.int32))
        time.sleep(0.3)
        assert cache._promotion._gate is None
        assert cache.close(20)
        off = open_shared_cache(config, "model", 259)
        off.answered("somebody", np.array(ids(SAID), np.int32))
        assert off.stats().promotion is None
        assert off.close(20)


def test_an_unreachable_server_and_a_tokenizer_without_bytes_cost_nothing_but_promotion(tmp_path, model, caplog):
    nowhere = ConnectionSettings("redis://127.0.0.1:1", connect_timeout_s=0.1)
    file = tmp_path / "tenants.json"
    TenantAdministration(file).add("a", {"policy": "promoted"})
    cache = SharedCache(nowhere, "model", promotion=PromotionSource(file, model, CONFIG, poll_s=0.01))
    cache.answered("somebody", np.array([1, 2, 3], np.int32))
    assert until(lambda: cache.stats().promotion.failures > 0)
    assert cache.close(20)
    broken = ModelSource("none", "none", tmp_path / "no model")
    cache = SharedCache(nowhere, "model", promotion=PromotionSource(file, broken, CONFIG, poll_s=0.01))
    assert until(lambda: "nothing is promoted here" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("nothing is promoted here") == 1
    assert cache.close(20)


def test_the_secret_is_not_the_servers_key_and_is_nowhere_to_be_seen():
    registry = Registry()
    terms = terms_of(registry, CONFIG)
    assert terms.secret != bytes.fromhex(registry.server_key)
    assert terms.secret != terms_of(Registry(), CONFIG).secret
    assert terms.secret == terms_of(registry, CONFIG).secret
    assert repr(terms.secret) not in repr(terms)


def test_the_configuration_has_the_rules_of_the_gate():
    assert PromotionPolicy().model_dump().items() <= PromotionConfig().model_dump().items()
    for field, value in {"min_tenants": 4, "max_tokens": 17, "release_every_s": 0, "window_s": 59}.items():
        with pytest.raises(ValidationError, match=field):
            PromotionPolicy(**{field: value})
        with pytest.raises(ConfigError, match=field):
            load_config(None, [f"cache.promotion.{field}={value}"])


def test_a_router_is_sent_where_to_look_and_no_secret(model, tmp_path):
    source = PromotionSource(tmp_path / "tenants.json", model, CONFIG)
    TenantAdministration(source.registry_file).add("a", {"policy": "promoted"})
    sent = pickle.dumps(source)
    assert pickle.loads(sent) == source
    server_key = read_registry(source.registry_file).server_key
    assert server_key.encode() not in sent
    assert bytes.fromhex(server_key) not in sent


def test_a_plan_says_whether_promoted_tenants_share(model, tmp_path):
    for enabled in (True, False):
        config = ClusterConfig.model_validate(
            {
                "target": {"model": str(model.path)},
                "draft": {"model": "none"},
                "cache": {"promotion": {"enabled": enabled}},
            }
        )
        assert plan_cluster(config, tmp_path).access.allow_promoted == enabled
