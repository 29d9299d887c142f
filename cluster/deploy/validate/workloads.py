"""Kinds that run pods, and those that say how many there are: what an API server checks beyond the schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from cluster.deploy.validate.claims import check_claim
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.labels import check_selector, selects
from cluster.deploy.validate.pods import check_pod, check_template, one_of
from cluster.deploy.validate.tree import Manifest, items, mapping, whole

_ALWAYS = ("Always",)
_JOB = ("OnFailure", "Never")
_ANY = ("Always", "OnFailure", "Never")
_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
_PERCENT = re.compile(r"(100|[1-9]?\d)%")


def _workload(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    where: Location = ("spec",)
    claims = [str(mapping(claim, "metadata").get("name")) for _, claim in items(spec, "volumeClaimTemplates")]
    yield from check_template(spec.get("template"), (*where, "template"), _ALWAYS, claims)
    selector = spec.get("selector")
    yield from check_selector(selector, (*where, "selector"))
    labels = mapping(spec, "template", "metadata", "labels")
    if isinstance(selector, dict):
        if not selector.get("matchLabels") and not selector.get("matchExpressions"):
            yield Problem("selector-template", (*where, "selector"), "the selector is empty")
        elif not selects(selector, labels):
            yield Problem("selector-template", (*where, "selector"), f"the template's labels are {_shown(labels)}")
    replicas = whole(spec.get("replicas"))
    if replicas is not None and replicas < 0:
        yield Problem("replicas", (*where, "replicas"), f"{replicas} is below 0")
    yield from _strategy(spec, str(manifest.get("kind")))
    for index, claim in items(spec, "volumeClaimTemplates"):
        yield from check_claim(mapping(claim, "spec"), (*where, "volumeClaimTemplates", index, "spec"))


def _shown(labels: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items()) or "none"


def _strategy(spec: Manifest, kind: str) -> Iterator[Problem]:
    key = "strategy" if kind == "Deployment" else "updateStrategy"
    strategy = mapping(spec, key)
    allowed = ("Recreate", "RollingUpdate") if kind == "Deployment" else ("OnDelete", "RollingUpdate")
    yield from one_of(strategy, "type", allowed, ("spec", key))
    rolling = mapping(strategy, "rollingUpdate")
    if rolling and strategy.get("type") in ("Recreate", "OnDelete"):
        yield Problem("strategy", ("spec", key, "rollingUpdate"), f"type {strategy['type']} has no rollingUpdate")
    if kind == "Deployment":
        surge, unavailable = rolling.get("maxSurge"), rolling.get("maxUnavailable")
        if surge in (0, "0%") and unavailable in (0, "0%"):
            yield Problem("strategy", ("spec", key, "rollingUpdate"), "maxSurge and maxUnavailable are both 0")
    if kind == "StatefulSet":
        yield from one_of(spec, "podManagementPolicy", ("OrderedReady", "Parallel"), ("spec",))


def _pod(manifest: Manifest) -> Iterator[Problem]:
    yield from check_pod(mapping(manifest, "spec"), ("spec",), _ANY, ())


def _job(manifest: Manifest) -> Iterator[Problem]:
    yield from _job_spec(mapping(manifest, "spec"), ("spec",))


def _job_spec(spec: Manifest, where: Location) -> Iterator[Problem]:
    yield from check_template(spec.get("template"), (*where, "template"), _JOB, ())
    if "restartPolicy" not in mapping(spec, "template", "spec"):
        place = (*where, "template", "spec", "restartPolicy")
        yield Problem("pod-restart-policy", place, "of a job it must be given: OnFailure or Never")
    for key in ("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        number = whole(spec.get(key))
        if number is not None and number < 0:
            yield Problem("replicas", (*where, key), f"{number} is below 0")


def _cron_job(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    schedule = spec.get("schedule")
    if isinstance(schedule, str) and not is_schedule(schedule):
        yield Problem("cron-schedule", ("spec", "schedule"), f"{schedule!r} is no schedule")
    yield from one_of(spec, "concurrencyPolicy", ("Allow", "Forbid", "Replace"), ("spec",))
    yield from _job_spec(mapping(spec, "jobTemplate", "spec"), ("spec", "jobTemplate", "spec"))


_CRON_FIELDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_PART = re.compile(r"(\*|\?|(\d+|[A-Za-z]{3})(-(\d+|[A-Za-z]{3}))?)(/(\d+))?")


def is_schedule(schedule: str) -> bool:
    """Five fields of cron, or @hourly and its like."""
    if schedule.startswith("@"):
        return schedule.startswith("@every ") or schedule[1:] in (
            "yearly", "annually", "monthly", "weekly", "daily", "midnight", "hourly",
        )  # fmt: skip
    fields = schedule.split()
    if len(fields) != 5:
        return False
    for text, (least, most) in zip(fields, _CRON_FIELDS, strict=True):
        for part in text.split(","):
            match = _CRON_PART.fullmatch(part)
            if match is None:
                return False
            numbers = [int(match[group]) for group in (2, 4) if match[group] and match[group].isdigit()]
            if any(not least <= number <= most for number in numbers) or match[6] == "0":
                return False
    return True


def _disruption_budget(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    given = [key for key in ("minAvailable", "maxUnavailable") if spec.get(key) is not None]
    if len(given) != 1:
        shown = " and ".join(given) or "neither minAvailable nor maxUnavailable"
        yield Problem("pdb-one", ("spec",), f"{shown} given")
    for key in given:
        value = spec[key]
        number = whole(value)
        if (number is not None and number < 0) or (isinstance(value, str) and not _PERCENT.fullmatch(value)):
            yield Problem("pdb-value", ("spec", key), f"{value!r} is neither a number of pods nor 0% to 100%")
    yield from check_selector(spec.get("selector"), ("spec", "selector"))
    yield from one_of(spec, "unhealthyPodEvictionPolicy", ("IfHealthyBudget", "AlwaysAllow"), ("spec",))


_METRIC_FIELDS = {"Utilization": "averageUtilization", "AverageValue": "averageValue", "Value": "value"}
_METRIC_TYPES = ("Resource", "Pods", "Object", "External", "ContainerResource")


def _autoscaler(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    least, most = whole(spec.get("minReplicas")), whole(spec.get("maxReplicas"))
    if most is not None and most < 1:
        yield Problem("hpa-range", ("spec", "maxReplicas"), f"{most} is below 1")
    if least is not None and least < 0:
        yield Problem("hpa-range", ("spec", "minReplicas"), f"{least} is below 0")
    if most is not None and most < (1 if least is None else least):
        yield Problem("hpa-range", ("spec", "minReplicas"), f"minReplicas {least} is over maxReplicas {most}")
    for index, metric in items(spec, "metrics"):
        place = ("spec", "metrics", index)
        yield from one_of(metric, "type", _METRIC_TYPES, place)
        kind = metric.get("type")
        key = kind[:1].lower() + kind[1:] if isinstance(kind, str) else ""
        if kind in _METRIC_TYPES and not isinstance(metric.get(key), dict):
            yield Problem("hpa-metric", place, f"type {kind} needs {key}")
        target = mapping(metric, key, "target")
        yield from one_of(target, "type", tuple(_METRIC_FIELDS), (*place, key, "target"))
        field = _METRIC_FIELDS.get(str(target.get("type")))
        if field and target.get(field) is None:
            yield Problem("hpa-metric", (*place, key, "target"), f"type {target['type']} needs {field}")
    for direction in ("scaleUp", "scaleDown"):
        rules = mapping(spec, "behavior", direction)
        yield from one_of(rules, "selectPolicy", ("Max", "Min", "Disabled"), ("spec", "behavior", direction))
        for index, policy in items(rules, "policies"):
            yield from one_of(policy, "type", ("Pods", "Percent"), ("spec", "behavior", direction, "policies", index))


CHECKS: dict[str, Callable[[Manifest], Iterator[Problem]]] = {
    **dict.fromkeys(_WORKLOADS, _workload),
    "Pod": _pod,
    "Job": _job,
    "CronJob": _cron_job,
    "PodDisruptionBudget": _disruption_budget,
    "HorizontalPodAutoscaler": _autoscaler,
}
