"""Errors of the cache service.

CorpusError           a corpus index cannot be built, written or read
"""

from __future__ import annotations


class CorpusError(Exception):
    """A corpus index cannot be used; the message is one line that names the path and the reason."""
