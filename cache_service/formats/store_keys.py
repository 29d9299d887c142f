"""Names of a namespace's keys in Redis.

The braces put all keys of a namespace into one hash slot, so scripts and transactions over them work on Redis Cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cache_service.errors import SettingError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_KEY = re.compile(rb"sd:\{([A-Za-z0-9_.-]{1,128}):([A-Za-z0-9_.-]{1,128})\}:(.+)")


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """Keys `sd:{<fingerprint>:<namespace>}:<kind>`, or `...:<area>:<kind>` for data beside the tokens.

    fingerprint identifies target weights, tokenizer and chat template. Each part is 1-128 characters of A-Z a-z 0-9
    _ . -, else SettingError; area may be empty. All areas share one epoch, so a new epoch ends them all.
    """

    fingerprint: str
    namespace: str
    area: str = ""  # has its own log, manifest, lease, fence and segments

    def __post_init__(self) -> None:
        for field in ("fingerprint", "namespace", "area"):
            if (field != "area" or self.area) and not _NAME.fullmatch(getattr(self, field)):
                raise SettingError(field, getattr(self, field), "it must be 1-128 characters of A-Z a-z 0-9 _ . -")

    def __str__(self) -> str:
        """For messages."""
        return f"{self.namespace} {self.area}".rstrip()

    def beside(self, area: str) -> StoreKeys:
        return replace(self, area=area)

    def key(self, kind: str) -> str:
        place = f"{self.area}:{kind}" if self.area else kind
        return f"sd:{{{self.fingerprint}:{self.namespace}}}:{place}"

    @property
    def epoch(self) -> str:
        """String: random, written once per data set; expires when the namespace is no longer written."""
        return f"sd:{{{self.fingerprint}:{self.namespace}}}:epoch"

    @property
    def log(self) -> str:
        """Stream of entries, one field "e" each."""
        return self.key("log")

    @property
    def manifest(self) -> str:
        """Hash: body, version, token (of the fence), folded (stream id)."""
        return self.key("manifest")

    @property
    def lease(self) -> str:
        """String with a time to live: the compactor that may fold."""
        return self.key("lease")

    @property
    def fence(self) -> str:
        """Counter of granted leases: the fencing token."""
        return self.key("fence")

    @property
    def purges(self) -> str:
        """String with a time to live: encoded `purged_times.PurgedTimes`."""
        return self.key("purges")

    @property
    def earnings(self) -> str:
        """Hash: the fields of `earnings.Earnings`."""
        return self.key("earnings")

    def segment(self, digest: str) -> str:
        """String with a time to live: the segment with this SHA-256, in hex."""
        return self.key(f"segment:{digest}")


def parse_key(name: bytes) -> tuple[StoreKeys, str] | None:
    """Namespace and kind of a key; None if it is no key of the shared cache."""
    match = _KEY.fullmatch(name)
    if match is None or not match[3].isascii():
        return None
    return StoreKeys(match[1].decode(), match[2].decode()), match[3].decode()
