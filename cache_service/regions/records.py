"""What clusters write for each other, and what a cluster remembers of it.

A cluster writes objects under its own name only: segments, named by the SHA-256 of their frames, and one listing that
names them. So clusters need no agreement, and an object that is lost, torn, old or double harms nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from cache_service.errors import FormatError
from cache_service.formats.folded_manifest import Count, Digest, FoldedManifest, Record
from cache_service.formats.frame import Content
from cache_service.formats.purged_times import FIRST_S, LAST_S
from cache_service.formats.segment import SegmentEntry

CLUSTER_PATTERN = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"

MAX_LISTED = 512
"""Segments of a listing."""

MAX_CLUSTERS = 16
"""Limit of the clusters that are read, so that their state fits into one record."""

MAX_RANGES = 32
"""Purged ranges of a label. Beyond, the closest ones are joined."""

PUBLIC_LABEL = "public"
_GROUP = "group:"

MAX_PURGED_LABELS = 1024
MAX_PURGED_RANGES = 4096
"""Purged ranges of all labels together."""

_GROUP_NAME = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"

Label = Annotated[str, msgspec.Meta(pattern=rf"^(?:{PUBLIC_LABEL}|{_GROUP}{_GROUP_NAME})\Z")]
"""What is shared, by a name that all clusters know: `public`, or `group:<name>`."""

Second = Annotated[int, msgspec.Meta(ge=FIRST_S, le=LAST_S)]
Ranges = tuple[tuple[Second, Second], ...]
"""Unix times, both inclusive."""

Refs = tuple[SegmentEntry, ...]


def group_label(group: str) -> str:
    return _GROUP + group


class Listing(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a cluster shares with the others."""

    CONTENT: ClassVar[Content] = Content.REGION_LISTING

    cluster: Annotated[str, msgspec.Meta(pattern=rf"^{CLUSTER_PATTERN}\Z")]
    generation: Count  # grows with every write
    time_s: Second  # when it was written, by that cluster's clock
    min_tenants: Count  # that must have said a phrase before it became public there
    shares: dict[Label, Refs] = msgspec.field(default_factory=dict)  # oldest first
    purged: dict[Label, Ranges] = msgspec.field(default_factory=dict)  # what it imports no more

    def check(self) -> None:
        """Limit so that the state of MAX_CLUSTERS clusters always fits into one record."""
        for what, found, limit in (
            ("segments", self.num_segments, MAX_LISTED),
            ("labels", len(self.shares), MAX_LISTED),
            ("purged labels", len(self.purged), MAX_PURGED_LABELS),
            ("purged ranges", sum(map(len, self.purged.values())), MAX_PURGED_RANGES),
        ):
            if found > limit:
                raise FormatError("oversize", f"a listing has {found} {what}; the limit is {limit}")
        for ref in (ref for refs in self.shares.values() for ref in refs):
            if not ref.first_s <= ref.last_s <= LAST_S:
                times = f"{ref.first_s} to {ref.last_s}"
                raise FormatError("garbage", f"a segment of a listing has times {times}; the limit is {LAST_S}")

    @property
    def num_segments(self) -> int:
        return sum(map(len, self.shares.values()))

    @property
    def num_bytes(self) -> int:
        return sum(ref.num_bytes for refs in self.shares.values() for ref in refs)


Held = dict[Digest, SegmentEntry | None]
"""Local segments of an imported namespace by the object that each was made of; None: nothing of it may be kept."""


class RegionsState(FoldedManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a cluster remembers, in its Redis."""

    CONTENT: ClassVar[Content] = Content.REGIONS_STATE

    own: Listing | None = None  # as last written, without what is purged
    listings: dict[str, Listing] = msgspec.field(default_factory=dict)  # the newest of each other cluster, likewise
    held: dict[str, Held] = msgspec.field(default_factory=dict)  # by namespace here, of which it is imported
    purged: dict[Label, Ranges] = msgspec.field(default_factory=dict)  # never imported again
    rules: str = ""  # by which public phrases were filtered

    @property
    def segments(self) -> Sequence[SegmentEntry]:
        return ()
