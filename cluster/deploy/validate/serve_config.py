"""serveConfigV2 of a RayService: a text that nobody reads before Ray does, and Ray drops the keys it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from cluster.config import ClusterConfig
from cluster.deploy.validate.capacity import Demand, check_capacity, node_kinds
from cluster.deploy.validate.cluster_files import check_config
from cluster.deploy.validate.demands import DEPLOYMENTS, cluster_demands
from cluster.deploy.validate.documents import Document, read_documents
from cluster.deploy.validate.finding import Location, Problem, place
from cluster.deploy.validate.import_paths import why_not_importable
from cluster.deploy.validate.ray_cluster import cluster_of
from cluster.deploy.validate.serve_code import named_code, without_code
from cluster.deploy.validate.shown import shown
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import at, has, items, listed, mapping

BUILDER = "cluster.app:build"  # whose arguments are a cluster configuration
_WHERE: Location = ("spec", "serveConfigV2")


def check_serve_config(manifest: dict[str, Any]) -> Iterator[Problem]:
    text = mapping(manifest, "spec").get("serveConfigV2")
    if text is None:
        return
    if not isinstance(text, str):
        yield Problem(
            "serve-yaml", _WHERE, f"it is a {type(text).__name__}; it must be a text (write | behind the colon)"
        )
        return
    documents, errors = read_documents("", text)
    for error in errors:
        yield Problem("serve-yaml", _WHERE, error.what, inner=error.where or "text", inner_line=error.line - 1)
    if errors:
        return
    if len(documents) != 1 or not isinstance(documents[0].value, dict):
        yield Problem("serve-yaml", _WHERE, f"{len(documents)} documents; it must be one with keys")
        return
    document = documents[0]
    for rule, where, what in _check_schema(document.value):
        yield _inner(document, rule, where, what)
    for index, application in items(document.value, "applications"):
        for rule, where, what in _check_application(application, ("applications", index)):
            yield _inner(document, rule, where, what)
    for index, path in enumerate(listed(document.value, "grpc_options", "grpc_servicer_functions")):
        if isinstance(path, str):
            for rule, what in _check_import(path, {}):
                yield _inner(document, rule, ("grpc_options", "grpc_servicer_functions", index), what)
    cluster, where = cluster_of(manifest)
    if cluster:
        yield from check_capacity(list(_demands(document.value)), node_kinds(cluster, where), _WHERE)


def _inner(document: Document, rule: str, where: Location, what: str) -> Problem:
    return Problem(rule, _WHERE, what, inner=place(where), inner_line=document.line(where) - 1)


Inner = tuple[str, Location, str]  # rule, place in the text, what


def _check_schema(config: dict[str, Any]) -> Iterator[Inner]:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    yield from (("serve-unknown-key", where, what) for where, what in unknown_keys(ServeDeploySchema, config))
    config = without_code(config)
    yield from _refused(ServeDeploySchema, config, ())
    for number, application in items(config, "applications"):
        route = application.get("route_prefix")
        # The schema takes any text, and the deployment then fails.
        if isinstance(route, str) and (not route.startswith("/") or (route != "/" and route.endswith("/"))):
            what = f"{route!r} must start with / and end without one"
            yield "serve-schema", ("applications", number, "route_prefix"), what
        yield from _check_variables(application, ("applications", number))
        for index, deployment in items(application, "deployments"):
            options = ("applications", number, "deployments", index, "ray_actor_options")
            yield from _check_variables(mapping(deployment, "ray_actor_options"), options)
            where = ("applications", number, "deployments", index, "autoscaling_config")
            # The schema takes any mapping here.
            if isinstance(deployment.get("autoscaling_config"), dict):
                yield from _refused(AutoscalingConfig, deployment["autoscaling_config"], where)


def _check_variables(owner: dict[str, Any], where: Location) -> Iterator[Inner]:
    """Ray refuses other values than texts only when it starts the processes."""
    where = (*where, "runtime_env", "env_vars")
    given = at(owner, "runtime_env", "env_vars")
    if given is not None and not isinstance(given, dict):
        yield "serve-schema", where, f"{shown(given, where)}; it must be a mapping of names to texts"
    for name, value in mapping(given).items():
        if not isinstance(value, str):
            yield "serve-schema", (*where, str(name)), f"{shown(value, where)} of {name} is no text; put it in quotes"


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
                missing = problem["loc"][-1] if problem["type"] == "missing" else None
                yield "serve-schema", (*where, *there), f"{missing}: {what}" if missing else what
    except Exception as error:  # a validator of Ray that looks further than the text
        yield "serve-schema", where, f"{type(error).__name__}: {error}"


def _existing(value: object, where: tuple[str | int, ...]) -> Location:
    """The part of a place that is in the value: pydantic puts the names of types between the keys."""
    there: list[str | int] = []
    found: Any = value
    for part in where:
        if has(found, part):
            found = found[part]
            there.append(part)
    return tuple(there)


def unknown_keys(model: type[BaseModel], value: object, where: Location = ()) -> Iterator[tuple[Location, str]]:
    """Keys of a mapping, and of those in it, that the model would silently leave out."""
    if not isinstance(value, dict):
        return
    fields = {name: field.annotation for name, field in model.model_fields.items()}
    fields |= {field.alias: field.annotation for field in model.model_fields.values() if field.alias}
    for key, child in value.items():
        if key not in fields:
            yield (*where, str(key)), f"unknown key {key!r}{did_you_mean(str(key), fields)}"
        elif key == "runtime_env":
            yield from _unknown_of_runtime(child, (*where, key))
        else:
            models = _models(fields[key])
            if len(models) == 1:
                children = enumerate(child) if isinstance(child, list) else [(None, child)]
                for index, part in children:
                    yield from unknown_keys(models[0], part, (*where, key) if index is None else (*where, key, index))


def _unknown_of_runtime(value: object, where: Location) -> Iterator[tuple[Location, str]]:
    from ray.runtime_env import RuntimeEnv

    known = set(RuntimeEnv.known_fields)
    for key in mapping(value):
        if key not in known:
            yield (*where, str(key)), f"unknown key {key!r}{did_you_mean(str(key), known)}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _check_application(application: dict[str, Any], where: Location) -> Iterator[Inner]:
    path = application.get("import_path")
    named: list[tuple[Location, str]] = [(("import_path",), path)] if isinstance(path, str) else []
    for below, code in [*named, *named_code(application)]:
        for rule, what in _check_import(code, mapping(application, "runtime_env")):
            yield rule, (*where, *below), what
    if path == BUILDER:
        for problem in check_config(mapping(application, "args")):
            yield problem.rule, (*where, "args", *problem.where), problem.what
        for index, deployment in items(application, "deployments"):
            name = deployment.get("name")
            if isinstance(name, str) and name not in DEPLOYMENTS:
                what = f"the application has no deployment {name!r}{did_you_mean(name, DEPLOYMENTS)}"
                yield "serve-deployment", (*where, "deployments", index, "name"), what


def _check_import(path: str, runtime: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if path == BUILDER or any(runtime.get(key) for key in ("working_dir", "py_modules", "pip", "uv", "conda")):
        return  # ours, or from code that comes with the application
    why = why_not_importable(path)
    if why is not None:
        yield ("serve-import" if why.is_sure else "serve-import-elsewhere"), why.text


def _demands(config: dict[str, Any]) -> Iterator[Demand]:
    for _, application in items(config, "applications"):
        own: dict[str, Demand] = {}
        if application.get("import_path") == BUILDER:
            try:
                parsed = ClusterConfig.model_validate(mapping(application, "args"))
            except ValidationError:
                continue  # said above
            own = {demand.name: demand for demand in cluster_demands(parsed)}
        for _, deployment in items(application, "deployments"):
            name = str(deployment.get("name"))
            given = _demand_of(name, deployment, own.get(name))
            if given is not None:
                own[name] = given
        yield from own.values()


def _demand_of(name: str, deployment: dict[str, Any], before: Demand | None) -> Demand | None:
    """What a deployment asks for with its overrides; None where they say nothing of it."""
    options = mapping(deployment, "ray_actor_options")
    replicas = 1 if before is None else before.replicas
    bundles = [bundle for _, bundle in items(deployment, "placement_group_bundles")]
    strict = deployment.get("placement_group_strategy") == "STRICT_PACK"
    try:
        if bundles:
            read = tuple({str(key): float(amount) for key, amount in bundle.items()} for bundle in bundles)
            return Demand(name, read, strict, replicas)
        if options and (before is None or len(before.bundles) == 1):
            bundle = dict(before.bundles[0]) if before is not None else {}
            for key, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
                if options.get(key) is not None:
                    bundle[resource] = float(options[key])
            bundle |= {str(key): float(amount) for key, amount in mapping(options, "resources").items()}
            return Demand(name, (bundle,), replicas=replicas)
    except (TypeError, ValueError):
        return None  # the schema says so
    return None
