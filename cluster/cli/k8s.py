"""`paceline k8s`: what a deployment on Kubernetes is made of."""

from __future__ import annotations

from pathlib import Path

import typer

from cluster.deploy.chart import chart_files
from cluster.deploy.drain import drain as wait_for_requests
from cluster.deploy.drain import metrics_reader
from cluster.deploy.kustomize import is_rendered, rendered_files
from cluster.deploy.ports import METRICS_PORT
from cluster.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Manifests for Kubernetes.")


@app.command()
def render(
    out: Path = typer.Option(Path("k8s"), help="The directory to write."),
    force: bool = typer.Option(False, "--force", help="Over files that are not of this command, too."),
) -> None:
    """Write base, overlays, components and chart anew from the values in cluster/deploy.

    Changes made by hand in what it has written are lost; it names the files that are now different.
    """
    files = rendered_files() | {f"chart/{name}": text for name, text in chart_files().items()}
    try:
        before = {name: _text(out / name) for name in files}
        foreign = [name for name, text in before.items() if text is not None and not is_rendered(name, text)]
        if foreign and not force:
            raise ConfigError(f"--out is {str(out)!r}: {', '.join(foreign)} not of this command; or give --force")
        for name, text in files.items():
            if before[name] != text:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"--out is {str(out)!r}: {where} cannot be written: {error.strerror}") from None
    for name, text in files.items():
        if before[name] not in (None, text):
            typer.echo(f"changed: {out / name}")
    typer.echo(f"{len(files)} files in {out}")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


@app.command()
def drain(
    settle_s: float = typer.Option(5.0, min=0.0, help="Until nobody sends new requests."),
    limit_s: float = typer.Option(600.0, min=0.0, help="Longest wait in all."),
    metrics: str = typer.Option(f"http://127.0.0.1:{METRICS_PORT}/metrics", help="Of Ray on this node."),
) -> None:
    """Wait until this node's proxy carries no requests: the preStop hook of pods with gateways."""

    done = wait_for_requests(metrics_reader(metrics), settle_s, limit_s)
    typer.echo("drained" if done else f"requests may go on after {limit_s:g} s")
