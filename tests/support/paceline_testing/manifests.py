"""Manifests that are right, of every kind that `paceline validate` looks into."""

import json
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

# As texts: what YAML anchors share would otherwise change together.
_TEXTS = {
    name: json.dumps(document)
    for name, document in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_bytes()).items()
}
VALID = tuple(_TEXTS)


def manifest(name: str) -> Manifest:
    """A new copy of the document of this name in `manifests.yaml`."""
    made: Manifest = json.loads(_TEXTS[name])
    return made


SERVE_CONFIG: str = manifest("ray_service")["spec"]["serveConfigV2"]
