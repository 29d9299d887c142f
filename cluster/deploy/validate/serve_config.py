"""Checks serveConfigV2 of a RayService. The API server does not parse this text, and Ray ignores unknown keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from actors.pool_names import FIRST_POOL, pool_of_deployment
from cluster.deploy.validate.capacity import check_capacity, node_kinds
from cluster.deploy.validate.cluster_files import check_config
from cluster.deploy.validate.demands import BUILDER, DEPLOYMENTS, demands_of
from cluster.deploy.validate.documents import read_documents
from cluster.deploy.validate.finding import Location, Problem, place
from cluster.deploy.validate.ray_cluster import cluster_of
from cluster.deploy.validate.shown import shown
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import at, has, items, mapping

_WHERE: Location = ("spec", "serveConfigV2")
# Keys whose values are import paths. Ray's models import the first two as they are made.
_IMPORTED = ("policy_function", "request_router_class")
_CODE = (*_IMPORTED, "import_path", "actor_class", "grpc_servicer_functions")
_TRUSTED = ("actors", "cluster", "grpc_health", "ray")  # packages that are imported to see what is in them

Inner = tuple[str, Location, str]  # rule, place in the text, what


def check_serve_config(manifest: dict[str, Any]) -> Iterator[Problem]:
    text = mapping(manifest, "spec").get("serveConfigV2")
    if text is None:
        return
    if not isinstance(text, str):
        what = f"it is a {type(text).__name__}; it must be a text (write | behind the colon)"
        yield Problem("serve-yaml", _WHERE, what)
        return
    documents, errors = read_documents("", text)
    for error in errors:
        yield Problem("serve-yaml", _WHERE, error.what, inner=error.where or "text", inner_line=error.line - 1)
    if not errors and (len(documents) != 1 or not isinstance(documents[0].value, dict)):
        yield Problem("serve-yaml", _WHERE, f"{len(documents)} documents; it must be one with keys")
    elif not errors:
        config = documents[0].value
        for rule, where, what in (*_check_schema(config), *_check_applications(config), *_check_code(config, ())):
            line = documents[0].line(where) - 1
            yield Problem(rule, _WHERE, what, inner=place(where), inner_line=line)
        proxies = config.get("proxy_location")
        if proxies in ("HeadOnly", "Disabled") and mapping(manifest, "spec").get("excludeHeadPodFromServeSvc"):
            what = f"{proxies}, with excludeHeadPodFromServeSvc: no pod behind the service listens"
            yield Problem("serve-deployment", _WHERE, what, inner="proxy_location")
        cluster, where = cluster_of(manifest)
        if cluster:
            yield from check_capacity(list(demands_of(config)), node_kinds(cluster, where), _WHERE)


def _check_schema(config: dict[str, Any]) -> Iterator[Inner]:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    yield from (("serve-unknown-key", where, what) for where, what in unknown_keys(ServeDeploySchema, config))
    config = _without_code(config)
    yield from _refused(ServeDeploySchema, config, ())
    for number, application in items(config, "applications"):
        base: Location = ("applications", number)
        route = application.get("route_prefix")
        # The schema takes any text, and the deployment then fails.
        if isinstance(route, str) and (not route.startswith("/") or (route != "/" and route.endswith("/"))):
            yield "serve-schema", (*base, "route_prefix"), f"{route!r} must start with / and end without one"
        yield from _check_variables(application, base)
        for index, deployment in items(application, "deployments"):
            where = (*base, "deployments", index)
            options = mapping(deployment, "ray_actor_options")
            yield from _check_variables(options, (*where, "ray_actor_options"))
            # The schema takes any mapping here.
            if isinstance(given := deployment.get("autoscaling_config"), dict):
                yield from _refused(AutoscalingConfig, given, (*where, "autoscaling_config"))


def _check_variables(owner: dict[str, Any], where: Location) -> Iterator[Inner]:
    """Ray refuses other values than texts only when it starts the processes."""
    where = (*where, "runtime_env", "env_vars")
    given = at(owner, "runtime_env", "env_vars")
    if given is not None and not isinstance(given, dict):
        yield "serve-schema", where, f"{shown(given, where)}; it must be a mapping of names to texts"
    for name, value in mapping(given).items():
        if not isinstance(value, str):
            yield "serve-schema", (*where, str(name)), f"{shown(value, where)} of {name} is no text; put it in quotes"


def _without_code(value: Any) -> Any:
    """A copy without import paths: Ray's models would import and run any code that a file names."""
    if isinstance(value, dict):
        return {key: _without_code(child) for key, child in value.items() if key not in _IMPORTED}
    return [_without_code(child) for child in value] if isinstance(value, list) else value


def _refused(model: type[BaseModel], value: dict[str, Any], where: Location) -> Iterator[Inner]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        seen = set[Location]()
        for problem in error.errors(include_url=False):
            there = _existing(value, problem["loc"])
            if there not in seen:
                seen.add(there)
                what = problem["msg"].removeprefix("Value error, ")
                missing = f"{problem['loc'][-1]}: " if problem["type"] == "missing" else ""
                yield "serve-schema", (*where, *there), missing + what
    except Exception as error:  # a validator of Ray that looks further than the text
        yield "serve-schema", where, f"{type(error).__name__}: {error}"


def _existing(value: object, where: tuple[str | int, ...]) -> Location:
    """The part of a place that is in the value: pydantic puts the names of types between the keys."""
    there: list[str | int] = []
    for part in where:
        if has(at(value, *there), part):
            there.append(part)
    return tuple(there)


def unknown_keys(model: type[BaseModel], value: object, where: Location = ()) -> Iterator[tuple[Location, str]]:
    """Keys of a mapping, and of those in it, that the model would silently leave out."""
    fields = {name: field.annotation for name, field in model.model_fields.items()}
    fields |= {field.alias: field.annotation for field in model.model_fields.values() if field.alias}
    for key, child in mapping(value).items():
        if key not in fields:
            yield (*where, str(key)), f"unknown key {key!r}{did_you_mean(str(key), fields)}"
        elif key == "runtime_env":
            from ray.runtime_env import RuntimeEnv

            for name in mapping(child).keys() - set(RuntimeEnv.known_fields):
                what = f"unknown key {name!r}{did_you_mean(str(name), RuntimeEnv.known_fields)}"
                yield (*where, key, str(name)), what
        elif len(models := _models(fields[key])) == 1:
            children = enumerate(child) if isinstance(child, list) else [(None, child)]
            for index, part in children:
                yield from unknown_keys(models[0], part, (*where, key) if index is None else (*where, key, index))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _check_applications(config: dict[str, Any]) -> Iterator[Inner]:
    """Those of our own builder."""
    for number, application in items(config, "applications"):
        where: Location = ("applications", number)
        if application.get("import_path") != BUILDER:
            continue
        for problem in check_config(mapping(application, "args")):
            yield problem.rule, (*where, "args", *problem.where), problem.what
        for options, field in (("http_options", "http_port"), ("grpc_options", "grpc_port")):
            port, own = at(config, options, "port"), at(application, "args", "gateway", field)
            if port is not None and own is not None and str(port) != str(own):
                what = f"{port}; gateway.{field} of the application is {own}"
                yield "serve-deployment", (options, "port"), what
        for index, deployment in items(application, "deployments"):
            name, place = deployment.get("name"), (*where, "deployments", index)
            if isinstance(name, str) and name not in DEPLOYMENTS and pool_of_deployment(name) is None:
                what = f"the application has no deployment {name!r}{did_you_mean(name, DEPLOYMENTS)}"
                yield "serve-deployment", (*place, "name"), what
            bundles = len(items(deployment, "placement_group_bundles"))
            if wrong := _bundles_problem(application, name, bundles):
                yield "serve-deployment", (*place, "placement_group_bundles"), wrong


def _bundles_problem(application: dict[str, Any], name: object, bundles: int) -> str | None:
    """What is wrong with the number of a deployment's bundles, 0 where it gives none."""
    pool = pool_of_deployment(name) if isinstance(name, str) else None
    if pool is None and name != "TargetGroup":
        return None
    section = ("target",) if pool is None else ("draft",) if pool == FIRST_POOL else ("more_drafts", pool)
    ranks = str(at(application, "args", *section, "tensor_parallel") or 1)
    has_shell = pool is None
    if not bundles or not ranks.isdigit() or bundles == int(ranks) + has_shell:
        return None
    shell = " and one for their shell" if has_shell else ""
    return f"{bundles} bundles; tensor_parallel {ranks} needs one for each rank{shell}"


def _check_code(value: Any, where: Location) -> Iterator[Inner]:
    """Import paths that lead into Paceline and what it comes with; whatever else a file names is not run."""
    from ray._common.utils import import_attr

    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        is_code = key in _CODE or (where and where[-1] in _CODE)
        if is_code and isinstance(child, str) and child.partition(".")[0] in _TRUSTED:
            try:
                import_attr(child)
            except (ImportError, AttributeError, ValueError) as error:
                yield "serve-import", (*where, key), f"{child!r}: {error}"
        else:
            yield from _check_code(child, (*where, key))
