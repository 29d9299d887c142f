"""The Helm chart: the overlays as profiles, in which what users change most is a value.

Its templates are rendered manifests. A value that may be chosen is rendered as a mark, and the mark then replaced by a
template that falls back on the profile's own; so a chart knows nothing that the manifests do not.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from cluster.deploy.kustomize import HEADER, yaml_text
from cluster.deploy.manifests import manifests
from cluster.deploy.pods import Object
from cluster.deploy.profiles import BASE, OVERLAYS, WITH_COMPONENT
from cluster.deploy.tenancy import tenancy
from cluster.deploy.values import DeployValues

# What may be chosen, and its mark: within the limits of the configuration, and nowhere else in the manifests. A field
# is here only if manifests take it over as it is; what they reckon with it belongs to the profile.
MARKS: dict[str, str | int] = {
    "image.repository": "marked-repository",
    "image.tag": "marked-tag",
    "image.pull_policy": "marked-policy",
    "model.target": "marked-target",
    "model.served_name": "marked-served",
    "model.claim": "marked-claim",
    "router.min": 701,
    "router.max": 702,
    "router.max_running": 703,
    "router.max_waiting": 704,
    "target.max": 711,
    "target.max_model_len": 712,
    "target.kv_cache_tokens": 713,
    "draft.max": 721,
    "gcs.secret": "marked-gcs",
    "cache.secret": "marked-cache",
    "tenants.secret": "marked-tenants",
    "network.host": "marked-host",
    "network.gateway_class": "marked-class",
    "network.tls_secret": "marked-tls",
    "observability.otlp_endpoint": "http://marked-collector",
}

PROFILES = {"base": BASE, **OVERLAYS}
LEFT_OUT = frozenset(("Namespace", "ResourceQuota"))  # Helm makes the one; the other follows from what is chosen

_NAMESPACE = "marked-namespace"
_MARK = re.compile("|".join([*map(str, MARKS.values()), _NAMESPACE]))


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


def chart_files() -> dict[str, str]:
    """Text by path below `chart`."""
    files = {
        "Chart.yaml": HEADER + yaml_text([_chart()]),
        "values.yaml": _values(),
        "values.schema.json": json.dumps(values_model().model_json_schema(), indent=1) + "\n",
    }
    return files | {f"templates/{name}.yaml": _template(name, values) for name, values in PROFILES.items()}


def values_model() -> type[BaseModel]:
    """Model of the chart's values. It is closed: a field has its type and limits of DeployValues, or is left out."""
    sections: dict[str, dict[str, Any]] = {}
    for path in MARKS:
        section, name = path.split(".")
        field = DeployValues.model_fields[section].annotation.model_fields[name]  # type: ignore[union-attr]
        kind = field.rebuild_annotation()
        sections.setdefault(section, {})[name] = (kind | None, None)
    models: dict[str, Any] = {
        name: (create_model(f"{name.capitalize()}ChartValues", __base__=_Closed, **fields), {})
        for name, fields in sections.items()
    }
    names = Literal[tuple(PROFILES)]  # type: ignore[valid-type]
    given: dict[str, Any] = {"profile": (names, ...), "global": (dict[str, Any], {}), **models}
    return create_model("ChartValues", __base__=_Closed, **given)


def profile_manifests(name: str, values: DeployValues) -> list[Object]:
    """What the chart installs of a profile."""
    objects = manifests(values) + (tenancy(values) if name in WITH_COMPONENT else [])
    return [each for each in objects if each["kind"] not in LEFT_OUT]


def _chart() -> Object:
    version = metadata.version("paceline")
    return {
        "apiVersion": "v2",
        "name": "paceline",
        "description": metadata.metadata("paceline")["Summary"],
        "type": "application",
        "version": version,
        "appVersion": version,
    }


def _values() -> str:
    """Nothing is chosen; a comment says what there is."""
    lines = [HEADER.rstrip(), f"# {', '.join(PROFILES)}: what is left out below is the profile's.", "profile: base"]
    sections: dict[str, list[str]] = {}
    for path in MARKS:
        section, name = path.split(".")
        sections.setdefault(section, []).append(name)
    lines += [f"{section}: {{}}  # {', '.join(names)}" for section, names in sections.items()]
    return "\n".join(lines) + "\n"


def _template(name: str, values: DeployValues) -> str:
    own = {path: _get(values, path) for path in MARKS}
    # What a profile does without cannot be chosen in it: it would need other objects.
    marked = values.model_copy(update={"namespace": _NAMESPACE})
    optional = {
        "image.tag", "model.served_name", "target.max_model_len", "target.kv_cache_tokens",
        "observability.otlp_endpoint",
    }  # fmt: skip
    chosen = {path: mark for path, mark in MARKS.items() if own[path] is not None or path in optional}
    for path, mark in chosen.items():
        section, field = path.split(".")
        marked = marked.model_copy(update={section: getattr(marked, section).model_copy(update={field: mark})})
    own["image.tag"] = own["image.tag"] or metadata.version("paceline")
    text = yaml_text(profile_manifests(name, marked))
    paths = {str(mark): path for path, mark in chosen.items()}
    lines = []
    for line in text.splitlines():
        marks = [mark for mark in _MARK.findall(line) if mark != _NAMESPACE]
        if len(marks) == 1 and own[paths[marks[0]]] is None:  # a line that is there only if a value is chosen
            path = paths[marks[0]]
            lines.append(f"{{{{- if {_given(path)} }}}}")
            lines.append(line.replace(marks[0], f"{{{{ .Values.{path} | toJson }}}}"))
            lines.append("{{- end }}")
        else:
            lines.append(_MARK.sub(lambda found: _expression(found, paths, own), line))
    refusals = []
    for path in (path for path, mark in MARKS.items() if str(mark) not in text):
        told = json.dumps(f"{path} cannot be chosen in profile {name}")
        refusals.append(f"{{{{- if {_given(path)} }}}}{{{{ fail {told} }}}}{{{{ end }}}}")
    body = "\n".join([*refusals, *lines])
    return f"{HEADER}{{{{- if eq .Values.profile {json.dumps(name)} }}}}\n{body}\n{{{{- end }}}}\n"


def _given(path: str) -> str:
    """Whether a value is chosen. A section that a user has set to null is gone, and only within brackets that is no
    error."""
    section, name = path.split(".")
    return f'not (kindIs "invalid" (.Values.{section}).{name})'


def _expression(found: re.Match[str], paths: dict[str, str], own: dict[str, Any]) -> str:
    if found.group() == _NAMESPACE:
        return "{{ .Release.Namespace }}"
    path = paths[found.group()]
    is_whole = found.end() == len(found.string) and found.string[found.start() - 1] == " "
    shown = f".Values.{path} | toJson" if is_whole else f".Values.{path}"
    return f"{{{{ if {_given(path)} }}}}{{{{ {shown} }}}}{{{{ else }}}}{own[path]}{{{{ end }}}}"


def _get(values: DeployValues, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(values, section), name)
