"""`paceline tenant`: who may call a cluster, how much, and with whom they share warm caches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python

from actors.errors import InvalidRequest
from actors.home import paceline_home
from cache_service.errors import CacheError
from cluster.cli.output import parsed_seconds, print_columns, shown_seconds
from cluster.cli.shared_options import ClusterOptions, JsonOption, with_options
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.tenants.access import registry_path
from cluster.tenants.administration import LIMITS, IssuedKey, TenantAdministration
from cluster.tenants.registry import StoredTenant, now_utc

app = typer.Typer(no_args_is_help=True, help="API keys, limits and sharing of those who call a cluster.")

_NO_LIMIT = "none"

NameArgument = Annotated[str, typer.Argument(help="Of the tenant: a-z, 0-9 and . _ - inside, up to 63 characters.")]


@dataclass(frozen=True, kw_only=True)
class TenantOptions:
    """Limits and policy of a tenant. None: not given."""

    requests_per_second: Annotated[str | None, typer.Option(metavar="NUMBER|none")] = None
    tokens_per_minute: Annotated[str | None, typer.Option(metavar="NUMBER|none", help="Of prompts and answers.")] = None
    max_concurrent: Annotated[str | None, typer.Option(metavar="NUMBER|none", help="Answers under way at a time.")] = (
        None
    )
    cache_bytes: Annotated[
        str | None, typer.Option(metavar="NUMBER|none", help="Of what its own namespaces have learnt.")
    ] = None
    weight: Annotated[
        str | None, typer.Option(metavar="NUMBER|none", help="Share of tokens beside other tenants; none is 1.")
    ] = None
    service_class: Annotated[
        str | None, typer.Option(help="Of requests without service_tier: interactive or batch.")
    ] = None
    policy: Annotated[
        str | None, typer.Option(help="With whom warm caches are shared: isolated, group, promoted, shared.")
    ] = None
    group: Annotated[
        str | None, typer.Option(help="Name of the trust group, for policy group; else it is by cache_salt.")
    ] = None

    def fields(self) -> dict[str, object]:
        """What was given. Limits are numbers, or None for `none`. Raises InvalidRequest."""
        given = {name: text for name, text in asdict(self).items() if text is not None}
        return {name: _limit(name, text) if name in LIMITS else text for name, text in given.items()}


@app.command()
@with_options
def add(name: NameArgument, tenant: TenantOptions, as_json: JsonOption = False, *, cluster: ClusterOptions) -> None:
    """Add a tenant and print its API key, once: only a digest is kept. Running gateways know it in a second."""
    _show_key(_administration(cluster.load()).add(name, tenant.fields()), as_json)


@app.command("list")
@with_options
def list_tenants(as_json: JsonOption = False, *, cluster: ClusterOptions) -> None:
    """List tenants and their keys: ids, ages and last 4 characters."""
    tenants = _administration(cluster.load()).tenants()
    now = now_utc()
    if as_json:
        typer.echo(json.dumps([_described(tenant, now) for tenant in tenants], indent=2))
        return
    rows = []
    for tenant in tenants:
        limits = [f"{key} {value:g}" for key, value in asdict(tenant.limits).items() if value is not None]
        limits += ["class batch"] if tenant.service_class == "batch" else []
        keys = [_key_line(key, now) for key in _described(tenant, now)["keys"]]
        state = "disabled" if tenant.disabled else "enabled"
        policy = tenant.policy if tenant.group is None else f"{tenant.policy} {tenant.group}"
        rows.append((tenant.name, state, policy, "\n".join(limits) or "none", "\n".join(keys) or "none"))
    print_columns(("tenant", "state", "policy", "limits", "keys"), rows)


@app.command()
@with_options
def rotate(
    name: NameArgument,
    keep_old_for: str = typer.Option("24h", help="How long the keys before go on: 90s, 30m, 24h, 7d; 0: no longer."),
    as_json: JsonOption = False,
    *,
    cluster: ClusterOptions,
) -> None:
    """Print a new API key for a tenant, once; those before expire."""
    delay = _duration("--keep-old-for", keep_old_for)
    _show_key(_administration(cluster.load()).rotate(name, delay), as_json)


@app.command()
@with_options
def remove(
    name: NameArgument,
    key: str = typer.Option(None, metavar="ID", help="One of its keys alone, by the id that `list` shows."),
    *,
    cluster: ClusterOptions,
) -> None:
    """Remove a tenant with all its keys, or one key."""
    with _changing(cluster.load()) as administration:
        administration.remove(name, key)
    typer.echo(f"removed {name if key is None else f'key {key} of {name}'}", err=True)


@app.command("set")
@with_options
def change(
    name: NameArgument,
    tenant: TenantOptions,
    disabled: bool = typer.Option(
        None, "--disabled/--enabled", help="Whether its keys are refused.", show_default=False
    ),
    *,
    cluster: ClusterOptions,
) -> None:
    """Change limits, policy or state of a tenant; what is not named stays. `none` takes a limit away."""
    fields = tenant.fields()
    if disabled is not None:
        fields["disabled"] = disabled
    if not fields:
        raise ConfigError("name at least one thing to change; see `paceline tenant set --help`")
    with _changing(cluster.load()) as administration:
        administration.change(name, fields)
    typer.echo(f"changed {name}: {', '.join(f'{key} {_shown(value)}' for key, value in fields.items())}", err=True)


def _administration(config: ClusterConfig) -> TenantAdministration:
    return TenantAdministration(registry_path(config, paceline_home()), allow_shared=config.tenants.allow_shared)


@contextmanager
def _changing(config: ClusterConfig) -> Iterator[TenantAdministration]:
    """Withdraws from the public pool what was fed by tenants that may no longer feed it after the block."""
    from cluster.cache.admin.store_access import feeders, withdraw_those_gone

    administration = _administration(config)
    before = feeders(config, administration.registry())
    yield administration
    try:
        has_withdrawn = withdraw_those_gone(config, before, administration.registry())
    except (ConfigError, CacheError) as error:
        typer.echo(f"the public pool could not be told, which routers will do within seconds: {error}", err=True)
        return
    if has_withdrawn:
        typer.echo("what was public through it alone no longer is", err=True)


def _limit(name: str, text: str) -> float | int | None:
    if text == _NO_LIMIT:
        return None
    kind, noun = (float, "number") if name in ("requests_per_second", "weight") else (int, "whole number")
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(name, text, f"it must be a {noun}, or {_NO_LIMIT}")
    return number


def _duration(option: str, text: str) -> timedelta:
    seconds = 0 if text == "0" else parsed_seconds(text)
    if seconds is None:
        raise InvalidRequest(option, text, "write a whole number with s, m, h or d, as in 24h; or 0")
    return timedelta(seconds=seconds)


def _show_key(issued: IssuedKey, as_json: bool) -> None:
    """The key alone on standard output, so that it can be piped to where it is kept."""
    if as_json:
        shown = {"tenant": issued.tenant.name, "id": issued.tenant.id, "key_id": issued.key_id, "key": issued.key}
        typer.echo(json.dumps(shown))
        return
    typer.echo(f"key {issued.key_id} of {issued.tenant.name}; it is shown this once:", err=True)
    typer.echo(issued.key)


def _described(tenant: StoredTenant, now: datetime) -> dict[str, Any]:
    """Without digests."""
    described: dict[str, Any] = to_jsonable_python(tenant, exclude={"keys"})
    described["keys"] = [
        to_jsonable_python(key, exclude={"sha256"})
        | {"age_s": int((now - key.created).total_seconds()), "live": key.is_live(now)}
        for key in tenant.keys
    ]
    return described


def _key_line(key: Mapping[str, Any], now: datetime) -> str:
    line = f"{key['id']} ...{key['last4']} {shown_seconds(key['age_s'])} old"
    if key["expires"] is not None:
        left_s = int((datetime.fromisoformat(key["expires"]) - now).total_seconds())
        line += f", {shown_seconds(left_s)} left" if key["live"] else ", expired"
    return line


def _shown(value: object) -> str:
    return _NO_LIMIT if value is None else str(value).lower() if isinstance(value, bool) else str(value)
