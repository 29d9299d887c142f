"""`paceline validate` on files that nobody should write: it answers, says where, and tells no secrets.

Covers `cluster.deploy.validate.tree`.
"""

import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml

from cluster.config import ClusterConfig
from cluster.deploy.validate import check
from cluster.deploy.validate.documents import read_documents
from cluster.deploy.validate.kustomize import build
from paceline_testing.manifests import manifest as right

CONFIG_MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
PASSWORD = 31_415_926_535


@pytest.fixture
def judged(run, tmp_path):
    """Write a file and return the rules that it breaks, with their lines, or the one line on stderr."""

    def judge(data, name="x.yaml", *options):
        file = tmp_path / name
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
        status, out, err = run("validate", file, "--format", "json", *options)
        if err:
            assert (status, err.count("\n")) == (2, 1)
            return err
        found = json.loads(out)["findings"]
        assert status == (1 if found else 0)
        return [(one["rule"], one["line"]) for one in found]

    return judge


@pytest.mark.parametrize(
    ("data", "rules"),
    [
        (b"\xef\xbb\xbf" + CONFIG_MAP.replace("\n", "\r\n").encode(), []),  # as some editors write it
        (b'{\n\t"apiVersion": "v1",\n\t"kind": "ConfigMap",\n\t"metadata": {"name": "a"}\n}', []),
        (b"", []),
        (b"---\n---\n# nothing\n", []),
        (CONFIG_MAP + "data: {from: 10:30, to: 1:30.5}\n", []),  # to Kubernetes these are texts
        (CONFIG_MAP + 'data: {x: "\ufffd"}\n', []),
        (CONFIG_MAP.encode() + b"data: {x: \xe9}\n", [("yaml-syntax", 1)]),
        (b"\xff\xfe" + CONFIG_MAP.encode("utf-16-le"), [("yaml-syntax", 1)]),
        (b"\x00\x01\x02", [("yaml-syntax", 1)]),
        ("- a\n- b\n", [("file-kind", 1)]),
        (CONFIG_MAP + "data: {x: !!timestamp soon}\n", [("yaml-syntax", 1)]),
        (CONFIG_MAP + "data: {x: !!bool maybe}\n", [("yaml-syntax", 1)]),
        (CONFIG_MAP + "data: {x: !!int ''}\n", [("yaml-syntax", 1)]),
        (CONFIG_MAP + "data: !!set {a, b}\n", [("schema-type", 4)]),
        (f"{CONFIG_MAP}data:\n  x: 0x{'f' * 5000}\n", [("yaml-syntax", 5)]),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 700)), [("yaml-syntax", 1)]),
        ("a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}, k: {{<<: *a{n - 1}}}}}\n" for n in range(1, 40)),
         [("yaml-syntax", 1)]),
        ("apiVersion: v1\nkind: Config\nusers: []\n", [("file-kind", 1)]),
    ],
)  # fmt: skip
def test_whatever_a_file_holds_there_is_an_answer(judged, data, rules):
    assert judged(data) == rules


def test_of_a_file_without_end_only_so_much_is_read(judged, monkeypatch, validated):
    monkeypatch.setattr(check, "MAX_BYTES", 64)
    assert judged(CONFIG_MAP + "# " + "x" * 64) == [("yaml-syntax", 1)]
    assert "more than 64 bytes" in validated("/dev/zero", status=1)


def test_a_text_of_many_values_is_given_up_before_it_is_read_whole():
    documents, (found,) = read_documents("x.yaml", "[" + "1," * 300_001 + "1]")
    assert documents == []
    assert "over 300000 values" in found.what


def test_a_tab_is_named(run, tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1\n\tb: 2\n")
    assert "the line begins with a tab" in run("validate", tmp_path / "x.yaml")[1]


def test_a_template_is_recognised(validated, tmp_path):
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: a\n")
    (tmp_path / "templates").mkdir()
    template = tmp_path / "templates" / "x.yaml"
    template.write_text("{{- if .Values.x }}\n" + CONFIG_MAP + "{{- end }}\n")
    assert "`helm template`" in validated(template, status=1)
    for directory in (tmp_path, template.parent):
        assert "give what `helm template` renders of it" in validated(directory)


def test_links_that_lead_in_a_circle_are_followed_once(validated, tmp_path):
    (tmp_path / "x.yaml").write_text(CONFIG_MAP)
    (tmp_path / "below").mkdir()
    for name in ("one", "two"):
        (tmp_path / "below" / name).symlink_to(tmp_path, target_is_directory=True)
    out = validated(tmp_path)
    assert "1 documents" in out


def test_what_lies_beside_manifests_is_passed_over(validated, tmp_path):
    (tmp_path / "x.yaml").write_text(CONFIG_MAP)
    (tmp_path / "playbook.yaml").write_text("- secret: !vault |\n    abc\n")
    (tmp_path / "data.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "blank.yaml").write_text("\n" * 100_000 + "\t{")
    (tmp_path / "kind.yaml").write_text("apiVersion: kind.x-k8s.io/v1alpha4\nkind: Cluster\nnodes: []\n")
    (tmp_path / "skaffold.yaml").write_text("apiVersion: skaffold/v4beta11\nkind: Config\nbuild: {}\n")
    out = validated(tmp_path)
    assert out.count("is neither manifest nor cluster configuration") == 3
    (tmp_path / "broken.yaml").write_text(CONFIG_MAP + "data: [\n")
    validated(tmp_path, status=1)
    (tmp_path / "broken.yaml").unlink()
    (tmp_path / "broken.json").write_text('{"apiVersion": "v1", "kind": "ConfigMap", "data": [}')
    validated(tmp_path, status=1)


def test_a_directory_with_nothing_to_check_says_so(validated, tmp_path):
    assert f"note: {tmp_path} has nothing in it to check" in validated(tmp_path)


def test_a_name_that_is_no_text_can_be_told(validated, tmp_path):
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.yaml"))
    file.write_text("a: [\n")
    for form in ("text", "json", "github"):
        assert "yaml-syntax" in validated(file, "--format", form, status=1)


def test_a_name_beyond_all_limits_is_one_line(refuse):
    assert refuse("validate", "x" * 5000).endswith(": File name too long")


def test_definitions_that_are_none_are_told_even_where_none_is_needed(judged, tmp_path):
    config = "target: {model: smollm2}\n"
    assert "no such directory" in judged(config, "x.yaml", "--crds", tmp_path / "nowhere")
    (tmp_path / "crds").mkdir()
    assert "defines a custom resource" in judged(config, "x.yaml", "--crds", tmp_path / "crds")


@pytest.mark.parametrize(
    "spec", ["null", "[]", "{versions: 3}", "{group: a.b, names: 1, versions: [3, {name: v1, schema: {a: b}}]}"]
)
def test_a_definition_of_any_shape_is_read(judged, tmp_path, spec):
    crds = tmp_path / "crds"
    crds.mkdir()
    (crds / "directory.yaml").mkdir()
    text = f"kind: CustomResourceDefinition\nmetadata: {{name: a}}\nspec: {spec}\n"
    (crds / "a.yaml").write_text(text)
    assert judged("apiVersion: a.b/v1\nkind: A\nmetadata: {name: x}\n", "x.yaml", "--crds", crds) == []


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Put a script on the PATH in kubectl's place."""

    def write(script):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return write


def test_a_build_that_hangs_ends_with_all_that_it_started(program, tmp_path):
    program(f"echo $$ > {tmp_path}/group\nsleep 600 &\nsleep 600")
    text, why = build(tmp_path, timeout_s=0.5)
    assert text == ""
    assert why == "it took longer than 0.5 s"
    group = int((tmp_path / "group").read_text())
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a child is left")


def test_a_build_cannot_ask_the_terminal(program, tmp_path):
    program('read answer && exit 3; echo "terminal: $GIT_TERMINAL_PROMPT" >&2; exit 1')
    assert build(tmp_path) == ("", "terminal: 0")


@pytest.mark.parametrize("header", ["error: ", 'E1122 06:35:28.359402    9964 run.go:72] "command failed" err="', ""])
def test_why_a_build_fails_is_told_without_times_and_passwords(program, tmp_path, header):
    program(f"echo '{header}no https://me:{PASSWORD}@host/x' >&2; exit 1")
    text, why = build(tmp_path)
    assert text == ""
    assert why == "no https://...@host/x"


def test_without_a_program_that_builds_it_is_one_line(refuse, tmp_path, monkeypatch):
    (tmp_path / "kustomization.yaml").write_text("resources: []\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "takes kubectl or kustomize" in refuse("validate", tmp_path)


def test_annotations_stay_within_their_line(validated, tmp_path):
    name = "50%, a:b\nc\x1b[31m"
    directory = tmp_path / name
    directory.mkdir()
    manifest = yaml.safe_load(CONFIG_MAP) | {"metadata": {"name": "x%y\n::error::z"}, "dat": {}}
    (directory / "x.yaml").write_text(yaml.safe_dump(manifest))
    out = validated(directory, "--format", "github", status=1)
    (line,) = out.splitlines()
    position, message = re.fullmatch(r"::error (.*?)::(.*)", line).groups()
    assert [part.partition("=")[0] for part in position.split(",")] == ["file", "line", "title"]
    assert "50%25%2C a%3Ab%0Ac" in position
    assert "x%25y%0A::error::z" in message
    assert "\x1b" not in line


def test_notes_are_shown_in_every_format(validated, tmp_path):
    for form, start in (("text", "note: "), ("github", "::notice::")):
        assert f"{start}{tmp_path} has nothing in it" in validated(tmp_path, "--format", form)
    assert len(json.loads(validated(tmp_path, "--format", "json"))["notes"]) == 1


def secret(data):
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "stringData": data}


def deployment(**container):
    manifest = right("deployment")
    manifest["spec"]["template"]["spec"]["containers"][0] |= container
    return manifest


def ray_start(name, value):
    manifest = right("ray_cluster")
    manifest["spec"]["headGroupSpec"].setdefault("rayStartParams", {})[name] = value
    return manifest


def served(**settings):
    manifest = right("ray_service")
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    config["applications"][0] |= settings
    manifest["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    return manifest


@pytest.mark.parametrize(
    "manifest",
    [
        secret({"password": PASSWORD}),
        secret(f"password: {PASSWORD}"),
        secret([PASSWORD]),
        deployment(env=[{"name": "PASSWORD", "value": PASSWORD}]),
        deployment(env=[f"PASSWORD={PASSWORD}"]),
        deployment(env={"PASSWORD": str(PASSWORD)}),
        deployment(args=f"--password {PASSWORD}"),
        deployment(command={"password": PASSWORD}),
        ray_start("redis-password", PASSWORD),
        served(runtime_env={"env_vars": {"PASSWORD": PASSWORD}}),
        served(runtime_env={"env_vars": [PASSWORD]}),
        served(args={"cache": {"password": str(PASSWORD)}}),
        served(args={"cache": {"url": f"redis://a:{PASSWORD}@host"}}),
        served(args={"cache": {"encryption_file": PASSWORD}}),
        {"cache": {"url": f"redis://a:{PASSWORD}@host"}},
        {"cache": {"encryption_file": PASSWORD}},
    ],
    ids=lambda manifest: manifest.get("kind", "config"),
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_told(validated, tmp_path, manifest, form):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(manifest))
    assert str(PASSWORD) not in validated(tmp_path / "x.yaml", "--format", form, status=1)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("speculation: {drafters: [sufix]}", "speculation.drafters"),
        ("speculation: {drafters: [none, suffix]}", "speculation.drafters"),
        ("{more_drafts: {code: {model: m}}, speculation: {drafters: [suffix]}}", "speculation.drafters"),
        ("speculation: {drafters: [eagle]}", "speculation.drafters"),
        ("{draft: {model: none}, speculation: {drafters: [draft_model]}}", "speculation.drafters"),
        ("speculation: {drafters: [lookahead], max_rows: 2}", "speculation.max_rows"),
        ("speculation: {drafters: [suffix], corpora: [/x]}", "speculation.corpora"),
        ("target: {device: 'cuda:1'}", "target.device"),
        ("more_drafts: {code: {model: m, device: 'cuda:1'}}", "more_drafts.code.device"),
        ("speculation: {drafter_options: {sufix: {len_threshold: 5}}}", "speculation.drafter_options"),
        ("speculation: {drafter_options: {suffix: {len_treshold: 5}}}", "speculation.drafter_options.suffix"),
        ("target: {tensor_parallel: yes}", "target.tensor_parallel"),
        ("gateway: {http_port: on}", "gateway.http_port"),
        ("draft: {deadline_ms: true}", "draft.deadline_ms"),
        ("draft: {ahead: false}", "draft.ahead"),
        ("router: {verify_timeout_s: .inf}", "router.verify_timeout_s"),
        ("autoscaling: {upscale_delay_s: .nan}", "autoscaling.upscale_delay_s"),
        ("draft: {workers: 3, max_workers: 2}", "draft"),
        ("draft: {workers: 0, max_workers: 2}", "draft"),
        *((f"{section}: {value}", section) for section in ClusterConfig.model_fields for value in ("3", "[]", "null")),
    ],
)  # fmt: skip
def test_a_mistyped_configuration_is_told_by_its_field(validated, tmp_path, text, where):
    (tmp_path / "x.yaml").write_text(text)
    (found,) = json.loads(validated(tmp_path / "x.yaml", "--format", "json", status=1))["findings"]
    assert found["where"].startswith(where)


def test_truths_numbers_and_texts_are_read_where_they_belong():
    config = ClusterConfig.model_validate(
        {
            "target": {"prefix_cache": True, "threads": "2", "max_model_len": None},
            "gateway": {"stream_obfuscation": False, "stream_interval_ms": 0},
            "speculation": {"drafter_options": {"suffix": {"a": True, "b": 1}}},
        }
    )
    assert (config.target.threads, config.gateway.stream_interval_ms) == (2, 0.0)
    assert config.speculation.drafter_options["suffix"] == {"a": True, "b": 1}
