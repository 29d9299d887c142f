"""`paceline validate` on manifests that are right, and on the same with one planted mistake each.

Covers the rules in `cluster.deploy.validate.ray_cluster`, `cluster.deploy.validate.schemas`,
`cluster.deploy.validate.crds`, `cluster.deploy.validate.serve_config` and `cluster.deploy.validate.suggestion`.
"""

import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.deploy.validate.check import check_manifest, check_set, validate
from cluster.deploy.validate.crds import Definitions
from cluster.deploy.validate.documents import read_documents
from cluster.deploy.validate.schemas import Schemas
from paceline_testing.manifests import SERVE_CONFIG, VALID
from paceline_testing.manifests import manifest as right
from paceline_testing.planted_mistakes import MISTAKES, NEED_DEFINITIONS

CRDS = Path(__file__).resolve().parents[6] / "shared" / "data" / "crds"
GIVEN = ["without definitions", "with definitions"]


@pytest.fixture(scope="module")
def schemas_of():
    """Schemas with and without the definitions, read once."""
    made = {}

    def get(crds):
        if crds == GIVEN[1] and not CRDS.is_dir():
            pytest.skip(f"{CRDS} is not there")
        if crds not in made:
            made[crds] = Schemas(Definitions(CRDS) if crds == GIVEN[1] else None)
        return made[crds]

    return get


def findings(manifest, schemas):
    """By way of a text, as a file would be: with lines, and with the checks of several objects together."""
    documents, problems = read_documents("x.yaml", yaml.dump(manifest, Dumper=yaml.CSafeDumper, sort_keys=False))
    assert problems == []
    found = [document.find(problem) for document in documents for problem in check_manifest(document, schemas)]
    return found + [document.find(problem) for document, problem in check_set(documents)]


@pytest.mark.parametrize("crds", GIVEN)
@pytest.mark.parametrize("name", VALID)
def test_a_manifest_that_is_right_raises_no_alarm(name, crds, schemas_of):
    assert findings(right(name), schemas_of(crds)) == []


@pytest.mark.parametrize("crds", GIVEN)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_by_its_rule_and_no_other(mistake, crds, schemas_of):
    found = findings(mistake.make(), schemas_of(crds))
    is_silent = crds == GIVEN[0] and mistake.name in NEED_DEFINITIONS
    assert {finding.rule for finding in found if finding.level == "error"} == (set() if is_silent else {mistake.rule})
    for finding in found:
        assert finding.line >= 1
        assert all((finding.where, finding.what, finding.why, finding.fix))


def test_all_that_is_right_is_right_together(tmp_path):
    together = [name for name in VALID if name != "deny_all"]
    text = "---\n".join(yaml.safe_dump(right(name), sort_keys=False) for name in together)
    (tmp_path / "all.yaml").write_text(text)
    report = validate([tmp_path])
    assert report.num_errors == 0
    assert report.num_documents == len(together)


def test_items_of_a_list_with_keys_must_differ(schemas_of):
    cluster = right("ray_cluster")
    service = {"metadata": {}, "spec": {"ports": [{"port": 80, "name": "a"}, {"port": 80, "name": "b"}]}}
    cluster["spec"]["headGroupSpec"]["headService"] = service
    assert "list-unique" in {finding.rule for finding in findings(cluster, schemas_of(GIVEN[1]))}


def test_a_misspelt_field_is_told_what_it_may_have_been(schemas_of):
    service = right("ray_service")
    service["spec"]["serveConfigV2"] = SERVE_CONFIG.replace("tensor_parallel", "tensor_paralel")
    (found,) = findings(service, schemas_of(GIVEN[0]))
    assert "did you mean tensor_parallel?" in found.what
    assert found.where == "spec.serveConfigV2: applications[0].args.target.tensor_paralel"


@pytest.mark.parametrize(
    ("upgrade", "ports", "expected"),
    [
        ("NewCluster", [], set()),
        ("NewCluster", ["x"], set()),
        ("NewClusterWithIncrementalUpgrade", ["x"], {"ray-serve-port"}),
    ],
)
def test_serve_has_a_port_where_the_head_has_none_at_all_or_its_service_is_given(schemas_of, upgrade, ports, expected):
    service = right("ray_service")
    service["spec"]["upgradeStrategy"]["type"] = upgrade
    service["spec"]["serveService"] = {"spec": {"ports": [{"name": "serve", "port": 8000}]}}
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["ports"] = [{"name": name, "containerPort": 8080} for name in ports]
    assert {finding.rule for finding in findings(service, schemas_of(GIVEN[1]))} == expected


def rules_of(manifest, schemas):
    return {finding.rule for finding in findings(manifest, schemas)}


@pytest.mark.parametrize("crds", GIVEN)
def test_rocksdb_has_no_fields_of_redis(crds, schemas_of):
    service = right("ray_service")
    service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["backend"] = "rocksdb"
    assert rules_of(service, schemas_of(crds)) == {"ray-alpha-gate", "ray-gcs"}


@pytest.mark.parametrize("crds", GIVEN)
def test_priority_0_is_none(crds, schemas_of):
    cluster = right("fixed_ray_cluster")
    cluster["spec"]["workerGroupSpecs"][0]["priority"] = 0
    assert findings(cluster, schemas_of(crds)) == []


TEXTS = st.sampled_from(["", "a b", "1Gi", "1e999", "x" * 300])
KEYS = st.sampled_from(["name", "type", "spec"])
INTEGERS = st.integers(-(2**63), 2**64 - 1)  # beyond, a file is refused as it is read
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


def places(value, where=()):
    yield where
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*where, key))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_value_is_there_is_an_answer(data, schemas_of):
    manifest = right(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from([place for place in places(manifest) if len(place) > 1]))
        value = manifest
        for key in where[:-1]:
            value = value[key]
        value[where[-1]] = data.draw(JSON)
    for finding in findings(manifest, schemas_of(GIVEN[0])):
        assert finding.what


def test_code_that_a_file_names_is_not_run(schemas_of, tmp_path, monkeypatch):
    (tmp_path / "named_by_a_service.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = yaml.safe_load(SERVE_CONFIG)
    router, drafts = config["applications"][0]["deployments"]
    router["request_router_config"] = {"request_router_class": "named_by_a_service:chosen"}
    router["deployment_actors"] = [{"name": "shared", "actor_class": "named_by_a_service:chosen"}]
    drafts["autoscaling_config"]["policy"] = {"policy_function": "named_by_a_service:chosen"}
    service = right("ray_service")
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    assert findings(service, schemas_of(GIVEN[0])) == []
    assert "named_by_a_service" not in sys.modules


def test_warnings_are_no_errors(tmp_path):
    cluster = right("ray_cluster")
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = 9
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(cluster))
    report = validate([tmp_path])
    assert [(finding.rule, finding.level) for finding in report.findings] == [("ray-replicas-outside", "warning")]
    assert report.num_errors == 0
