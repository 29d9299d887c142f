"""The page at / and the description of the API at /docs: static, each in one response.

The sources are the files beside this one. The gateway joins them once, so that a browser paints after one request, and
the policy names the hashes of the scripts and styles that may run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

_FOLDER = Path(__file__).parent
_DOCUMENTS = {"/": "index.html", "/docs": "docs.html"}
PAGE_PATHS = frozenset(_DOCUMENTS)  # without a key: they hold nothing of the cluster

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_LINK = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">|<script src="([a-z]+\.js)"></script>')


@dataclass(frozen=True, slots=True)
class InlinedDocument:
    html: str
    policy: str  # Content-Security-Policy


def add_page_routes(app: FastAPI) -> None:
    for path, name in _DOCUMENTS.items():
        _add_route(app, path, inlined(_FOLDER / name))


def _add_route(app: FastAPI, path: str, document: InlinedDocument) -> None:
    headers = {**_HEADERS, "Content-Security-Policy": document.policy}

    @app.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(document.html, headers=headers, media_type="text/html; charset=utf-8")


def inlined(path: Path) -> InlinedDocument:
    """The document with the style sheets and scripts beside it in place of its links to them."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def content_of(link: re.Match[str]) -> str:
        kind = "style" if link[1] else "script"
        content = (path.parent / (link[1] or link[2])).read_text(encoding="utf-8")
        if f"</{kind}" in content:
            raise ValueError(f"{link[1] or link[2]} has </{kind} in it, which would end it there")
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{content}</{kind}>"

    html = _LINK.sub(content_of, path.read_text(encoding="utf-8"))
    return InlinedDocument(html, _policy(hashes["script"], hashes["style"]))


def _policy(scripts: list[str], styles: list[str]) -> str:
    """Nothing is loaded but the page's own requests, and no text becomes HTML (`require-trusted-types-for`)."""
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        "style-src": " ".join(styles),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{rule} {value}" for rule, value in rules.items())
