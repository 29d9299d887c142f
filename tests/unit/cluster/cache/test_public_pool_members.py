"""Who feeds the public pool, by what has changed in the registry."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.models.source import ModelSource
from cluster.cache.promotion import PromotionSource, PublicPool, terms_of
from cluster.config import PromotionConfig
from cluster.tenants.registry import Registry, StoredTenant, TenantLimits, now_utc

POOL = PromotionSource(Path("none"), ModelSource(spec="m", name="m", path=Path("none")), PromotionConfig())
TENANT = StoredTenant(id="00000000", name="t", created=now_utc())
KINDS = [
    {"policy": "promoted"},
    {"policy": "promoted", "disabled": True},
    {"policy": "promoted", "limits": TenantLimits(cache_bytes=0)},
    {"policy": "isolated"},
    None,
]


def tenant(number, kind):
    return None if kind is None else replace(TENANT, id=f"{number:08x}", name=f"t{number}", **kind)


steps = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 5), st.sampled_from(KINDS), max_size=3), st.booleans(), st.booleans()),
    max_size=12,
)


@settings(max_examples=60)
@given(steps)
def test_members_by_change_are_those_of_the_whole_registry(changes):
    """Registries are also missed, or read anew with another key."""
    pool, registry = PublicPool(POOL, lambda: None), Registry()
    for changed, is_missed, is_new in changes:
        registry = registry.changed({f"{number:08x}": tenant(number, kind) for number, kind in changed.items()})
        if is_new:
            registry = Registry(registry.tenants)
        if not is_missed:
            assert pool._terms_of(registry) == terms_of(registry, POOL.config)
            pool._registry = registry
