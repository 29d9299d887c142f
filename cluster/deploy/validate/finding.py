"""What a check says: problems, which know their place in a document, and findings, which also know the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cluster.deploy.validate.rules import RULES, Level

Location = tuple[str | int, ...]  # keys and indices from the top of a document


class Problem(NamedTuple):
    """A rule that one object breaks."""

    rule: str
    where: Location
    what: str
    fix: str | None = None  # instead of the rule's own
    inner: str | None = None  # the place in a text that lies inside the document, as in serveConfigV2
    inner_line: int = 0  # of that text, from 0


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A problem in a file. `line` counts from 1; of rendered manifests it is a line of what was rendered."""

    file: str
    line: int
    rule: str
    object: str  # Kind/name
    where: str
    what: str
    why: str
    fix: str
    level: Level


def finding(file: str, line: int, name: str, problem: Problem) -> Finding:
    rule = RULES[problem.rule]
    where = place(problem.where)
    if problem.inner:
        where = f"{where}: {problem.inner}"
    told, fix = problem.what, problem.fix or rule.fix
    return Finding(file, line, problem.rule, name, where=where, what=told, why=rule.why, fix=fix, level=rule.level)


def place(where: Location) -> str:
    """As in spec.containers[0].name; keys that have a dot in them are quoted."""
    text = ""
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        elif "." in str(part) or "/" in str(part):
            text += f'["{part}"]'
        else:
            text += f".{part}" if text else part
    return text
