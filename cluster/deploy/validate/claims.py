"""Claims of volumes, by themselves and in a StatefulSet."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.pods import one_of
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.tree import Manifest, listed, mapping

_ACCESS = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


def check_claim(spec: Manifest, where: Location) -> Iterator[Problem]:
    """The specification of a claim."""
    modes = listed(spec, "accessModes")
    if not modes:
        yield Problem("volume-claim", (*where, "accessModes"), "there is none")
    for index, mode in enumerate(modes):
        if mode not in _ACCESS:
            yield Problem("enum", (*where, "accessModes", index), f"{mode!r}; it must be one of {', '.join(_ACCESS)}")
    yield from one_of(spec, "volumeMode", ("Filesystem", "Block"), where)
    size = mapping(spec, "resources", "requests").get("storage")
    value = parse_quantity(size)
    if size is None:
        yield Problem("volume-claim", (*where, "resources", "requests", "storage"), "there is no size")
    elif value is None or value <= 0:
        yield Problem("quantity", (*where, "resources", "requests", "storage"), f"{size!r} is no size")
