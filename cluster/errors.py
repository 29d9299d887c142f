"""Errors of the cluster side, beside those of `actors.errors`.

PacelineError
└── ConfigError           a configuration file or a command-line setting is wrong: names path, value and remedy
"""

from __future__ import annotations

from actors.errors import PacelineError


class ConfigError(PacelineError):
    """A configuration cannot be used; the message is one line for the person who wrote it."""
