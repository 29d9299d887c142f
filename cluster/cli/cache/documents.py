"""`paceline cache import`, `export` and `migrate`: documents into the shared cache, out of it, and to another model."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from cache_service.admin.importer import ImportResult
from cache_service.formats.documents import Piece
from cache_service.formats.export_format import encode_header, encode_piece
from cluster.cache.admin.migration import Migration
from cluster.cache.admin.service import Export
from cluster.cache.admin.store_access import told_in_one_line
from cluster.cli.cache.options import NamespaceOptions, Place, StoredNamespace, TargetOption, model_of
from cluster.cli.output import print_json, shown_size
from cluster.cli.progress import progress_bars
from cluster.cli.shared_options import JsonOption, with_options
from cluster.errors import ConfigError
from cluster.text.documents import file_size

_STDOUT = Path("-")


@with_options
def import_files(
    place: Place,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Texts, a document each; JSON lines (.jsonl) with text, messages, prompt, token_ids or "
            "prompt_token_ids, a document a row; or exports.",
            show_default=False,
        ),
    ],
    *,
    chosen: NamespaceOptions,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put documents in, to be drafted from by every router at once. Documents that are already stored are skipped, so
    an interrupted import can be repeated."""
    begin = time.monotonic()
    for file in files:
        file_size(file)  # raises for what cannot be read, before a model is prepared and a cache created
    with told_in_one_line(), progress_bars() as progress, place.service(target, progress, creates=True) as service:
        query = chosen.query()
        try:
            result = service.import_documents(query, lambda reader: reader.files(files, progress))
        except KeyboardInterrupt:
            typer.echo("interrupted: what has been imported stays; the same command goes on from there", err=True)
            raise
    if as_json:
        print_json(result)
        return
    typer.echo(f"{_imported(result)}, {time.monotonic() - begin:.0f} s", err=True)
    if result.dropped_generations:
        typer.echo("the namespace has no room for all of it: its oldest part was dropped", err=True)


@with_options
def export(
    place: Place,
    out: Annotated[Path, typer.Option(help="File to write, replaced if it is there; -: standard output.")],
    *,
    chosen: StoredNamespace,
    text: Annotated[bool, typer.Option("--text", help="With the text of each piece, by --target's tokenizer.")] = False,
    target: TargetOption = None,
) -> None:
    """Write a namespace as JSON lines that `import` reads. They are not encrypted; the file is for its owner alone."""
    with told_in_one_line(), progress_bars() as progress, place.service(target, progress) as service:
        found = service.export(chosen.stored())
        decode: Callable[[list[int]], str] | None = None
        if text:
            model = place.model(target, progress)
            if model.info.tokenizer_fingerprint != found.header.tokenizer:
                raise ConfigError(f"--text: the namespace is not in tokens of {model.info.name}; give its --target")
            decode = lambda ids: str(model.tokenizer.decode(ids, skip_special_tokens=False))  # noqa: E731
        with _output(out) as file:
            file.write(encode_header(found.header))
            for row, piece in enumerate(found.pieces):
                file.write(encode_piece(piece, decode(piece.token_ids.tolist()) if decode is not None else None))
                progress("writing", row + 1, len(found.pieces))
    num_tokens = sum(len(piece.token_ids) for piece in found.pieces)
    typer.echo(f"{len(found.pieces)} pieces, {num_tokens} tokens of {found.keys.namespace}", err=True)
    _require_whole(found)


@with_options
def migrate(
    place: Place,
    source: Annotated[str, typer.Option("--from", help="The model whose namespace it is.")],
    *,
    chosen: NamespaceOptions,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a namespace of one model to another, the target: its text in the other tokenizer's tokens. The old one
    stays."""
    with told_in_one_line(), progress_bars() as progress, place.service(target, progress) as service:
        old, new = model_of(source, progress), place.model(target, progress)
        if old.info.fingerprint == new.info.fingerprint:
            raise ConfigError(f"--from {source}: it is the target itself")
        found = service.export(chosen.query(old.info.fingerprint))
        pieces, counts = found.pieces, None
        migrated: Iterable[Piece] = pieces
        if old.info.tokenizer_fingerprint != new.info.tokenizer_fingerprint:
            migration = Migration(old.tokenizer, new.tokenizer)
            counts, migrated = migration.counts, migration.pieces(pieces, progress)
        result = service.import_documents(chosen.query(), lambda reader: migrated)
    if as_json:
        print_json({**asdict(result), "migration": counts})
    else:
        typer.echo(_imported(result), err=True)
        if counts is not None:
            left_out = counts.left_out_tokens + counts.special_tokens
            typer.echo(f"of {counts.tokens} old tokens {left_out} were no text of use", err=True)
    _require_whole(found)


def _require_whole(found: Export) -> None:
    """Exit status 1 where something is missing from what was done."""
    if found.unread:
        typer.echo(
            f"{found.unread} objects of {found.keys.namespace} could not be read and were left out; `paceline cache "
            "verify` names them",
            err=True,
        )
        raise typer.Exit(1)


def _imported(result: ImportResult) -> str:
    known = f", {result.known_documents} were there already" if result.known_documents else ""
    return f"{result.documents} documents, {result.tokens} tokens, {shown_size(result.stored_bytes)} stored{known}"


@contextmanager
def _output(out: Path) -> Iterator[BinaryIO]:
    """A file that appears whole or not at all, for its owner alone, behind a link as well; or standard output, or what
    is there and is no file: a pipe, /dev/null."""
    if out == _STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    given, temporary = out, None
    try:
        if out.exists() and not out.is_file():
            with out.open("wb") as file:
                yield file
            return
        out = out.resolve()
        descriptor, temporary = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)  # with mode 0600
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, out)
        temporary = None
    except OSError as error:
        raise ConfigError(f"--out {given}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
