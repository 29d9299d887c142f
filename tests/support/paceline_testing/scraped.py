"""Values on a page of metrics."""

from prometheus_client.parser import text_string_to_metric_families


def value_of(page: str, name: str, **labels: str) -> float:
    """The sum of `values_of`."""
    return sum(values_of(page, name, **labels))


def values_of(page: str, name: str, **labels: str) -> list[float]:
    """Values of all samples of that name with at least those labels."""
    return [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
