"""Checks of Redis answers, and translation of redis-py's exceptions into StoreError."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis.exceptions as redis_errors

from cache_service.errors import FormatError, StoreRefused, StoreUnavailable
from cache_service.store.connection import Client
from cache_service.store.scripts import Script

# Raised here or in redis-py for malformed answers; the last two for deeply nested arrays.
_NONSENSE = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    FormatError,
    RecursionError,
    MemoryError,
)

_OF_SENTINEL = re.compile(r"<redis\..*?>\)>\)> - ")  # object addresses before the message


@contextmanager
def faults_told() -> Iterator[None]:
    """Turn exceptions into StoreError. The server's message is left out where it might repeat data."""
    try:
        yield
    except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
        reason = _OF_SENTINEL.sub("", str(error)) + _tls_hint(error)
        raise StoreUnavailable(f"Redis is unavailable: {type(error).__name__}: {reason}"[:300]) from error
    except (redis_errors.ClusterError, redis_errors.RedisClusterException) as error:
        raise StoreUnavailable(f"Redis Cluster is unavailable: {type(error).__name__}{_tls_hint(error)}") from error
    except redis_errors.ResponseError as error:
        raise StoreRefused(f"Redis refuses: {type(error).__name__}") from error
    except redis_errors.WatchError as error:
        raise StoreUnavailable("Redis is unavailable: somebody else has changed the same key") from error
    except redis_errors.RedisError as error:
        raise StoreUnavailable(f"Redis answers nonsense: {type(error).__name__}") from error
    except _NONSENSE as error:
        raise StoreUnavailable(f"Redis answers nonsense: {type(error).__name__}") from error


def _tls_hint(error: BaseException) -> str:
    """A hint where the server does not seem to speak TLS: it timed out in the handshake or answered in plain text."""
    cause: BaseException | None = error
    while cause is not None:
        is_plain = isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
        if is_plain or (isinstance(cause, TimeoutError) and "handshake" in str(cause)):
            return "; it does not answer in TLS: for a port without it, the URL must not begin with rediss"
        cause = cause.__cause__ or cause.__context__
    return ""


def run_script(client: Client, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
    """Run by digest; the text is sent only if the server does not have it yet."""
    try:
        return client.evalsha(script.sha1, len(keys), *keys, *arguments)
    except redis_errors.NoScriptError:
        return client.eval(script.text, len(keys), *keys, *arguments)


def as_bytes(answer: Any) -> bytes:
    if not isinstance(answer, bytes):
        raise TypeError
    return answer


def as_count(answer: Any) -> int:
    number = int(answer)
    if number < 0:
        raise ValueError
    return number


def as_text(answer: Any) -> str:
    return as_bytes(answer).decode("ascii")


def as_optional_text(answer: Any) -> str | None:
    return None if answer is None else as_text(answer)
