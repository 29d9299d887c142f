"""`paceline cache`: what is in the shared cache, what comes in, what goes out, and whether it is whole."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from rich.console import Console
from rich.table import Table

from actors.errors import InvalidRequest
from actors.models.catalog import Progress, resolve_model
from cache_service.audit_log import os_user
from cache_service.export_format import ExportHeader, encode_header, encode_piece
from cache_service.importer import ImportResult
from cache_service.purge import PurgeResult
from cache_service.store_keys import StoreKeys
from cluster.cache_admin.names import Names
from cluster.cache_admin.service import CacheAdminService, NamespaceQuery
from cluster.cache_admin.store_access import administered, told_in_one_line
from cluster.cli.progress import progress_bars
from cluster.cli.serve import default_config
from cluster.config import ClusterConfig, load_config, paceline_home
from cluster.errors import ConfigError
from cluster.printable import printable
from cluster.tenants.access import registry_path
from cluster.tenants.registry_file import read_registry

app = typer.Typer(no_args_is_help=True, help="The shared warm cache: import, export, look at, check and purge it.")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_STDOUT = Path("-")

NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="As `list` shows it; or the name of a part, which requests ask for in speculation.namespace.",
        show_default=False,
    ),
]
TenantOption = Annotated[
    str | None, typer.Option(help="Whose namespace, by the tenant's name; without, of requests without a key.")
]
FingerprintOption = Annotated[str | None, typer.Option(help="Of one model, as `list` shows it.", show_default=False)]
TargetOption = Annotated[
    str | None, typer.Option(help="The model; by default the configuration's.", show_default=False)
]
UrlOption = Annotated[
    str | None, typer.Option(help="Of the Redis or Valkey server, instead of cache.url.", show_default=False)
]
DirectoryOption = Annotated[
    Path | None, typer.Option(help="Data of a cluster's own server, instead of cache.directory.", show_default=False)
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="The cluster's configuration, whose section cache counts.", show_default=False)
]
SettingsOption = Annotated[list[str], typer.Option("--set", metavar="PATH.TO.KEY=VALUE", help="Override a setting.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]


class _Place:
    """Which cluster, and where its cache is: what the options say."""

    def __init__(self, config: Path | None, settings: list[str], url: str | None, directory: Path | None) -> None:
        overrides = list(settings)
        if url is not None and directory is not None:
            raise ConfigError("give --url or --directory, not both")
        if url is not None:
            overrides.append(f"cache.url={json.dumps(url)}")
        if directory is not None:
            overrides += ["cache.url=null", f"cache.directory={json.dumps(str(directory))}"]
        self.config: ClusterConfig = load_config(config or default_config(), overrides)

    def names(self) -> Names:
        return Names(read_registry(registry_path(self.config, paceline_home())), self.config.tenants.allow_shared)

    @contextmanager
    def service(self, target: str | None = None, progress: Progress | None = None) -> Iterator[CacheAdminService]:
        """target: of imports."""
        model = cache(lambda: _model(target or self.config.target.model, progress))
        audit_file = paceline_home() / "cache-audit.jsonl"
        with administered(self.config.cache, audit_file, f"cli {os_user()}") as administration:
            yield CacheAdminService(administration, model, self.names, self.config.cache.promotion)


@app.command("import")
def import_files(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Texts, a document each; JSON lines (.jsonl) with text, messages, prompt, token_ids or "
            "prompt_token_ids, a document a row; or exports.",
            show_default=False,
        ),
    ],
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    target: TargetOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Put documents in, to be drafted from by every router at once. What is there already is left out: repeat an import
    that was interrupted, and it goes on."""
    place = _Place(config, settings, url, directory)
    begin = time.monotonic()
    with told_in_one_line(), progress_bars() as progress, place.service(target, progress) as service:
        query = _query(namespace, tenant)
        try:
            result = service.import_documents(query, lambda reader: reader.files(files, progress))
        except KeyboardInterrupt:
            typer.echo("interrupted: what has been imported stays; the same command goes on from there", err=True)
            raise
    if as_json:
        _print_json(result)
        return
    typer.echo(f"{_imported(result)}, {time.monotonic() - begin:.0f} s", err=True)
    if result.dropped_generations:
        typer.echo("the namespace has no room for all of it: its oldest part was dropped", err=True)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="File to write, replaced if it is there; -: standard output.")],
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    text: Annotated[bool, typer.Option("--text", help="With the text of each piece, by --target's tokenizer.")] = False,
    target: TargetOption = None,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Write a namespace as JSON lines that `import` reads. They are not encrypted; the file is for its owner alone."""
    from cluster.cache_admin.documents import tokenizer_of

    place = _Place(config, settings, url, directory)
    with told_in_one_line(), progress_bars() as progress, place.service(target, progress) as service:
        found = service.export(_query(namespace, tenant, fingerprint))
        decode: Callable[[list[int]], str] | None = None
        if text:
            model = _model(target or place.config.target.model, progress)
            if model.info.tokenizer_fingerprint != tokenizer_of(found.keys.fingerprint):
                raise ConfigError(f"--text: the namespace is not in tokens of {model.info.name}; give its --target")
            decode = lambda ids: str(model.tokenizer.decode(ids, skip_special_tokens=False))  # noqa: E731
        header = ExportHeader(found.keys.fingerprint, tokenizer_of(found.keys.fingerprint), found.keys.namespace)
        with _output(out) as file:
            file.write(encode_header(header))
            for row, piece in enumerate(found.pieces):
                file.write(encode_piece(piece, decode(piece.token_ids.tolist()) if decode is not None else None))
                progress("writing", row + 1, len(found.pieces))
    num_tokens = sum(len(piece.token_ids) for piece in found.pieces)
    typer.echo(f"{len(found.pieces)} pieces, {num_tokens} tokens of {found.keys.namespace}", err=True)


@app.command("list")
def list_namespaces(
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """List namespaces with what they take in memory and how long they live without being written to."""
    with told_in_one_line(), _Place(config, settings, url, directory).service() as service:
        found = service.namespaces(fingerprint or "")
    if as_json:
        _print_json(found)
        return
    table = Table("namespace", "model", "memory", "expires in", box=None, pad_edge=False)
    for each in found:
        table.add_row(each.namespace, each.fingerprint, _size(each.memory_bytes), _age(each.expires_in_s))
    _print(table)


@app.command()
def stats(
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Count what a namespace holds, of every model that has it, and what drafts from it have earned."""
    with told_in_one_line(), _Place(config, settings, url, directory).service() as service:
        found = [service.stats(query) for query in _each(service, _query(namespace, tenant, fingerprint))]
    if as_json:
        _print_json(found)
        return
    now = int(time.time())
    table = Table("", *(each.fingerprint for each in found), box=None, pad_edge=False)
    for each_row in zip(*(_stats_rows(each, now) for each in found), strict=True):
        table.add_row(each_row[0][0], *(value for _, value in each_row))
    typer.echo(f"namespace {found[0].namespace}")
    _print(table)


@app.command()
def purge(
    namespace: NamespaceOption = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Without --namespace: all that is the tenant's own. Its name, or the id of one removed."),
    ] = None,
    fingerprint: FingerprintOption = None,
    since: Annotated[
        str | None,
        typer.Option(help="Learnt at this time or later: 2026-01-31T12:00, or so long ago: 90s, 30m, 24h, 7d."),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Learnt at this time or before.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Remove what was learnt in a namespace, of every model, or in some time. Routers stop drafting from it within a
    second. What a tenant has brought into the public pool goes with what is its own."""
    now = int(time.time())
    since_s, until_s = _time("--since", since, now), _time("--until", until, now)
    place = _Place(config, settings, url, directory)
    with told_in_one_line(), place.service() as service:
        query = _query(namespace, tenant, fingerprint)
        meant = service.to_purge(query)
        shared = place.names().shares_with(tenant) if tenant is not None and namespace is None else None
        if shared is not None:
            typer.echo(f"what tenant {tenant} shares with others is in namespace {shared}, which stays", err=True)
        if meant and not yes:
            _ask(meant, since_s is not None or until_s is not None)
        with _undisturbed():
            done = service.purge(query, since_s, until_s)  # even of nothing: the public pool may hold what was said
    if as_json:
        _print_json(done)
        return
    for result in done:
        typer.echo(_purged(result), err=True)
    if not done:
        typer.echo("there was nothing", err=True)


@app.command()
def compact(
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Fold the log of a namespace into segments now; a running cluster does so by itself."""
    with told_in_one_line(), _Place(config, settings, url, directory).service() as service:
        found = [service.compact(query) for query in _each(service, _query(namespace, tenant, fingerprint))]
    if as_json:
        _print_json(found)
        return
    for each in found:
        state = "somebody else compacts it" if each.is_busy else f"{each.folded_entries} entries in {each.folds} folds"
        typer.echo(f"{each.namespace} of {each.fingerprint}: {state}", err=True)


@app.command()
def verify(
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Check every stored object, of one namespace or of all; exit status 1 if one is not whole."""
    place = _Place(config, settings, url, directory)
    with told_in_one_line(), progress_bars() as progress, place.service() as service:
        if namespace is None and tenant is None:
            queries = _all(service, fingerprint)
        else:
            queries = _each(service, _query(namespace, tenant, fingerprint))
        found = []
        for row, query in enumerate(queries):
            found.append(service.verify(query))
            progress("checking", row + 1, len(queries))
    num_problems = sum(len(each.problems) for each in found)
    if as_json:
        _print_json(found)
    else:
        for each in found:
            for problem in each.problems:
                typer.echo(printable(f"{each.namespace} of {each.fingerprint}: {problem.kind}: {problem.detail}"))
        objects = sum(each.objects for each in found)
        typer.echo(f"{objects} objects in {len(found)} namespaces, {num_problems} problems", err=True)
    if num_problems:
        raise typer.Exit(1)


@app.command()
def migrate(
    source: Annotated[str, typer.Option("--from", help="The model whose namespace it is.")],
    namespace: NamespaceOption = None,
    tenant: TenantOption = None,
    target: TargetOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Bring a namespace of one model to another, the target: its text in the other tokenizer's tokens. The old one
    stays."""
    from cluster.cache_admin.migration import Migration

    place = _Place(config, settings, url, directory)
    with told_in_one_line(), progress_bars() as progress, place.service(target, progress) as service:
        old = _model(source, progress)
        new = _model(target or place.config.target.model, progress)
        if old.info.fingerprint == new.info.fingerprint:
            raise ConfigError(f"--from {source}: it is the target itself")
        pieces = service.export(_query(namespace, tenant, old.info.fingerprint)).pieces
        counts = None
        migrated: Iterable[Any] = pieces
        if old.info.tokenizer_fingerprint != new.info.tokenizer_fingerprint:
            migration = Migration(old.tokenizer, new.tokenizer)
            counts, migrated = migration.counts, migration.pieces(pieces, progress)
        result = service.import_documents(_query(namespace, tenant), lambda reader: migrated)
    if as_json:
        _print_json({**asdict(result), "migration": None if counts is None else asdict(counts)})
        return
    typer.echo(_imported(result), err=True)
    if counts is not None:
        left_out = counts.left_out_tokens + counts.special_tokens
        typer.echo(f"of {counts.tokens} old tokens {left_out} were no text of use", err=True)


@app.command("serve-admin")
def serve_admin(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Of HTTP; 0: any that is free.")] = 8001,
    grpc_port: Annotated[int, typer.Option(min=0, max=65_535, help="Of paceline.v1.CacheAdmin.")] = 9001,
    credential_file: Annotated[
        Path | None, typer.Option(help="The administrators' token; without, $PACELINE_CACHE_ADMIN_TOKEN.")
    ] = None,
    certificate_file: Annotated[Path | None, typer.Option(help="For TLS on both ports, with --key-file.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="Of the certificate.")] = None,
    target: TargetOption = None,
    url: UrlOption = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
) -> None:
    """Serve all of this over HTTP and gRPC, to those who have the administrators' credential, until Ctrl-C."""
    from cluster.cache_admin.credential import load_credential
    from cluster.cache_admin.server import AdminServerSettings
    from cluster.cache_admin.server import serve_admin as serve
    from cluster.ray_environment import is_loopback

    if (certificate_file is None) != (key_file is None):
        raise ConfigError("--certificate-file and --key-file go together")
    place = _Place(config, settings, url, directory)
    credential = load_credential(credential_file)
    listen = AdminServerSettings(host, port, grpc_port, certificate_file, key_file)
    if certificate_file is None and not is_loopback(host):
        typer.echo(f"no TLS: whoever sees the traffic of {host} sees the credential and the tokens", err=True)

    def ready(http: int, grpc: int) -> None:
        scheme = "http" if certificate_file is None else "https"
        typer.echo(f"http    {scheme}://{host}:{http}/v1/cache/namespaces")
        typer.echo(f"grpc    {host}:{grpc} (paceline.v1.CacheAdmin)")

    async def run(service: CacheAdminService) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(service, credential, listen, stop, ready)

    with told_in_one_line(), place.service(target) as service:
        asyncio.run(run(service))
    typer.echo("stopped", err=True)


# --- arguments


def _query(namespace: str | None, tenant: str | None, fingerprint: str | None = None) -> NamespaceQuery:
    if namespace is None and tenant is None:
        raise InvalidRequest("--namespace", None, "name one, or a --tenant; see `paceline cache list`")
    return NamespaceQuery(namespace or "", tenant or "", fingerprint or "")


def _each(service: CacheAdminService, query: NamespaceQuery) -> list[NamespaceQuery]:
    """One for each model that has the namespace."""
    return [NamespaceQuery(keys.namespace, "", keys.fingerprint) for keys in service.find(query)]


def _all(service: CacheAdminService, fingerprint: str | None) -> list[NamespaceQuery]:
    return [NamespaceQuery(each.namespace, "", each.fingerprint) for each in service.namespaces(fingerprint or "")]


def _model(target: str, progress: Progress | None):  # type: ignore[no-untyped-def]
    from cluster.cache_admin.documents import ImportModel

    return ImportModel(resolve_model(target, paceline_home(), *([progress] if progress is not None else [])))


def _time(option: str, text: str | None, now_s: int) -> int | None:
    """Unix seconds of a time, or of so long ago."""
    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if ago is not None:
        return max(0, now_s - int(ago[1]) * _SECONDS[ago[2]])
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
    """Ctrl-C in the block counts when it has ended: half a purge would leave bytes that nobody finds any more."""
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


@contextmanager
def _output(out: Path) -> Iterator[BinaryIO]:
    """A file that appears whole or not at all, for its owner alone; or standard output."""
    if out == _STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)  # with mode 0600
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, out)
        temporary = None
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


# --- what is printed


def _print_json(result: Any) -> None:
    if isinstance(result, list):
        shown: Any = [asdict(each) for each in result]
    else:
        shown = result if isinstance(result, dict) else asdict(result)
    typer.echo(json.dumps(shown, indent=2))


def _print(table: Table) -> None:
    Console(width=None if Console().is_terminal else 160, soft_wrap=True).print(table)


def _imported(result: ImportResult) -> str:
    known = f", {result.known_documents} were there already" if result.known_documents else ""
    return f"{result.documents} documents, {result.tokens} tokens, {_size(result.stored_bytes)} stored{known}"


def _purged(result: PurgeResult) -> str:
    what = "all" if result.tokens is None else f"{result.tokens} tokens"
    return f"purged {what} of {result.namespace} of {result.fingerprint}"


def _stats_rows(stats: Any, now_s: int) -> list[tuple[str, str]]:
    earnings = stats.earnings
    hit_rate, gain = earnings.hit_rate, earnings.tokens_per_round
    return [
        ("tokens", str(stats.tokens)),
        ("phrases", str(stats.phrases)),
        ("documents", str(stats.documents)),
        ("segments", f"{stats.segments} in {stats.generations} generations, {_size(stats.segment_bytes)}"),
        ("log", f"{stats.log_entries} entries"),
        ("memory", _size(stats.memory_bytes)),
        ("oldest", _age(None if stats.first_s is None else now_s - stats.first_s, "-")),
        ("newest", _age(None if stats.last_s is None else now_s - stats.last_s, "-")),
        ("expires in", _age(stats.expires_in_s)),
        ("unread", str(stats.unread)),
        ("hit rate", "-" if hit_rate is None else f"{hit_rate:.1%}"),
        ("tokens a round", "-" if gain is None else f"+{gain:.2f}"),
        ("tokens earned", str(earnings.accepted_tokens)),
    ]


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def _age(seconds: int | None, never: str = "never") -> str:
    if seconds is None:
        return never
    for unit in "dhm":
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]} {unit}"
    return f"{max(0, seconds)} s"
