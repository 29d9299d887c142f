"""Logging to stderr: text, or one JSON object a line, with the request id.

No prompt, answer or key is ever logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from actors.printable import printable
from cache_service.options import Options

PACKAGES = ("cluster", "actors", "cache_service")
OTHERS = ("opentelemetry",)  # libraries whose warnings matter: an unreachable collector
REQUEST_ID_HEADER = "x-request-id"

request_id: ContextVar[str] = ContextVar("paceline_request_id", default="")  # id of the call that is being answered

_POSSIBLE_ID = re.compile(r"[!-~]{1,128}")
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "request_id"}


_ENDPOINT = r"https?://[^\s/@]+(/\S*)?"


class ObservabilityConfig(Options):
    """Logs and traces. Metrics are always on."""

    log_format: Literal["text", "json"] = "text"
    """Format of log lines, which go to stderr."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level that is logged. info: a line for each request and its parts."""
    otlp_endpoint: Annotated[str | None, Field(json_schema_extra={"pattern": rf"^{_ENDPOINT}$"})] = None
    """Collector of spans, OTLP over HTTP: http://collector:4318. null: no tracing. Headers for the collector come from
    $OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are traced, unless their callers decide it."""
    round_spans: Annotated[int, Field(ge=0, le=256)] = 16
    """Rounds of a request, from the first, that have spans of their own."""

    @model_validator(mode="after")
    def _address(self) -> ObservabilityConfig:
        if self.otlp_endpoint is not None and not re.fullmatch(_ENDPOINT, self.otlp_endpoint):
            raise ValueError("otlp_endpoint must be a URL like http://collector:4318")
        return self


def request_id_of(given: str | None) -> str:
    """The client's request id, or a new one if it is missing or unfit for a log."""
    return given if given is not None and _POSSIBLE_ID.fullmatch(given) else uuid.uuid4().hex


def configure_logging(config: ObservabilityConfig, component: str) -> None:
    """Let Paceline's loggers in this process write to stderr. component: gateway, router, target or draft.

    A second call replaces the first. Other loggers are not changed.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_with_request_id)
    handler.setFormatter(JsonFormatter(component) if config.log_format == "json" else TextFormatter(component))
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    for name in PACKAGES + OTHERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(max(level, logging.WARNING) if name in OTHERS else level)


class TextFormatter(logging.Formatter):
    """One line a record. Further lines are indented, so that no message can look like another record."""

    def __init__(self, component: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {component} %(name)s [%(request_id)s] %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time_of(record)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, component, request_id, message, fields of `extra`, traceback."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "component": self._component,
            "request_id": getattr(record, "request_id", ""),
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OF_EVERY_RECORD and not name.startswith("_"):  # Ray adds private ones
                fields.setdefault(name, value)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(fields, enc_hook=repr).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):  # integers beyond 64 bits, unpaired surrogates
            return json.dumps({name: printable(str(value)) for name, value in fields.items()})


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _with_request_id(record: logging.LogRecord) -> bool:
    """Add the id of the current call, unless the record has one."""
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True
