"""What clients can do, as a table for a page."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clients.running import Result

COLUMNS = ("plain", "stream", "tools forced", "tools auto", "tools streamed", "JSON schema", "logprobs")
BEGIN, END = "<!-- table of clients -->", "<!-- end of table -->"


def table_of(results: Sequence[Result]) -> str:
    """A Markdown table: a row for each client; abilities that have no column are named in the last one."""
    rows = [["client", "versions", *COLUMNS, "also"], ["---"] * (len(COLUMNS) + 3)]
    for result in results:
        versions = ", ".join(f"{name} {version}" for name, version in result.client.pins().items())
        others = [name if not error else f"{name} (fails)" for name, error in result.errors.items()]
        others = [name for name in others if name.removesuffix(" (fails)") not in COLUMNS]
        rows.append(
            [f"`{result.client.name}`", versions, *(_mark(result, column) for column in COLUMNS), ", ".join(others)]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_table(page: str, table: str) -> str:
    """The page with this table between its two marks. Raises ValueError where they are missing."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _mark(result: Result, ability: str) -> str:
    if ability not in result.errors:
        return ""
    return "fails" if result.errors[ability] else "yes"
