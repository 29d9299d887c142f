"""`paceline validate`: files, lines, overlays, cluster configurations, formats and exit status.

Covers `cluster.deploy.validate.cluster_files`, `cluster.deploy.validate.report` and `cluster.deploy.validate.shown`.
"""

import builtins
import json
import shutil
from pathlib import Path

import pytest
import yaml

from actors.models.source import ModelSource
from actors.options import TargetGroupOptions
from actors.workers.settings import TargetSettings
from actors.workers.target_group import target_group_application
from cluster.config import ClusterConfig
from cluster.deploy.validate.capacity import Demand, NodeKind, check_capacity
from cluster.deploy.validate.demands import cluster_demands
from cluster.deploy.validate.documents import read_documents
from cluster.deploy.validate.finding import Problem
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.rules_page import with_rules
from paceline_testing.manifests import manifest as right

ROOT = Path(__file__).resolve().parents[5]
CONFIG = "target:\n  model: smollm2\n  tensor_paralel: 2\nrouter:\n  max_running: 0\n"


@pytest.fixture
def written(tmp_path):
    """Write a file and return its path."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False))
        return path

    return write


def test_findings_name_file_and_line(validated, written):
    file = written("cluster.yaml", CONFIG)
    out = validated(file, status=1)
    assert f"{file}:3: error config-unknown-key: target.tensor_paralel" in out
    assert "did you mean tensor_parallel?" in out
    assert f"{file}:5: error config-value: router.max_running" in out
    assert out.endswith("1 documents, 2 errors, 0 warnings\n")


def test_a_line_of_serve_config_is_the_line_in_the_file(validated, written):
    service = right("ray_service")
    text = service["spec"].pop("serveConfigV2").replace("http_options", "http_option")
    body = yaml.safe_dump(service, sort_keys=False).splitlines()
    at = body.index("spec:") + 1
    body[at:at] = ["  serveConfigV2: |", *(f"    {line}" for line in text.splitlines())]
    file = written("service.yaml", "\n".join(body))
    out = validated(file, "--format", "json", status=1)
    (found,) = json.loads(out)["findings"]
    assert "http_option" in file.read_text().splitlines()[found["line"] - 1]
    assert found["rule"] == "serve-unknown-key"


def test_what_a_rule_finds_can_be_left_out(refuse, validated, written):
    file = written("cluster.yaml", CONFIG)
    ignored = (file, "--ignore", "config-unknown-key")
    out = validated(*ignored, status=1)
    assert ("config-unknown-key" in out, "config-value" in out) == (False, True)
    assert validated(*ignored, "--ignore", "config-value") == "1 documents, 0 errors, 0 warnings\n"
    line = refuse("validate", file, "--ignore", "config-unknown-keys")
    assert "there is no such rule; did you mean config-unknown-key?" in line


def test_what_is_right_is_quiet(run, written):
    written("a/deployment.yaml", right("deployment"))
    written("cluster.yaml", "target: {model: smollm2}\n")
    notes = written("notes.yaml", "some: [thing, else]\n")
    status, out, err = run("validate", notes.parent)
    assert (status, err) == (0, "")
    assert f"note: {notes} is neither manifest nor cluster configuration" in out
    assert "2 documents, 0 errors" in out


def test_the_configurations_that_come_along_are_right(validated):
    validated(ROOT / "configs")


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("a: [1, 2\nb: 3\n", "yaml-syntax", 2),
        ("kind: Service\napiVersion: v1\nkind: Service\n", "yaml-duplicate-key", 3),
        ("a: &a [*a]\n", "yaml-syntax", 1),
        ("just: something\n", "file-kind", 1),
        ("a: " + "[" * 5000 + "]" * 5000, "yaml-syntax", 1),
    ],
)
def test_files_that_cannot_be_read(validated, written, text, rule, line):
    file = written("x.yaml", text)
    out = validated(file, "--format", "json", status=1)
    assert (rule, line) in {(found["rule"], found["line"]) for found in json.loads(out)["findings"]}


def test_aliases_that_grow_without_end_are_refused():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    documents, findings = read_documents("x.yaml", "\n".join(levels))
    assert documents == []
    assert [found.rule for found in findings] == ["yaml-syntax"]


def test_items_of_a_list_have_their_own_lines():
    text = "kind: List\napiVersion: v1\nitems:\n- kind: A\n  metadata: {name: one}\n- kind: B\n  metadata:\n"
    text += "    name: two\n"
    documents, _ = read_documents("x.yaml", text)
    assert [document.name for document in documents] == ["A/one", "B/two"]
    assert documents[1].find(Problem("schema-value", ("metadata", "name"), "x")).line == 8


def test_a_path_that_is_not_there_is_one_line(refuse, tmp_path):
    path = tmp_path / "none.yaml"
    assert refuse("validate", path) == f"{path}: No such file or directory"


def test_an_object_is_defined_once(validated, written):
    text = yaml.safe_dump(right("config_map"))
    assert "object-twice" in validated(written("x.yaml", f"{text}---\n{text}"), status=1)


def test_examples_in_a_directory_may_define_the_same_object(validated, written):
    for name in ("one", "two"):
        file = written(f"samples/{name}.yaml", right("config_map"))
    out = validated(file.parent)
    assert "warning object-in-files" in out
    assert "0 errors, 1 warnings" in out


def test_a_service_forwards_to_a_port_that_its_pods_have(validated, written):
    service = right("service")
    service["spec"]["ports"][0]["targetPort"] = "https"
    written("a.yaml", right("deployment"))
    assert "service-target" in validated(written("b.yaml", service).parent, status=1)


@pytest.fixture
def overlay(written):
    if shutil.which("kubectl") is None and shutil.which("kustomize") is None:
        pytest.skip("neither kubectl nor kustomize is there")
    written("base/kustomization.yaml", "resources: [deployment.yaml]\n")
    written("base/deployment.yaml", right("deployment"))

    def make(patch):
        path = written("overlay/kustomization.yaml", {"resources": ["../base"], "patches": [{"patch": patch}]})
        return path.parent

    return make


PATCH = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {dnsPolicy: %s}}}\n"


def test_an_overlay_is_built_and_checked(validated, overlay):
    validated(overlay(PATCH % "Default"))
    directory = overlay(PATCH % "default")
    out = validated(directory, status=1)
    assert f"{directory / 'kustomization.yaml'}:" in out
    assert "schema-value: Deployment/web: spec.template.spec.dnsPolicy" in out


def test_an_overlay_that_cannot_be_built_says_why(validated, overlay):
    out = validated(overlay((PATCH % "Default").replace("name: web", "name: other")), status=1)
    assert "kustomize-build" in out
    assert "other" in out


def test_for_github_every_finding_is_a_line(validated, written):
    file = written("cluster.yaml", CONFIG)
    out = validated(file, "--format", "github", status=1)
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"::error file={file},line=3,title=config-unknown-key::")


def test_for_programs_there_is_json(validated, written):
    report = json.loads(validated(written("cluster.yaml", CONFIG), "--format", "json", status=1))
    assert (report["documents"], report["errors"], report["warnings"]) == (1, 2, 0)
    assert set(report["findings"][0]) == {"file", "line", "rule", "object", "where", "what", "why", "fix", "level"}


def test_without_the_extra_a_manifest_is_refused_in_one_line(refuse, validated, written, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] in ("jsonschema", "kubernetes_validate"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    validated(written("cluster.yaml", "target: {model: smollm2}\n"))
    manifest = written("deployment.yaml", right("deployment"))
    assert "pip install 'paceline[k8s]'" in refuse("validate", manifest)


def test_the_page_lists_the_rules():
    page = ROOT / "docs" / "validate.md"
    text = page.read_text(encoding="utf-8")
    assert with_rules(text) == text, "run python -m cluster.deploy.validate.rules_page docs/validate.md"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("3k", "3000"),
        ("1Ki", "1024"),
        ("2e3", "2000"),
        ("1.5Gi", "1610612736.0"),
        (2, "2"),
        (".5", "0.5"),
        ("1E", "1000000000000000000"),
    ],
)
def test_quantities(text, value):
    assert str(float(parse_quantity(text))) == str(float(value))


@pytest.mark.parametrize("text", ["16GB", "1 Gi", "", "Gi", "1.2.3", None, True, "1kib", "--1"])
def test_what_is_no_quantity(text):
    assert parse_quantity(text) is None


NODES = [
    NodeKind("head", {"CPU": 0.0}, frozenset(), 1),
    NodeKind("target", {"CPU": 32.0, "GPU": 4.0}, frozenset(), 2),
    NodeKind("small", {"GPU": 1.0}, frozenset({"CPU"}), 1),
]
RANK = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("demands", "num_problems"),
    [
        ([Demand("a", (RANK,) * 8)], 0),  # over two nodes
        ([Demand("a", (RANK,) * 8, on_one_node=True)], 1),
        ([Demand("a", (RANK,) * 8), Demand("b", (RANK,))], 0),
        ([Demand("a", (RANK,) * 8), Demand("b", (RANK,)), Demand("c", (RANK,))], 1),  # ten GPUs of nine
        ([Demand("a", ({"GPU": 8.0},))], 1),
        ([Demand("a", ({"draft": 1.0},))], 1),
        ([Demand("a", ({"memory": 1e9, "TPU": 4.0, "accelerator_type:H100": 0.001},))], 0),  # nobody can tell
        ([Demand("a", (RANK,), replicas=9)], 0),
        ([Demand("a", (RANK,), replicas=10)], 1),
        ([Demand("a", (RANK,) * 4, on_one_node=True, replicas=2)], 0),
        ([Demand("a", (RANK,) * 3, on_one_node=True, replicas=3)], 1),  # nine GPUs, but three in a node of four
        ([Demand("a", ({"CPU": 100.0},))], 0),  # Ray finds out how many CPUs a small node has
    ],
)
def test_capacity(demands, num_problems):
    assert len(list(check_capacity(demands, NODES, ("spec",)))) == num_problems


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_demand_of_a_target_group_is_what_it_asks_ray_for(device, tmp_path):
    config = ClusterConfig.model_validate({"target": {"device": device, "tensor_parallel": 3}})
    settings = TargetSettings(ModelSource("x", "x", tmp_path), TargetGroupOptions(device=device, tensor_parallel=3))
    application = target_group_application(settings, "directory", batch_limit_s=1.0)
    replica = application._bound_deployment._replica_config
    (demand,) = [demand for demand in cluster_demands(config) if demand.name == application._bound_deployment.name]
    assert list(demand.bundles) == replica.placement_group_bundles
    assert demand.on_one_node
    assert replica.placement_group_strategy == "STRICT_PACK"  # else ranks might meet over a network


def test_a_draft_worker_of_several_ranks_needs_their_gpus_on_one_node():
    draft = {"model": "m", "device": "cuda", "tensor_parallel": 2}
    config = ClusterConfig.model_validate({"draft": draft, "more_drafts": {"code": {**draft, "tensor_parallel": 1}}})
    several, one = (demand for demand in cluster_demands(config) if demand.name.startswith("DraftPool"))
    assert (several.bundles, several.on_one_node) == (({"CPU": 1.0, "GPU": 1.0},) * 2, True)
    assert (one.bundles, one.on_one_node) == (({"CPU": 0.5, "GPU": 1.0},), False)
