"""Tries every family of text models that the installed transformers has, and prints what the engine makes of each.

python -m tests.lossless.model_families [--write docs/models.md]
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from actors.engine.model_check import ModelCheck, check_model_type

MODEL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES})
BEGIN, END = "<!-- families of models -->", "<!-- end of families -->"
_COUNTS = re.compile(r"(\d+) of the (\d+) model types[^.]*?(\d+)[^.]*?(\d+)")


def check_all() -> dict[str, ModelCheck]:
    """By model type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that are made, about themselves
        return {model_type: check_model_type(model_type) for model_type in MODEL_TYPES}


def tables_of(checks: dict[str, ModelCheck]) -> str:
    """Markdown: the counts, the families that are computed, and the others with their reasons."""
    counts = Counter(check.outcome for check in checks.values())
    parts = [
        f"{counts['exact']} of the {len(checks)} model types are exact, {counts['chain only']} more are so with chains "
        f"only, {counts['refused']} are refused, {counts['not tried']} were not tried.",
    ]
    for outcome in ("exact", "chain only"):
        names = [f"`{name}`" for name, check in checks.items() if check.outcome == outcome]
        parts.append(f"## {outcome.capitalize()}\n\n" + ", ".join(names))
    for outcome in ("refused", "not tried", "wrong"):
        rows = [f"| `{name}` | {check.reason} |" for name, check in checks.items() if check.outcome == outcome]
        if rows:
            parts.append(f"## {outcome.capitalize()}\n\n| model type | reason |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def tables_in(page: str) -> str:
    """What a page has between its two marks. Raises ValueError where they are missing."""
    return page[_place(page)].strip()


def with_tables(page: str, tables: str) -> str:
    place = _place(page)
    return f"{page[: place.start]}\n\n{tables}\n\n{page[place.stop :]}"


def counts_in(page: str) -> tuple[str, ...]:
    """The exact model types, all, those with chains only, and the refused ones, as a page's text names them first.
    Raises ValueError if it does not."""
    found = _COUNTS.search(page)
    if found is None:
        raise ValueError(f"the page does not say {_COUNTS.pattern!r}")
    return found.groups()


def _place(page: str) -> slice:
    begin, end = page.find(BEGIN), page.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return slice(begin + len(BEGIN), end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page whose tables are renewed")
    page = parser.parse_args().write
    checks = check_all()
    tables = tables_of(checks)
    print(tables)
    if page is not None:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return int(any(check.outcome == "wrong" for check in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
