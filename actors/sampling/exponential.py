"""exp in compiled functions: calls of libm are not vectorized.

exp(x) = 2^n exp(r), with r = x - n ln 2: Cody and Waite, "Software Manual for the Elementary Functions", 1980.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LEAST_EXPONENT = -87.5
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def exponential(number: np.float32) -> np.float32:
    """exp of a number up to 80, to 4e-7 of it; exp(-87.5) below that."""
    number = max(number, np.float32(LEAST_EXPONENT))
    power = np.floor(number * np.float32(LOG2_E) + np.float32(0.5))
    rest = number - power * np.float32(LN2_HIGH) - power * np.float32(LN2_LOW)
    value = np.float32(COEFFICIENTS[0])
    for index in range(1, len(COEFFICIENTS)):
        value = value * rest + np.float32(COEFFICIENTS[index])
    value = value * rest * rest + rest + np.float32(1.0)
    return value * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
