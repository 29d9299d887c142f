"""`paceline config schema`: what editors are told is what a configuration is checked by."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster.config import ClusterConfig, load_config
from cluster.errors import ConfigError

LAPTOP = Path(__file__).resolve().parents[3] / "configs" / "laptop.yaml"


@pytest.fixture
def validator(run):
    status, out, err = run("config", "schema")
    assert (status, err) == (0, "")
    schema = json.loads(out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_what_is_shipped_and_every_default_pass(validator):
    for given in (yaml.safe_load(LAPTOP.read_text(encoding="utf-8")), {}, ClusterConfig().model_dump(mode="json")):
        assert [error.message for error in validator.iter_errors(given)] == []


def test_every_section_says_what_it_is_of(validator):
    sections = {name: validator.schema["$defs"][field["$ref"].rpartition("/")[2]]
                for name, field in validator.schema["properties"].items()}  # fmt: skip
    assert sections.keys() == ClusterConfig.model_fields.keys()
    for name, section in sections.items():
        assert section["description"], name
        assert section["additionalProperties"] is False, name


@pytest.mark.parametrize(
    "override",
    [
        "drafts.workers=2",
        "draft.worker=2",
        "draft.lookahead.window=2",
        "cache.promotion.min_tenant=20",
        "target.tensor_parallel=0",
        "target.kv_cache_fraction=0.96",
        "target.dtype=float8",
        "gateway.http_port=65536",
        "router.max_running=many",
        "gateway.replicas=yes",
        "speculation.drafters=auto",
        "cache.promotion.never=['']",
    ],
)
def test_what_the_configuration_refuses_in_one_key_the_schema_refuses(validator, override):
    with pytest.raises(ConfigError):
        load_config(None, [override])
    path, _, text = override.partition("=")
    given = yaml.safe_load(text)
    for name in reversed(path.split(".")):
        given = {name: given}
    assert not validator.is_valid(given)
