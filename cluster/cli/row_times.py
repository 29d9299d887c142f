"""Times of forwards on the command line, as measured elsewhere."""

from __future__ import annotations

from actors.errors import InvalidRequest


def parse_row_times(text: str) -> tuple[tuple[int, float], ...]:
    """`1:36,8:42`, rows and milliseconds -> (rows, seconds). Raises InvalidRequest."""
    points = []
    for point in text.split(",") if text else ():
        rows, _, milliseconds = point.partition(":")
        try:
            points.append((int(rows), float(milliseconds) / 1000))
        except ValueError:
            points.append((0, 0.0))
    if any(rows < 1 or not 0.0 < seconds < float("inf") for rows, seconds in points):
        raise InvalidRequest("--row-times", text, "write rows:milliseconds, comma-separated, both above 0")
    return tuple(points)
