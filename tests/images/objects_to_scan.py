"""What scanners read: the objects of every profile of the chart, and as Pods the templates that its RayService hides.

python tests/images/objects_to_scan.py DIRECTORY
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from paceline_testing.chart import PROFILES, one, profile_objects


def pods_of(service: dict[str, Any]) -> list[dict[str, Any]]:
    """A Pod of the head and of each group."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    namespace = service["metadata"]["namespace"]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**group["template"]["metadata"], "name": f"ray-{name}", "namespace": namespace},
            "spec": group["template"]["spec"],
        }
        for name, group in groups.items()
    ]


def main(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name in PROFILES:
        objects = profile_objects(name)
        text = yaml.safe_dump_all([*objects, *pods_of(one(objects, "RayService"))], sort_keys=False)
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
