"""`paceline k8s`: what pods call."""

from __future__ import annotations

import typer

from cluster.deploy.drain import drain as wait_for_requests
from cluster.deploy.drain import metrics_reader

RAY_METRICS_PORT = 8080  # of every pod, as the chart has it

app = typer.Typer(no_args_is_help=True, help="What pods on Kubernetes call.")


@app.callback()
def _group() -> None:
    """Typer makes a single command of an application with one, unless it has a callback."""


@app.command()
def drain(
    settle_s: float = typer.Option(5.0, min=0.0, help="Until nobody sends new requests."),
    limit_s: float = typer.Option(600.0, min=0.0, help="Longest wait in all."),
    metrics: str = typer.Option(f"http://127.0.0.1:{RAY_METRICS_PORT}/metrics", help="Of Ray on this node."),
) -> None:
    """Wait until this node's proxy carries no requests: the preStop hook of pods with gateways."""
    done = wait_for_requests(metrics_reader(metrics), settle_s, limit_s)
    typer.echo("drained" if done else f"requests may go on after {limit_s:g} s")
