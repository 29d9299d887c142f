"""The namespaces of a tenant share its budget, however many there are, and a purge leaves no list of them."""

from dataclasses import replace

from cache_service.admin.administration import CacheAdministration
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.compactor import Compactor
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.tenant_share import TenantBudget, TenantShare, tenant_key
from paceline_testing.cache_stores import FINGERPRINT, Namespace, piece

KEEP_S = 3600


def share(namespace, name, on_others=lambda others: None):
    budget = TenantBudget(namespace.keys.namespace, 10_000)
    keys = StoreKeys(FINGERPRINT, name)
    return TenantShare(namespace.connection, keys, budget, FoldLimits(), KEEP_S, on_others)


def test_very_many_namespaces_are_counted_and_told_some_at_a_time(namespace):
    names = [f"{namespace.keys.namespace}-{number}" for number in range(100)]
    for count, name in enumerate(names, 1):
        assert share(namespace, name)(True).max_bytes == 10_000 // count
    assert share(namespace, "another")(False).max_bytes == 10_000 // 101, "what is folded counts, listed or not"
    told, most = set(), 0

    def note(others):
        nonlocal most
        told.update(others)
        most = max(most, len(others))

    for _ in range(1000):
        assert share(namespace, names[0], note)(False).max_bytes == 100
    assert told == set(names[1:])
    assert most <= 16


def test_a_purge_leaves_no_list_of_a_tenants_namespaces(namespace):
    mine, other = namespace.keys.namespace, f"{namespace.keys.namespace}.private-name"
    for name in (mine, other):
        share(namespace, name)(True)
    listed = tenant_key(FINGERPRINT, mine)
    administration = CacheAdministration(namespace.connection, namespace.ring)
    namespace.append(piece("a", 0, [1, 2, 3]))
    administration.purge(namespace.keys)
    assert namespace.redis.zrange(listed, 0, -1) == [other.encode()]
    keys = StoreKeys(FINGERPRINT, other)
    namespace.open(other)[0].begin_epoch()
    administration.purge(keys)
    assert not namespace.redis.exists(listed)
    assert share(namespace, mine)(False).max_bytes == 10_000


def test_a_namespace_is_folded_where_nothing_but_its_own_keys_may_be_touched(namespace):
    rights = (f"~{namespace.keys.key('*')}", "+@all")
    namespace.redis.execute_command("ACL", "SETUSER", "narrow", "reset", "on", ">pass", *rights)
    settings = replace(namespace.connection.settings, username="narrow", password="pass")
    narrow = Namespace(settings, namespace.keys.namespace)
    namespace.append(piece("a", 0, [1, 2, 3]))
    limits = share(narrow, namespace.keys.namespace)
    compactor = Compactor(narrow.store, narrow.codec, limits=limits)
    compactor.fold()
    assert compactor.counters.folds == 1
    assert limits(True).max_bytes == 10_000
