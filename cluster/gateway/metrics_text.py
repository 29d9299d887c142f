"""The metrics of several processes on one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


def merged(label: str, texts: Mapping[str, str]) -> str:
    """One text in Prometheus' format out of one a process, by its id: each sample gets the label with that id, and each
    family appears once."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(label, texts))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, label: str, texts: Mapping[str, str]) -> None:
        self._label = label
        self._texts = texts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for process, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, family)
                samples = [_labelled(sample, self._label, process) for sample in family.samples]
                known.samples = samples if known is family else known.samples + samples
        yield from families.values()


def _labelled(sample: Sample, label: str, process: str) -> Sample:
    return sample._replace(labels={**sample.labels, label: process})
