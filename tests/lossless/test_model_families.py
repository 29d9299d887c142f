"""What the documents say of families of models is what the engine does with each of them.

All of them take half a minute on one core: each is a tiny model of a few layers, made and run in a tenth of a second.
"""

from pathlib import Path

from tests.lossless.model_families import check_all, counts_in, tables_in, tables_of

ROOT = Path(__file__).resolve().parents[2]


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
