"""The tail of the chi-square distribution."""

import numpy as np
import torch


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with these degrees of freedom exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def uniform_pvalue(counts: np.ndarray) -> float:
    """P-value of Pearson's chi-square test that all cells of counts, int [n], have the same probability."""
    mean = counts.sum() / counts.size
    return chi_square_tail(float(((counts - mean) ** 2).sum() / mean), counts.size - 1)
