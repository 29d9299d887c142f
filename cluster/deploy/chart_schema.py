"""The part of the Helm chart's schema that is the configuration's own: `config` of its values.

`python -m cluster.deploy.chart_schema k8s/chart/values.schema.json` renews it; the rest of the file is written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig

_LEFT_OUT = frozenset(("title", "default"))  # values.yaml has what differs; docs/configuration.md tells the defaults


def config_definitions() -> dict[str, Any]:
    """JSON schema of `ClusterConfig` and of its sections, by name."""
    schema = ClusterConfig.model_json_schema()
    sections = schema.pop("$defs")
    found: dict[str, Any] = _without_titles({"ClusterConfig": schema, **sections})
    return found


def with_config(text: str) -> str:
    """The text of `values.schema.json` with `$defs` renewed."""
    schema = json.loads(text)
    schema["$defs"] = config_definitions()
    return json.dumps(schema, indent=1) + "\n"


def _without_titles(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_titles(each) for each in value]
    if not isinstance(value, dict):
        return value
    # A property may have such a name itself, and is then a schema.
    kept = {
        key: each for key, each in value.items() if key not in _LEFT_OUT or (isinstance(each, dict) and key == "title")
    }
    return {key: _without_titles(each) for key, each in kept.items()}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_config(path.read_text()))
