"""Prints the planted mistakes, who finds them, and the counts:

PYTHONPATH=.:tests/support python -m paceline_testing.mistake_table [DIRECTORY OF DEFINITIONS]
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.deploy.validate.check import check_manifest
from cluster.deploy.validate.crd_schemas import CrdSchemas
from cluster.deploy.validate.documents import read_documents
from cluster.deploy.validate.schemas import Schemas
from cluster.deploy.validate.sets import check_set
from paceline_testing.manifests import VALID, deny_all
from paceline_testing.planted_mistakes import MISTAKES, Manifest


def main(crds: Path | None) -> None:
    schemas = Schemas(CrdSchemas(crds) if crds is not None else None)

    def found(manifest: Manifest) -> list[str]:
        documents, _ = read_documents("x.yaml", _dumped(manifest))
        rules = [problem.rule for document in documents for problem in check_manifest(document.value, schemas)]
        return rules + [problem.rule for _, problem in check_set(documents)]

    num_found = num_missed_by_schemas = 0
    print("| mistake | in a | rule | by schemas |\n| --- | --- | --- | --- |")
    for mistake in MISTAKES:
        manifest = mistake.make()
        by_schemas = bool(list(schemas.check(manifest)))
        num_missed_by_schemas += not by_schemas
        num_found += mistake.rule in found(manifest)
        print(f"| {mistake.name} | {manifest['kind']} | {mistake.rule} | {'found' if by_schemas else 'missed'} |")
    alarms = sum(bool(found(make())) for make in VALID if make is not deny_all)
    print(f"\n{num_found} of {len(MISTAKES)} found; schemas alone miss {num_missed_by_schemas}")
    print(f"{alarms} of {len(VALID) - 1} right manifests flagged")


def _dumped(manifest: Manifest) -> str:
    import yaml

    return str(yaml.safe_dump(manifest, sort_keys=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
