"""The table of rules in docs/validate.md; `python -m cluster.deploy.validate.rules_page docs/validate.md` renews it."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.deploy.validate.rules import RULES

MARK = "<!-- What follows is made from cluster/deploy/validate/rules.toml. -->\n\n"


def as_markdown() -> str:
    """The rules as tables, one a layer."""
    parts = []
    for layer in dict.fromkeys(rule.layer for rule in RULES.values()):
        rows = [
            f"| `{name}`{' (warning)' if rule.level == 'warning' else ''} | {rule.says} | {rule.why} | {rule.fix} |"
            for name, rule in RULES.items()
            if rule.layer == layer
        ]
        head = ["| Rule | What must hold | Why | How to mend |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {layer}", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"


def with_rules(text: str) -> str:
    """A page with everything below its mark made anew."""
    head, mark, _ = text.partition(MARK)
    return head + mark + as_markdown()


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_rules(page.read_text(encoding="utf-8")), encoding="utf-8")
