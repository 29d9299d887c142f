"""The texts that choose in `api_enums.yaml` against those that a running API server publishes."""

from pathlib import Path

import yaml

import cluster.deploy.validate

FILE = Path(cluster.deploy.validate.__file__).with_name("api_enums.yaml")


def test_the_texts_that_choose_are_those_of_the_api_server(plane):
    published = {}
    for path, at in plane.http.get("/openapi/v3").raise_for_status().json()["paths"].items():
        if path.startswith(("api/v1", "apis/")):
            document = plane.http.get(at["serverRelativeURL"], follow_redirects=True).raise_for_status().json()
            for name, schema in document.get("components", {}).get("schemas", {}).items():
                for field, value in schema.get("properties", {}).items():
                    texts = value.get("enum") or value.get("items", {}).get("enum")
                    if texts:
                        published[f"{name.removeprefix('io.k8s.api.')}.{field}"] = texts
    ours = yaml.safe_load(FILE.read_bytes())
    assert ours
    assert {name: published.get(name) for name in ours} == ours
