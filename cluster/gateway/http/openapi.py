"""The OpenAPI document: FastAPI's, with the bodies that routes parse themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


def request_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is one of these."""
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"oneOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document_of(app: FastAPI, kinds: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """kinds: bodies that routes refer to with `request_body`. Made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in kinds:
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
