"""Exponentials for loops compiled by numba: libm's cannot be vectorised, and torch's would need a pass of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def exp32(x: float) -> float:
    """``exp(x)`` in float32, exact to one unit in the last place: 0 below -87, and ``exp(88)`` above 88. Vectorisable.

    Source: expf of the Cephes library (S. Moshier). `rounded` holds the nearest integer in its last bits.
    """
    low, high, magic = np.float32(-87.0), np.float32(88.0), np.float32(12582912.0)
    clipped = low if x < low else high if x > high else x
    rounded = clipped * np.float32(1.44269504088896341) + magic
    n = rounded - magic
    r = clipped - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.float32(rounded).view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < low else (p * r * r + r + np.float32(1)) * power


@njit(nogil=True, cache=True, error_model="numpy")
def exponentials(numbers: Array, count: int) -> None:
    """Replace the first `count` numbers of each head by their ``exp``; those up to the next whole vector may change."""
    for h in range(numbers.shape[0]):
        if numbers.itemsize == 4:
            for k in range((count + 15) // 16 * 16):
                numbers[h, k] = exp32(numbers[h, k])
        else:
            for k in range(count):
                numbers[h, k] = np.exp(numbers[h, k])
