"""What a registry of tenants allows to be shared with other clusters."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.errors import ModelError
from actors.models.source import ModelSource
from cache_service.formats.namespaces import PUBLIC, namespace_of_group
from cache_service.promotion.promotion_gate import nothing_blocked
from cluster.cache.regions import RegionRights, RegionsSource
from cluster.config import PromotionConfig, RegionsConfig
from cluster.tenants.registry import Registry, StoredTenant
from cluster.tenants.registry_file import write_registry


def tenant(number, **fields):
    return StoredTenant(id=f"{number:08x}", name=f"t{number}", created=datetime.now(UTC), **fields)


def rights(file, blocks=lambda source: nothing_blocked, **promotion):
    model = ModelSource("tiny", "tiny", Path("nowhere"))
    return RegionRights(RegionsSource(file, model, RegionsConfig(), PromotionConfig(**promotion)), blocks)


def shared(file, **options):
    return dict(rights(file, **options).terms().namespaces)


def test_groups_with_a_member_and_the_public_pool_with_a_feeder_are_shared(tmp_path):
    file = tmp_path / "tenants.json"
    assert rights(file).terms() is None
    tenants = [tenant(1), tenant(2, policy="shared"), tenant(3, policy="group")]
    tenants += [tenant(4, policy="group", group="a"), tenant(5, policy="group", group="b", disabled=True)]
    registry = Registry(tenants)
    write_registry(file, registry)
    of_a = {"group:a": namespace_of_group(bytes.fromhex(registry.server_key), "a")}
    assert shared(file) == of_a
    write_registry(file, Registry([*tenants, tenant(6, policy="promoted")], registry.server_key))
    assert shared(file) == of_a | {"public": PUBLIC}
    assert shared(file, enabled=False) == of_a


def test_without_a_filter_nothing_public_is_shared(tmp_path):
    def broken(source):
        raise ModelError("no bytes of tokens")

    file = tmp_path / "tenants.json"
    write_registry(file, Registry([tenant(1, policy="promoted")]))
    assert shared(file, blocks=broken) == {}


def test_other_rules_have_another_name(tmp_path):
    file = tmp_path / "tenants.json"
    write_registry(file, Registry([tenant(1, policy="promoted")]))
    rules = [rights(file, **each).terms().rules for each in ({}, {"never": ("x",)}, {"max_tokens": 8}, {})]
    assert len(set(rules)) == 3
    assert rules[0] == rules[3]


def test_a_url_needs_a_name_of_the_cluster():
    with pytest.raises(ValidationError, match="url needs cluster"):
        RegionsConfig(url="file:///mnt/regions")
    with pytest.raises(ValidationError):
        RegionsConfig(url="file:///mnt/regions", cluster="../asia")


@pytest.mark.parametrize("url", ["ftp://me:secret@host/regions", "s3://bucket/a?token=b", "regions", "/mnt/regions"])
def test_a_url_names_its_file_system_and_holds_no_secret(url):
    with pytest.raises(ValidationError):
        RegionsConfig(url=url, cluster="asia")
