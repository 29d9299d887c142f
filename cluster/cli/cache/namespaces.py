"""`paceline cache list`, `stats`, `purge`, `compact` and `verify`: what is done with namespaces as wholes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer

from actors.errors import InvalidRequest
from actors.printable import printable
from cache_service.admin.administration import NamespaceStats, NamespaceSummary
from cache_service.admin.purge import PurgeResult
from cache_service.formats.earnings import Earnings
from cache_service.formats.store_keys import StoreKeys
from cluster.cache.admin.service import NamespaceQuery
from cluster.cache.admin.store_access import told_in_one_line
from cluster.cli.cache.options import FingerprintOption, Place, StoredNamespace
from cluster.cli.output import parsed_seconds, print_columns, print_json, shown_seconds, shown_size
from cluster.cli.progress import progress_bars
from cluster.cli.shared_options import JsonOption, with_options
from cluster.errors import ConfigError


@with_options
def list_namespaces(place: Place, fingerprint: FingerprintOption = None, as_json: JsonOption = False) -> None:
    """List namespaces with what they take in memory and how long they live without being written to."""
    with told_in_one_line(), place.service() as service:
        found = service.namespaces(fingerprint or "")
    if as_json:
        print_json(found)
        return
    typer.echo(f"{len(found)} namespaces {place.where}", err=True)
    rows = [(one.namespace, one.fingerprint, shown_size(one.memory_bytes), _age(one.expires_in_s)) for one in found]
    print_columns(("namespace", "model", "memory", "expires in"), rows)


@with_options
def regions(place: Place, as_json: JsonOption = False) -> None:
    """List the clusters that share what is public and what groups learn, this one first."""
    with told_in_one_line(), place.service() as service:
        found = service.regions()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one.cluster,
            one.fingerprint,
            shown_seconds(one.age_s),
            str(one.segments),
            shown_size(one.bytes),
            "itself" if one.is_own else str(one.imported_segments),
        )
        for one in found
    ]
    print_columns(("cluster", "model", "written ago", "segments", "size", "imported"), rows)


@with_options
def stats(place: Place, chosen: StoredNamespace, as_json: JsonOption = False) -> None:
    """Count what a namespace holds, of every model that has it, and what drafts from it have earned."""
    with told_in_one_line(), place.service() as service:
        found = [service.stats(query) for query in _each(service.find(chosen.stored()))]
    if as_json:
        print_json(found)
        return
    now = int(time.time())
    rows = zip(*(_stats_rows(each, now) for each in found), strict=True)
    typer.echo(f"namespace {found[0].namespace}")
    header = ("", *(each.fingerprint for each in found))
    print_columns(header, ([row[0][0], *(value for _, value in row)] for row in rows))


@dataclass(frozen=True, kw_only=True)
class PurgedNamespace(StoredNamespace):
    tenant: Annotated[
        str | None,
        typer.Option(help="Without --namespace: all that is the tenant's own. Its name, or the id of one removed."),
    ] = None


@with_options
def purge(
    place: Place,
    chosen: PurgedNamespace,
    since: Annotated[
        str | None,
        typer.Option(help="Learnt at this time or later: 2026-01-31T12:00, or so long ago: 90s, 30m, 24h, 7d."),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Learnt at this time or before.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the data of a namespace, for every model, or those of a period. Routers stop drafting from them within a
    second. Purging a tenant also resets its vote in the public pool."""
    now = int(time.time())
    since_s, until_s = _time("--since", since, now), _time("--until", until, now)
    with told_in_one_line(), place.service() as service:
        query, tenant = chosen.stored(), chosen.tenant
        meant = service.to_purge(query)
        shared = place.names().shares_with(tenant) if tenant is not None and chosen.namespace is None else None
        if shared is not None:
            typer.echo(f"what tenant {tenant} shares with others is in namespace {shared}, which stays", err=True)
        if meant and not yes:
            _ask(meant, since_s is not None or until_s is not None)
        with _undisturbed():
            done = service.purge(query, since_s, until_s)  # even if empty: the public pool may have a vote
    if as_json:
        print_json(done)
        return
    for result in done:
        typer.echo(_purged(result), err=True)
    if not done:
        typer.echo("there was nothing", err=True)


@with_options
def compact(place: Place, chosen: StoredNamespace, as_json: JsonOption = False) -> None:
    """Fold the log of a namespace into segments now; a running cluster does so by itself."""
    with told_in_one_line(), place.service() as service:
        found = [service.compact(query) for query in _each(service.find(chosen.stored()))]
    if as_json:
        print_json(found)
        return
    for each in found:
        state = "somebody else compacts it" if each.is_busy else f"{each.folded_entries} entries in {each.folds} folds"
        typer.echo(f"{each.namespace} of {each.fingerprint}: {state}", err=True)


@with_options
def verify(place: Place, chosen: StoredNamespace, as_json: JsonOption = False) -> None:
    """Check every stored object, of one namespace or of all; exit status 1 if one is not whole."""
    with told_in_one_line(), progress_bars() as progress, place.service() as service:
        if chosen.namespace is None and chosen.tenant is None:
            queries = _each(service.namespaces(chosen.fingerprint or ""))
        else:
            queries = _each(service.find(chosen.stored()))
        found = []
        for row, query in enumerate(queries):
            found.append(service.verify(query))
            progress("checking", row + 1, len(queries))
    num_problems = sum(len(each.problems) for each in found)
    if as_json:
        print_json(found)
    else:
        for each in found:
            for problem in each.problems:
                typer.echo(printable(f"{each.namespace} of {each.fingerprint}: {problem.kind}: {problem.detail}"))
        objects = sum(each.objects for each in found)
        num_others = sum(len(each.other_keys) for each in found)
        unchecked = f"; {num_others} keys of other kinds were not checked" if num_others else ""
        typer.echo(f"{objects} objects in {len(found)} namespaces, {num_problems} problems{unchecked}", err=True)
    if num_problems:
        raise typer.Exit(1)


def _each(found: Iterable[StoreKeys] | Iterable[NamespaceSummary]) -> list[NamespaceQuery]:
    return [NamespaceQuery(one.namespace, "", one.fingerprint) for one in found]


def _time(option: str, text: str | None, now_s: int) -> int | None:
    """Unix seconds of a time, or of so long ago."""
    if text is None:
        return None
    ago_s = parsed_seconds(text)
    if ago_s is not None:
        return max(0, now_s - ago_s)
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            option, text, "write a time as 2026-01-31T12:00, or so long ago as 90s, 30m, 24h, 7d"
        ) from None


def _ask(meant: list[StoreKeys], of_some_time: bool) -> None:
    what = "what was learnt then in" if of_some_time else "all of"
    if not sys.stdin.isatty():
        raise ConfigError(f"this would remove {what} {len(meant)} namespaces; say so with --yes")
    for keys in meant:
        typer.echo(f"{keys.namespace} of {keys.fingerprint}", err=True)
    typer.confirm(f"Remove {what} {len(meant)} namespaces?", abort=True, err=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: half a purge would leave data that no later purge finds."""
    interrupted = False

    def note(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


def _purged(result: PurgeResult) -> str:
    what = "all" if result.tokens is None else f"{result.tokens} tokens"
    return f"purged {what} of {result.namespace} of {result.fingerprint}"


def _stats_rows(stats: NamespaceStats, now_s: int) -> list[tuple[str, str]]:
    earnings = stats.earnings
    hit_rate, gain = earnings.hit_rate, earnings.tokens_per_round
    return [
        ("tokens", str(stats.tokens)),
        ("phrases", str(stats.phrases)),
        ("documents", str(stats.documents)),
        ("segments", f"{stats.segments} in {stats.generations} generations, {shown_size(stats.segment_bytes)}"),
        ("log", f"{stats.log_entries} entries"),
        ("memory", shown_size(stats.memory_bytes)),
        ("oldest", _age(None if stats.first_s is None else now_s - stats.first_s, "-")),
        ("newest", _age(None if stats.last_s is None else now_s - stats.last_s, "-")),
        ("expires in", _age(stats.expires_in_s)),
        ("unread", str(stats.unread)),
        ("hit rate", "-" if hit_rate is None else f"{hit_rate:.1%}"),
        ("tokens a round", "-" if gain is None else f"+{gain:.2f}"),
        ("tokens earned", str(earnings.accepted_tokens)),
        ("drafts right", _shares(earnings)),
    ]


def _shares(earnings: Earnings) -> str:
    known = {name: share for name, share in earnings.shares_right.items() if share is not None}
    return ", ".join(f"{share:.1%} where {name}" for name, share in known.items()) or "-"


def _age(seconds: int | None, never: str = "never") -> str:
    return never if seconds is None else shown_seconds(seconds)
