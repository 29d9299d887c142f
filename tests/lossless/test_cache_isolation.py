"""What a tenant is answered, and in which steps, with another tenant's shared cache cold and warm, in every policy.

Each history happens on a server of its own, in two processes' worth of engines: one in which both tenants have been
answered before, and one that begins with what lies in Redis, so that whatever it knows has come through the cache.
Rounds are told how long they last: steps are the same every time, and this needs no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from actors.models.loader import read_model_info
from actors.models.source import ModelSource
from cache_service.log.compactor import CompactorSettings
from cache_service.log.publisher import PublisherSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.offline.engine import LocalEngine
from cluster.router.trace import RoundTrace
from cluster.tenants.registry import Policy
from cluster.tenants.scope import Scope, Sharing, scope_of
from paceline_testing.cache_stores import until
from paceline_testing.tiny_models import save_tiny_model

SERVER_KEY = bytes(range(32))
SALT = "a salt that both of them know"
NEW_TOKENS = 32
PROBES = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm")]
OWN = PROBES[1:]  # what B itself has asked before: with this much it drafts in any case
WAYS = (
    {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS},
    {"temperature": 0.9, "seed": 7, "ignore_eos": True, "max_new_tokens": NEW_TOKENS},
)


@dataclass(frozen=True)
class Tenants:
    """What two tenants have agreed on. a, b: what is said of each beside its name."""

    a: tuple[Policy, str | None, str]  # policy, group, cache_salt
    b: tuple[Policy, str | None, str]

    def scope(self, name: str) -> Scope:
        policy, group, salt = self.a if name == "a" else self.b
        return scope_of(Sharing(name * 8, policy, group, SERVER_KEY), salt=salt)


APART = {
    "isolated": Tenants(("isolated", None, ""), ("isolated", None, "")),
    "isolated, with one salt": Tenants(("isolated", None, SALT), ("isolated", None, SALT)),
    "two groups": Tenants(("group", "one", ""), ("group", "other", "")),
    "groups by two salts": Tenants(("group", None, SALT), ("group", None, SALT + "!")),
    "a salt within a group": Tenants(("group", "one", ""), ("group", "one", SALT)),
    "shared and isolated": Tenants(("shared", None, ""), ("isolated", None, "")),
}
TOGETHER = {
    "one group": Tenants(("group", "one", ""), ("group", "one", "")),
    "a group by its salt": Tenants(("group", None, SALT), ("group", None, SALT)),
    "shared": Tenants(("shared", None, ""), ("shared", None, "")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, hidden_size=48, heads=4, kv_heads=2)


@contextmanager
def process(model: Path, server: EmbeddedServer, directory: Path) -> Iterator[tuple[LocalEngine, SharedCache]]:
    """An engine that knows nothing but what is stored."""
    settings = SharedCacheSettings(
        # No fold comes between two runs: what is drafted first of equals goes by the order in which it was said.
        publisher=PublisherSettings(flush_s=0.01),
        compactor=CompactorSettings(fold_every_s=3600),
    )
    settings = replace(settings, index=settings.index.model_copy(update={"directory": directory}))
    fingerprint = read_model_info(ModelSource("tiny", "tiny", model)).fingerprint
    cache = SharedCache(server.settings, fingerprint, settings=settings)
    try:
        yield LocalEngine(
            str(model), draft_model="none", drafters=("cache",), batch_size=1, device="cpu", exact="bitwise",
            kv_cache_tokens=2048, cache=cache, seconds_of_rows=lambda rows: 0.03 + 1e-6 * rows,
        ), cache  # fmt: skip
    finally:
        assert cache.close(20)
        assert cache.publisher.counters.faults == 0


@dataclass
class Steps:
    """B's probes: their texts, and what every round proposed, verified, accepted and emitted."""

    texts: list[list[int]] = field(default_factory=list)
    rounds: list[RoundTrace] = field(default_factory=list)

    def see(self, trace: RoundTrace) -> None:
        self.rounds.append(replace(trace, draft_s=0.0, verify_s=0.0))

    @property
    def num_accepted(self) -> int:
        return sum(trace.accepted.get("cache", 0) for trace in self.rounds)


def steps_of_b(model: Path, directory: Path, scope: Callable[[str], Scope], a_was_there: bool) -> Steps:
    steps = Steps()
    with EmbeddedServer(directory / "server") as server:
        with process(model, server, directory / "index") as (engine, cache):
            for way in WAYS:
                if a_was_there:  # the worst case: it has asked just what B will
                    engine.generate(PROBES, **way, namespace=scope("a").namespace)
                engine.generate(OWN, **way, namespace=scope("b").namespace)
            assert until(lambda: cache.publisher.queued_tokens == 0)
        with process(model, server, directory / "index") as (engine, cache):
            namespace = scope("b").namespace
            cache.follow([namespace])
            assert until(lambda: cache.index._followed[namespace].live.is_complete)
            for way in WAYS:
                said = engine.generate(PROBES, **way, namespace=namespace, cache="read", on_round=steps.see)
                steps.texts += [generation.token_ids for generation in said]
            assert engine.core.counters.drafter_errors == {}
    return steps


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Steps:
    """B's steps where A has never been. They are the same in every policy, but for the name of a namespace."""
    steps = steps_of_b(model, tmp_path_factory.mktemp("alone"), APART["isolated"].scope, a_was_there=False)
    assert steps.num_accepted > NEW_TOKENS / 2, "its own cache drafts for it, or this would prove little"
    return steps


@pytest.mark.parametrize("tenants", APART.values(), ids=APART)
def test_the_steps_are_the_same_with_the_other_ones_cache_warm(model, alone, tmp_path, tenants):
    assert steps_of_b(model, tmp_path, tenants.scope, a_was_there=True) == alone


@pytest.mark.parametrize("tenants", TOGETHER.values(), ids=TOGETHER)
def test_those_who_share_save_each_other_rounds_and_say_the_same(model, alone, tmp_path, tenants):
    warm = steps_of_b(model, tmp_path, tenants.scope, a_was_there=True)
    assert warm.texts == alone.texts
    assert warm.num_accepted > alone.num_accepted + NEW_TOKENS
    assert len(warm.rounds) < 0.7 * len(alone.rounds)


def test_it_would_show_if_the_namespace_were_left_out(model, alone, tmp_path):
    """The mutation: isolated tenants that are told to use one namespace."""
    tenants = APART["isolated"]
    steps = steps_of_b(model, tmp_path, lambda name: replace(tenants.scope(name), namespace="everybody"), True)
    assert steps != alone
    assert steps.texts == alone.texts
