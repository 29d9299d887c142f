"""`paceline cache serve-admin`: the administrators' server, in the foreground."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from cluster.cache.admin.service import CacheAdminService
from cluster.cache.admin.store_access import told_in_one_line
from cluster.cli.cache.options import Place, TargetOption
from cluster.cli.shared_options import with_options
from cluster.errors import ConfigError


@with_options
def serve_admin(
    place: Place,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0: any that is free.")] = 8001,
    credential_file: Annotated[
        Path | None, typer.Option(help="File with the administrators' token; by default $PACELINE_CACHE_ADMIN_TOKEN.")
    ] = None,
    certificate_file: Annotated[Path | None, typer.Option(help="For TLS, with --key-file.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="Key of the certificate.")] = None,
    target: TargetOption = None,
) -> None:
    """Serve the same actions over HTTP to holders of the administrators' credential, until Ctrl-C."""
    from actors.workers.ray_environment import is_loopback
    from cluster.cache.admin.credential import load_credential
    from cluster.cache.admin.server import AdminServerSettings
    from cluster.cache.admin.server import serve_admin as serve

    if (certificate_file is None) != (key_file is None):
        raise ConfigError("--certificate-file and --key-file go together")
    credential = load_credential(credential_file)
    listen = AdminServerSettings(host, port, certificate_file, key_file)
    if certificate_file is None and not is_loopback(host):
        typer.echo(f"no TLS: whoever sees the traffic of {host} sees the credential and the tokens", err=True)

    def ready(port: int) -> None:
        scheme = "http" if certificate_file is None else "https"
        typer.echo(f"http    {scheme}://{host}:{port}/v1/cache/namespaces")

    async def run(service: CacheAdminService) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(service, credential, listen, stop=stop, on_ready=ready)

    with told_in_one_line(), place.service(target, creates=True) as service:
        asyncio.run(run(service))
    typer.echo("stopped", err=True)
