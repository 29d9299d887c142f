"""Connection settings and encryption keys of the shared cache, with secrets from files or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from actors.home import paceline_home
from cache_service.errors import SettingError
from cache_service.formats.key_ring import KeyRing, parse_keys
from cache_service.store.connection import ConnectionSettings
from cluster.config import NO_CACHE, CacheConfig
from cluster.errors import ConfigError

PASSWORD_VARIABLE = "PACELINE_CACHE_PASSWORD"
SENTINEL_PASSWORD_VARIABLE = "PACELINE_CACHE_SENTINEL_PASSWORD"
KEYS_VARIABLE = "PACELINE_CACHE_KEYS"


def connection_settings(config: CacheConfig) -> ConnectionSettings | None:
    """Settings for the server at `cache.url`; None if it names none. Raises ConfigError, which shows no secret."""
    if config.url is None or config.url == NO_CACHE:
        return None
    try:
        return ConnectionSettings(
            config.url,
            username=config.username,
            password=_secret("password_file", config.password_file, PASSWORD_VARIABLE),
            ca_file=config.ca_file,
            certificate_file=config.certificate_file,
            key_file=config.key_file,
            sentinel_username=config.sentinel_username,
            sentinel_password=_secret(
                "sentinel_password_file", config.sentinel_password_file, SENTINEL_PASSWORD_VARIABLE
            ),
        )
    except SettingError as error:
        raise ConfigError(f"cache.{error}") from None


def key_ring(config: CacheConfig) -> KeyRing | None:
    """Keys that encrypt stored data; None: no encryption. Raises ConfigError, which shows no secret."""
    text = _secret("encryption_file", config.encryption_file, KEYS_VARIABLE)
    if text is None:
        return None
    source = f"cache.encryption_file {config.encryption_file}" if config.encryption_file else f"${KEYS_VARIABLE}"
    try:
        return parse_keys(text)
    except SettingError as error:
        raise ConfigError(f"{source}: {error}") from None


def data_directory(config: CacheConfig) -> Path:
    """Where the embedded server keeps its data."""
    return config.directory or paceline_home() / "cache"


def _secret(field: str, path: Path | None, variable: str) -> str | None:
    return read_secret(f"cache.{field} is {str(path)!r}", path, variable)


def read_secret(where: str, path: Path | None, variable: str) -> str | None:
    """The stripped contents of a file, else the environment variable, else None. Raises ConfigError naming `where`."""
    if path is None:
        return os.environ.get(variable) or None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: it must be text in UTF-8") from None
