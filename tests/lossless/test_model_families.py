"""What the documents say of families of models is what the engine does with each of them.

Each is a tiny model of a few layers, made and run in a tenth of a second; all of them take half a minute on one core.
"""

from pathlib import Path

import pytest

from tests.lossless.model_families import MODEL_TYPES, check_all, counts_in, outcomes_in, tables_in, tables_of

ROOT = Path(__file__).resolve().parents[2]


def test_every_fourth_family_is_what_the_page_of_models_says():
    checks = check_all(MODEL_TYPES[::4])
    outcomes = outcomes_in((ROOT / "docs" / "models.md").read_text(encoding="utf-8"))
    assert sorted(outcomes) == MODEL_TYPES
    assert {name: check.outcome for name, check in checks.items()} == {name: outcomes[name] for name in checks}
    assert {"exact", "chain only", "refused"} <= {check.outcome for check in checks.values()}


@pytest.mark.slow
def test_the_page_of_models_says_what_the_engine_does():
    checks = check_all()
    assert not [name for name, check in checks.items() if check.outcome == "wrong"]
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert tables_of(checks) == tables_in(page), (
        "renew it: python -m tests.lossless.model_families --write docs/models.md"
    )


def test_the_readme_gives_the_same_counts():
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert counts_in((ROOT / "README.md").read_text(encoding="utf-8")) == counts_in(models)
