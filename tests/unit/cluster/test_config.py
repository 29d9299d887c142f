"""`paceline config schema`: what editors are told is what a configuration is checked by."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from actors.errors import InvalidRequest
from cluster.config import ClusterConfig, check_devices, load_config, read_yaml
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
    fields = dict(validator.schema["properties"])
    mapping = fields["more_drafts"]
    assert mapping["additionalProperties"] is False
    (fields["more_drafts"],) = mapping["patternProperties"].values()
    sections = {name: validator.schema["$defs"][field["$ref"].rpartition("/")[2]] for name, field in fields.items()}
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
        "more_drafts.code.model=''",
        "more_drafts.code.workers=1",
        "more_drafts.code={model: a, workers: 0}",
        "more_drafts={" + ", ".join(f"p{index}: {{model: a}}" for index in range(17)) + "}",
        "more_drafts.Code.model=a",
        "more_drafts.draft.model=a",
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


@pytest.mark.parametrize("section", ["target", "draft", "code"])
def test_a_gpu_that_a_cluster_refuses_by_its_number_the_schema_refuses(validator, section):
    for device, is_valid in {"auto": True, "cuda": True, "cuda:0": True, "cuda:1": False, "cuda:01": False}.items():
        given = (
            {section: {"device": device}}
            if section != "code"
            else {"more_drafts": {"code": {"model": "m", "device": device}}}
        )
        assert validator.is_valid(given) == is_valid
        if is_valid:
            check_devices(ClusterConfig.model_validate(given))
        else:
            with pytest.raises(InvalidRequest, match=rf"{section}\.device is '{device}'; Ray chooses the GPU"):
                check_devices(ClusterConfig.model_validate(given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"code": {"model": "auto"}}, "model is auto; it must name a model"),
        ({"code": {"model": "a", "workers": 0}}, "greater than or equal to 1"),
        ({f"p{index}": {"model": "a"} for index in range(17)}, "at most 16 items"),
        ({"draft": {"model": "a"}}, "this is the name of the draft model that `draft` describes"),
    ],
)
def test_a_further_draft_model_has_a_model_workers_and_a_name_of_its_own(given, told):
    with pytest.raises(ValueError, match=told):
        ClusterConfig.model_validate({"more_drafts": given})


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        ({}, "tensor_parallel is 2 with model auto, whose reduced vocabulary needs 1; name a model"),
        ({"model": "a", "gpus": 0.5}, "gpus is 0.5 with tensor_parallel 2; it must be above 0.5"),
    ],
)
def test_ranks_of_a_draft_worker_share_a_whole_vocabulary_and_no_gpu(draft, told):
    with pytest.raises(ValueError, match=told):
        ClusterConfig.model_validate({"draft": {"tensor_parallel": 2, **draft}})


def test_a_mapping_that_takes_in_another_one_may_have_keys_of_its_own(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: [*b, *a], x: 4}\n")
    assert read_yaml(path) == yaml.safe_load(path.read_text())
