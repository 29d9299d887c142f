"""Decides what is shared, accepted, wanted and kept, in pure functions."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cache_service.errors import FormatError
from cache_service.formats.documents import Piece, content_id
from cache_service.formats.purged_times import FIRST_S, PurgedTimes
from cache_service.formats.segment import SegmentEntry
from cache_service.promotion.promotion_gate import Blocks
from cache_service.regions.records import (
    MAX_CLUSTERS,
    MAX_LISTED,
    MAX_RANGES,
    PUBLIC_LABEL,
    Held,
    Listing,
    Ranges,
    Refs,
)

CLOCK_MARGIN_S = 1
"""Writers of a cluster use its clock up to a round trip."""

MAX_AHEAD_S = 3600
"""Most that another cluster's clock may be ahead: a purge here reaches to the newest time that was read there."""


@dataclass(frozen=True, slots=True)
class RegionTerms:
    """What the registry of tenants and the configuration of a cluster allow now."""

    namespaces: Mapping[str, str]  # local ones, by label
    min_tenants: int  # that a public phrase must have had
    max_tokens: int  # of a public phrase
    blocks: Blocks  # tokens of a public phrase that may not be public here
    rules: str  # names what `blocks` and max_tokens forbid, so that a change is noticed


def newest_within(shares: Mapping[str, Sequence[SegmentEntry]], max_bytes: int) -> dict[str, Refs]:
    """The newest segments that fit into max_bytes and MAX_LISTED, oldest first. The oldest are left out, whatever their
    label."""
    ordered = sorted(
        ((ref, label) for label, refs in shares.items() for ref in refs),
        key=lambda one: (-one[0].last_s, one[0].digest),
    )
    chosen: dict[str, list[SegmentEntry]] = {label: [] for label in shares}
    room = max_bytes
    for ref, label in ordered[:MAX_LISTED]:
        room -= ref.num_bytes
        if room < 0:
            break
        chosen[label].append(ref)
    return {label: tuple(reversed(refs)) for label, refs in chosen.items()}


def accepted(
    known: Mapping[str, Listing], found: Iterable[Listing], own: str, now_s: int, keep_s: int
) -> dict[str, Listing]:
    """The newest listing of each other cluster. One that was not found stays, until nothing has been written for
    keep_s. Beyond MAX_CLUSTERS, new ones are left out, so that none displaces another."""
    newest = dict(known)
    for listing in found:
        if listing.cluster not in newest or listing.generation > newest[listing.cluster].generation:
            newest[listing.cluster] = listing
    alive = {name for name, listing in newest.items() if name != own and listing.time_s >= now_s - keep_s}
    return {name: newest[name] for name in sorted(alive, key=lambda name: (name not in known, name))[:MAX_CLUSTERS]}


def to_read(clusters: Sequence[str], own: str, known: Container[str]) -> list[str]:
    """Other clusters whose listings are read now: the known ones, and at most MAX_CLUSTERS more, by chance: among any
    number of folders without a listing, all have their turn."""
    heard = [name for name in clusters if name != own and name in known]
    new = [name for name in clusters if name != own and name not in known]
    return heard + random.sample(new, min(len(new), MAX_CLUSTERS))


def check_clock(listing: Listing, now_s: int) -> None:
    """Raises FormatError for a listing from the future, which would outlast all that its cluster writes."""
    limit_s = now_s + MAX_AHEAD_S
    for name, found, limit in (("time_s", listing.time_s, limit_s), ("generation", listing.generation, 1000 * limit_s)):
        if found > limit:
            raise FormatError("oversize", f"{name} of a listing is {found}; the limit is {limit}, by the clock here")


def next_generation(last: Listing | None, now_ms: int) -> int:
    """Grows, but not beyond what others accept: the clock may have been wrong for a while."""
    return max(now_ms, 0 if last is None else min(last.generation + 1, now_ms + 1000 * MAX_AHEAD_S))


def wanted(listings: Mapping[str, Listing], terms: RegionTerms, max_bytes: int) -> dict[str, list[tuple[str, Refs]]]:
    """By label, what to import from each cluster. All get equal shares of max_bytes, so that none displaces another."""
    found: dict[str, list[tuple[str, Refs]]] = {label: [] for label in terms.namespaces}
    for name, listing in sorted(listings.items()):
        allowed = {
            label: refs
            for label, refs in listing.shares.items()
            if label in terms.namespaces and (label != PUBLIC_LABEL or listing.min_tenants >= terms.min_tenants)
        }
        for label, refs in newest_within(allowed, max_bytes // len(listings)).items():
            found[label].append((name, refs))
    return found


def forgotten(known: Ranges, noted: PurgedTimes, since_s: int, listings: Iterable[Listing]) -> Ranges:
    """Purged ranges with those that are noted now. since_s: when the notes were last looked at.

    A range that ends later reaches up to now. Imported text has the times of other clusters' clocks, which may be
    ahead: such a range is extended to the last listings that were read.
    """
    last_s = max((listing.time_s + CLOCK_MARGIN_S for listing in listings), default=FIRST_S)
    ranges = set(known)
    for purged in noted.ranges:
        until_s = max(purged.until_s, last_s) if purged.until_s >= since_s else purged.until_s
        ranges.add((purged.since_s, until_s))
    return joined(ranges)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union, sorted. Beyond MAX_RANGES, the smallest gaps are closed."""
    result: list[tuple[int, int]] = []
    for since_s, until_s in sorted(ranges):
        if result and since_s <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], until_s))
        else:
            result.append((since_s, until_s))
    while len(result) > MAX_RANGES:
        gaps = [after[0] - before[1] for before, after in pairwise(result)]
        at = gaps.index(min(gaps))
        result[at : at + 2] = [(result[at][0], result[at + 1][1])]
    return tuple(result)


def covers(ranges: Ranges, time_s: int) -> bool:
    return any(since_s <= time_s <= until_s for since_s, until_s in ranges)


def hides(ranges: Ranges, ref: SegmentEntry) -> bool:
    """Whether all of a segment is purged."""
    return any(since_s <= ref.first_s and ref.last_s <= until_s for since_s, until_s in ranges)


def untouched(held: Held, purged: Ranges) -> Held:
    """The listing without segments that contain data of a purged time; these are rebuilt."""
    return {
        digest: entry
        for digest, entry in held.items()
        if entry is None or not any(since <= entry.last_s and entry.first_s <= until for since, until in purged)
    }


def neutral(pieces: Iterable[Piece]) -> list[Piece]:
    """Public phrases with ids that do not depend on a cluster's secret."""
    return [replace(piece, document_id=content_id(piece.token_ids)) for piece in pieces]


def kept(pieces: Iterable[Piece], label: str, purged: Ranges, terms: RegionTerms, listed_s: int) -> list[Piece]:
    """The pieces that may be imported. Segments dated after listed_s, their cluster's clock, are left out: a purge
    could not distinguish them from later data."""
    return [
        piece
        for piece in pieces
        if piece.time_s <= listed_s + CLOCK_MARGIN_S
        and not covers(purged, piece.time_s)
        and (label != PUBLIC_LABEL or _may_be_public(piece, terms))
    ]


def _may_be_public(piece: Piece, terms: RegionTerms) -> bool:
    tokens = np.asarray(piece.token_ids, np.int64)
    return len(tokens) <= terms.max_tokens and not terms.blocks(tokens).any()
