"""Audit log of tenant administration: one JSON line for each action. Keys appear by id only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cache_service.admin.audit_log import AuditFile, os_user
from cache_service.errors import AuditError
from cluster.errors import ConfigError


class AuditLog:
    """Opened before a change, so that no change goes unrecorded."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if it cannot be written."""
        try:
            self._file = AuditFile(path)
        except AuditError as error:
            raise ConfigError(str(error)) from None

    def write(self, time: datetime, action: str, tenant: str, changes: Mapping[str, Any]) -> None:
        """tenant: its name. Raises ConfigError."""
        line = {"time": time.isoformat(), "actor": os_user(), "action": action, "tenant": tenant, "changes": changes}
        try:
            self._file.append(line)
        except AuditError as error:
            raise ConfigError(str(error)) from None

    def close(self) -> None:
        self._file.close()
