"""docs/configuration.md is what the configuration's records say."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date(run):
    status, out, err = run("config", "reference")
    assert (status, err) == (0, "")
    assert out == PAGE.read_text(encoding="utf-8"), "write it anew: paceline config reference > docs/configuration.md"


@pytest.mark.parametrize("section", ["speculation", "autoscaling", "router", "gateway", "tenants", "cache"])
def test_every_key_has_a_meaning(section):
    record = getattr(ClusterConfig(), section)
    without = [name for name, field in type(record).model_fields.items() if not field.description]
    assert without == []
