"""Isotonic regression: the closest non-decreasing sequence, for curves that are known to rise."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing list with the least weighted squared distance to `values`; weights are > 0.

    Pool adjacent violators (Ayer et al. 1955): neighbours that fall are replaced by their weighted mean.
    """
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        mean, mass, count = value, weight, 1
        while means and means[-1] > mean:
            mean = (means[-1] * masses[-1] + mean * mass) / (masses[-1] + mass)
            mass += masses.pop()
            count += counts.pop()
            means.pop()
        means.append(mean)
        masses.append(mass)
        counts.append(count)
    fitted: list[float] = []
    for mean, count in zip(means, counts, strict=True):
        fitted.extend([mean] * count)
    return fitted
