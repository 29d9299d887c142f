"""`paceline cache`: what is in the shared cache, what comes in, what goes out, and whether it is whole."""

from __future__ import annotations

import typer

from cluster.cli.cache import admin_server, documents, namespaces

app = typer.Typer(no_args_is_help=True, help="The shared warm cache: import, export, look at, check and purge it.")
app.command("import")(documents.import_files)
app.command("export")(documents.export)
app.command("list")(namespaces.list_namespaces)
app.command("regions")(namespaces.regions)
app.command("stats")(namespaces.stats)
app.command("purge")(namespaces.purge)
app.command("compact")(namespaces.compact)
app.command("verify")(namespaces.verify)
app.command("migrate")(documents.migrate)
app.command("serve-admin")(admin_server.serve_admin)
