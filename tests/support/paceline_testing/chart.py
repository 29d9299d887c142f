"""What Helm makes of the chart in `k8s/chart`: the Go library of Helm 4, without its command.

As a program it is as much of `helm` as Kustomize calls: `version` and `template`.
"""

import argparse
import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[3] / "k8s" / "chart"
PROFILES = ("default", "laptop", "single-node-gpu", "prod-70b")

Object = dict[str, Any]


def profile_values(profile: str) -> Object:
    """Of `values-PROFILE.yaml`, which differ from those of `values.yaml`; `default` differs in nothing."""
    return {} if profile == "default" else copy.deepcopy(_values_file(CHART / f"values-{profile}.yaml"))


def merged(*values: Object) -> Object:
    """As Helm merges values files: maps key by key, of anything else the last one."""
    result: Object = {}
    for given in values:
        for key, value in given.items():
            before = result.get(key)
            both = isinstance(before, dict) and isinstance(value, dict)
            result[key] = merged(before, value) if both else copy.deepcopy(value)
    return result


def templates(values: Object, release: str = "paceline", namespace: str = "paceline") -> dict[str, str]:
    """Text by the template's path. Raises helm_python.HelmError for values that the chart refuses."""
    with helm_python.Chart.load(CHART) as chart:
        rendered: dict[str, str] = chart.render(values, name=release, namespace=namespace)
    return {path.removeprefix("paceline/templates/"): text for path, text in rendered.items()}


def objects(values: Object, release: str = "paceline", namespace: str = "paceline") -> list[Object]:
    """All objects that an installation makes, and the pod of `helm test`."""
    return copy.deepcopy(_objects(json.dumps(values), release, namespace))


@cache
def _objects(values: str, release: str, namespace: str) -> list[Object]:
    texts = templates(json.loads(values), release, namespace)
    return [
        each for path, text in texts.items() if path != "NOTES.txt" for each in yaml.load_all(text, _Strict) if each
    ]


class _Strict(yaml.CSafeLoader):
    """A key that is there twice is an error, as it is for the API server."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        made = super().construct_mapping(node, deep)
        assert len(made) == len(node.value), f"{node.start_mark}: a key is there twice"
        return made


def profile_objects(profile: str) -> list[Object]:
    return objects(profile_values(profile))


def identity(each: Object) -> tuple[str, str]:
    """Kind and name: unique within a release."""
    return each["kind"], each["metadata"]["name"]


def is_test(each: Object) -> bool:
    return "helm.sh/hook" in each["metadata"].get("annotations", {})


def one(made: list[Object], kind: str, name: str = "paceline") -> Object:
    (found,) = [each for each in made if identity(each) == (kind, name)]
    return found


def serve_config(made: list[Object]) -> Object:
    """What KubeRay hands to Ray Serve."""
    found: Object = yaml.load(one(made, "RayService")["spec"]["serveConfigV2"], yaml.CSafeLoader)
    return found


@cache
def _values_file(path: Path) -> Object:
    found: Object = yaml.load(path.read_bytes(), yaml.CSafeLoader)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=("version", "template"))
    parser.add_argument("places", nargs="*")
    parser.add_argument("-f", "--values", action="append", type=Path, default=[])
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--skip-tests", action="store_true")
    given, _ = parser.parse_known_args()
    if given.command == "version":
        print("v3.14.0")  # Kustomize asks for a Helm 3
        return
    release, chart = given.places
    assert Path(chart).resolve() == CHART, chart
    values = merged(*(_values_file(path) for path in given.values))
    made = objects(values, release, given.namespace)
    kept = [each for each in made if not (given.skip_tests and is_test(each))]
    yaml.dump_all(kept, sys.stdout, yaml.CSafeDumper, sort_keys=False)


if __name__ == "__main__":
    main()
