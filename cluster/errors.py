"""Errors of the cluster side, beside those of `actors.errors`."""

from __future__ import annotations

from actors.errors import PacelineError


class ConfigError(PacelineError):
    """A configuration file or a command-line setting cannot be used. The message is one line for the person who wrote
    it; it names path, value and remedy."""
