"""`paceline k8s`: what a deployment on Kubernetes is made of."""

from __future__ import annotations

from pathlib import Path

import httpx
import typer

from cluster.deploy.chart import chart_files
from cluster.deploy.drain import drain as wait_for_requests
from cluster.deploy.kustomize import rendered_files
from cluster.deploy.ports import METRICS_PORT
from cluster.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Manifests for Kubernetes.")


@app.command()
def render(out: Path = typer.Option(Path("k8s"), help="The directory to write.")) -> None:
    """Write base, overlays, components and chart anew from the values in cluster/deploy."""
    files = rendered_files() | {f"chart/{name}": text for name, text in chart_files().items()}
    try:
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out is {str(out)!r}: cannot be written: {error.strerror}") from None
    typer.echo(f"{len(files)} files in {out}")


@app.command()
def drain(
    settle_s: float = typer.Option(5.0, min=0.0, help="Until nobody sends new requests."),
    limit_s: float = typer.Option(600.0, min=0.0, help="Longest wait in all."),
    metrics: str = typer.Option(f"http://127.0.0.1:{METRICS_PORT}/metrics", help="Of Ray on this node."),
) -> None:
    """Wait until this node's proxy carries no requests: the preStop hook of pods with gateways."""

    def read() -> str | None:
        try:
            answer = httpx.get(metrics, timeout=5.0)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == 200 else None

    done = wait_for_requests(read, settle_s, limit_s)
    typer.echo("drained" if done else f"requests go on after {limit_s:g} s")
