"""Functions of one number in float32 for loops compiled by numba: libm's cannot be vectorised."""

from __future__ import annotations

import numpy as np
from numba import njit

from shardpass.core.kernels.numba_exp import exp32


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def whole_exp32(x: float) -> float:
    """``exp(x)`` in float32 over its whole range: `exp32` ends at -87 and at 88."""
    is_high, is_low = x > np.float32(88.0), x < np.float32(-87.0)
    shift = np.float32(-1.0) if is_high else np.float32(20.0) if is_low else np.float32(0.0)
    scale = np.float32(2.718281828) if is_high else np.float32(2.0611536e-9) if is_low else np.float32(1.0)
    return exp32(x + shift) * scale


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def tanh32(x: float) -> float:
    """``tanh(x)`` in float32. Source: tanhf of the Cephes library (S. Moshier)."""
    one, two, size, z = np.float32(1.0), np.float32(2.0), abs(x), x * x
    p = np.float32(-5.70498872745e-3) * z + np.float32(2.06390887954e-2)
    p = p * z - np.float32(5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z - np.float32(3.33332819422e-1)
    large = one - two / (whole_exp32(two * size) + one)
    return x + x * z * p if size < np.float32(0.625) else large if x > 0 else -large


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def log32(x: float) -> float:
    """``log(x)`` in float32. Source: logf of the Cephes library (S. Moshier)."""
    half, tiny = np.float32(0.5), x < np.float32(1.17549435e-38)
    bits = np.float32(x * np.float32(2.0**25) if tiny else x).view(np.int32)
    part = np.int32((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(np.float32)  # in [1/2, 1)
    is_small = part < np.float32(0.707106781186547524)
    power = np.float32(np.int32((bits >> np.int32(23)) - np.int32(126)))
    power -= (np.float32(1.0) if is_small else np.float32(0.0)) + (np.float32(25.0) if tiny else np.float32(0.0))
    r = (part + part if is_small else part) - np.float32(1.0)
    p = np.float32(7.0376836292e-2) * r - np.float32(1.1514610310e-1)
    p = p * r + np.float32(1.1676998740e-1)
    p = p * r - np.float32(1.2420140846e-1)
    p = p * r + np.float32(1.4249322787e-1)
    p = p * r - np.float32(1.6668057665e-1)
    p = p * r + np.float32(2.0000714765e-1)
    p = p * r - np.float32(2.4999993993e-1)
    p = p * r + np.float32(3.3333331174e-1)
    found = r + (p * r * r * r - np.float32(2.12194440e-4) * power - half * r * r) + np.float32(0.693359375) * power
    is_number = (x > 0) & (x < np.float32(np.inf))
    return found if is_number else np.float32(-np.inf) if x == 0 else x if x > 0 else np.float32(np.nan)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def log1p32(x: float) -> float:
    """``log(1 + x)`` in float32, exact near 0 as well: what rounding ``1 + x`` has lost is put back as a factor."""
    one = np.float32(1.0)
    above = one + x
    lost = above - one
    is_plain = (lost == x) | (above > np.float32(1e30)) | (above != above)
    return log32(above) if is_plain else x if lost == 0 else log32(above) * (x / lost)
