"""The audit log: a JSON line for each action on the shared cache, without texts, tokens or credentials."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cache_service.errors import AuditError, CacheError


class AuditFile:
    """A file of JSON lines. Open it before an action, so that nothing happens that cannot be logged.

    Raises AuditError where it cannot be written. Thread-safe: a line is one write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AuditError(f"{path}: the audit log cannot be written: {error.strerror}") from None

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises AuditError."""
        try:
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")
            os.fsync(self._descriptor)
        except OSError as error:
            raise AuditError(f"{self._path}: the audit log cannot be written: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._descriptor)


class AuditLog:
    """Log of actions on namespaces. Raises AuditError where it cannot be written. Thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._file = AuditFile(path)
        self._clock = clock

    def write(self, actor: str, action: str, outcome: str, **fields: Any) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._file.append({"time": now, "actor": actor, "action": action, "outcome": outcome, **fields})

    @contextmanager
    def action(self, actor: str, action: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Log the start and the outcome of an action. Entries put into the yielded dictionary go into the log."""
        self.write(actor, action, "begun", **fields)
        begin = time.monotonic()
        figures: dict[str, Any] = {}
        outcome = "interrupted"
        try:
            yield figures
            outcome = "done"
        except CacheError as error:
            outcome = "failed"
            figures["reason"] = f"{type(error).__name__}: {error}"
            raise
        except Exception as error:
            outcome = "failed"
            figures["reason"] = type(error).__name__
            raise
        finally:
            elapsed_s = round(time.monotonic() - begin, 3)
            self.write(actor, action, outcome, **fields, **figures, elapsed_s=elapsed_s)

    def close(self) -> None:
        self._file.close()


def os_user() -> str:
    """The user of the process, independent of environment variables; a container's user may have no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
