"""The metrics of several processes on one page."""

from __future__ import annotations

from collections.abc import Mapping


def merged(label: str, texts: Mapping[str, str]) -> str:
    """One text in Prometheus' format out of one a process, by its id, as `prometheus_client` writes them: each sample
    gets the label with that id, and each family appears once.

    Lines stay as they are but for the label: to parse and write them anew takes a gateway's time, which streams need.
    """
    comments: dict[str, dict[str, str]] = {}  # of each family: HELP and TYPE
    samples: dict[str, list[str]] = {}
    for process, text in sorted(texts.items()):
        for line in text.split("\n"):
            if line.startswith("# "):
                _, kind, family, _ = line.split(" ", 3)
                comments.setdefault(family, {}).setdefault(kind, line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, f'{label}="{process}"'))
    lines = [line for family, own in comments.items() for line in (*own.values(), *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
