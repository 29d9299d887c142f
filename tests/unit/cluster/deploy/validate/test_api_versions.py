"""The API versions that are gone, against the newest schemas of Kubernetes."""

import pytest

from cluster.deploy.validate.api_versions import _REMOVED, check_api_version

pytest.importorskip("kubernetes_validate")


def test_what_is_removed_is_gone_and_what_took_its_place_is_there():
    from cluster.deploy.validate.core_schemas import CoreSchemas

    schemas = CoreSchemas("")
    for (version, kind), (_, instead) in _REMOVED.items():
        assert schemas.of(version, kind) is None, (version, kind)
        assert "/" not in instead or schemas.of(instead, kind) is not None, (instead, kind)
        (problem,) = check_api_version({"apiVersion": version, "kind": kind})
        assert problem.rule == "api-removed"
        assert instead in problem.what
