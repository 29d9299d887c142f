"""Messages for paths that there are not, and for methods that a path does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from cluster.validation import MAX_SHOWN_CHARS

_LEAST_LIKENESS = 0.7


def no_route(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """Names the path, and the nearest route."""
    method, path = scope["method"], str(scope["path"])
    message = f"there is no {path[:MAX_SHOWN_CHARS]} here"
    known = {route.path: route for route in routes if isinstance(route, Route) and "{" not in route.path}
    # If two paths are equally near, the one that accepts the method comes first.
    ordered = sorted(known, key=lambda one: method not in _methods(known[one]))
    found = difflib.get_close_matches(path[:MAX_SHOWN_CHARS].rstrip("/"), ordered, n=1, cutoff=_LEAST_LIKENESS)
    if not found:
        return f"{message}; GET /openapi.json lists what there is"
    return f"{message}; did you mean {_methods(known[found[0]])[0]} {found[0]}?"


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """Methods of a path, in alphabetical order."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found.update(_methods(route))
    return sorted(found)


def _methods(route: Route) -> list[str]:
    return sorted(route.methods or ("GET",))
