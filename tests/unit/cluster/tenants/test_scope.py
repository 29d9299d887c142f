"""What a request may draw on, by its tenant's policy and its own wishes."""

import itertools
from dataclasses import replace

import pytest

from actors.errors import InvalidRequest
from cache_service.errors import SettingError
from cache_service.formats.namespaces import OPEN, PUBLIC, belongs_to, imported, named, namespace_of, owner_of, salted
from cache_service.formats.store_keys import StoreKeys
from cluster.tenants.scope import Sharing, scope_of

KEY = bytes(range(32))
SALT = "a salt that nobody else knows"


def sharing(tenant, policy="isolated", group=None, **fields):
    return Sharing(tenant, policy, group, KEY, **fields)


EVERY_KIND = {
    "open": None,
    "a": sharing("a"),
    "b": sharing("b"),
    "group": sharing("c", "group", "g"),
    "another group": sharing("c", "group", "h"),
    "promoted": sharing("d", "promoted"),
    "shared": sharing("e", "shared"),
}


def test_no_two_namespaces_are_the_same_and_redis_takes_all_of_them():
    found = {}
    for (kind, one), salt, name in itertools.product(EVERY_KIND.items(), ("", "s", "t", SALT), ("", "s", "t")):
        scope = scope_of(one, salt=salt, name=name)
        assert scope.namespace not in found, (kind, salt, name, found.get(scope.namespace))
        found[scope.namespace] = kind, salt, name
        for namespace in (scope.namespace, *scope.readable):
            StoreKeys("f" * 64, namespace)
    assert PUBLIC not in found


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_answers_with_a_grammar_are_learnt_apart_and_share_prefix_blocks_with_all(kind):
    one = EVERY_KIND[kind]
    free, first, other = scope_of(one), scope_of(one, grammar="start: /a/"), scope_of(one, grammar="start: /b/")
    assert len({free.namespace, first.namespace, other.namespace}) == 3
    assert free.prefix_namespace == first.prefix_namespace == other.prefix_namespace == free.namespace
    assert first.readable[0] == free.namespace
    assert belongs_to(first.namespace, owner_of(free.namespace))
    assert first.promotes == free.promotes
    StoreKeys("f" * 64, first.namespace)
    assert scope_of(one, name="mine", grammar="start: /a/") == scope_of(one, name="mine")
    assert scope_of(one, salt=SALT, grammar="start: /a/").prefix_namespace == scope_of(one, salt=SALT).namespace


def test_members_of_a_group_meet_where_the_same_grammar_is_followed():
    ours, theirs = (scope_of(sharing(tenant, "group", "g"), grammar="start: /a/") for tenant in "xy")
    assert ours == theirs
    assert scope_of(sharing("x"), grammar="g").namespace != scope_of(sharing("y"), grammar="g").namespace


def test_a_group_and_the_shared_policy_meet_in_one_namespace_and_isolated_tenants_never():
    assert scope_of(sharing("x", "group", "g")) == scope_of(sharing("y", "group", "g"))
    assert scope_of(sharing("x", "group", "g"), salt="s") == scope_of(sharing("y", "group", "g"), salt="s")
    assert scope_of(sharing("x", "shared")) == scope_of(sharing("y", "shared"))
    assert scope_of(sharing("x"), salt=SALT).namespace != scope_of(sharing("y"), salt=SALT).namespace
    assert scope_of(sharing("x")) != scope_of(Sharing("x", "isolated", None, bytes(32)))  # of another cluster


def test_tenants_of_policy_group_without_a_group_meet_by_a_salt_that_cannot_be_guessed():
    x, y = sharing("x", "group"), sharing("y", "group")
    assert scope_of(x, salt=SALT) == scope_of(y, salt=SALT)
    assert scope_of(x, salt=SALT).has_company
    assert scope_of(x).namespace != scope_of(y).namespace
    assert scope_of(x) == scope_of(sharing("x"))  # without one it is alone
    assert scope_of(x, salt=SALT).namespace != scope_of(sharing("x"), salt=SALT).namespace
    with pytest.raises(InvalidRequest, match="cache_salt is 6 characters; it must have at least 16") as caught:
        scope_of(x, salt="pepper")
    assert "pepper" not in str(caught.value)


def test_what_is_readable_beside_the_namespace():
    own = scope_of(sharing("x")).namespace
    assert scope_of(sharing("x")).readable == ()
    assert scope_of(sharing("x"), name="docs").readable == (own,)
    assert scope_of(sharing("x"), name="docs").namespace == f"{own}.docs"
    assert scope_of(sharing("x"), salt="s").readable == ()  # or the salt would keep nothing apart
    promoted = scope_of(sharing("x", "promoted"))
    assert (promoted.namespace, promoted.readable) == (own, (PUBLIC,))  # it feeds the pool through the gate alone
    assert scope_of(sharing("x", "promoted"), name="docs").readable == (own, PUBLIC)
    assert scope_of(None, name="docs") == scope_of(None, name="docs", cache="read_write")
    assert scope_of(None).namespace == OPEN
    assert (scope_of(None, name="docs").namespace, scope_of(None, name="docs").readable) == ("open.docs", (OPEN,))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_off_reads_nothing_and_whoever_may_keep_no_bytes_only_reads(kind):
    one = EVERY_KIND[kind]
    assert scope_of(one, "off", name="docs").readable == ()
    assert scope_of(one, "off").cache == "off"
    assert scope_of(one, "read").cache == "read"
    if one is not None:
        reader = Sharing(one.tenant_id, one.policy, one.group, KEY, may_write=False)
        assert [scope_of(reader, use).cache for use in ("off", "read", "read_write")] == ["off", "read", "read"]


def test_whoever_draws_on_others_is_not_told_how_much():
    told = {kind: not scope_of(one).reads_others for kind, one in EVERY_KIND.items()}
    assert told == {
        "open": True, "a": True, "b": True, "group": False, "another group": False, "promoted": False, "shared": False,
    }  # fmt: skip
    assert not scope_of(sharing("x", "promoted"), "off").reads_others
    assert scope_of(sharing("x", "group", "g"), "off").reads_others  # prefix blocks and drafters are shared as well


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_only_what_a_promoted_tenant_says_in_its_own_namespace_is_offered_to_the_public_pool(kind):
    one = EVERY_KIND[kind]
    plain = scope_of(one)
    assert plain.promotes == (plain.namespace if kind == "promoted" else "")
    for wishes in ({"salt": SALT}, {"name": "docs"}, {"salt": SALT, "name": "docs"}):
        assert scope_of(one, **wishes).promotes == ""
    assert [scope_of(one, use).promotes for use in ("off", "read")] == ["", ""]
    if one is not None:
        assert scope_of(Sharing(one.tenant_id, one.policy, one.group, KEY, may_write=False)).promotes == ""


@pytest.mark.parametrize("wishes", [{}, {"name": "docs"}, {"salt": SALT}, {"salt": SALT, "name": "docs"}])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_other_clusters_add_what_they_share_and_nothing_to_what_is_a_tenants_own(kind, wishes):
    one = EVERY_KIND[kind]
    if one is None:
        return
    plain, wider = scope_of(one, **wishes), scope_of(replace(one, has_regions=True), **wishes)
    added = [name for name in wider.readable if name not in plain.readable]
    if one.group is not None and "salt" not in wishes:
        assert added == [imported(one.namespace)]
    else:
        assert added == ([imported(PUBLIC)] if kind == "promoted" else [])
    assert replace(wider, readable=plain.readable) == plain
    assert scope_of(replace(one, has_regions=True), "off", **wishes).readable == ()


def test_all_that_belongs_to_an_owner_begins_with_it():
    own, other = namespace_of(KEY, "x"), namespace_of(KEY, "y")
    for salt, name in itertools.product(("", "s"), ("", "docs")):
        part = named(salted(KEY, own, salt), name)
        assert belongs_to(part, own)
        assert not belongs_to(part, other)
    assert not belongs_to("opened", OPEN)
    with pytest.raises(SettingError, match=r"namespace is 'a\.b'"):
        named(own, "a.b")


def test_the_servers_key_is_in_no_representation():
    assert KEY.hex() not in repr(sharing("x"))
    assert repr(KEY) not in repr(sharing("x"))
