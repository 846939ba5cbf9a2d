"""Activations and their derivatives on device, in float32; the same five as :mod:`shared_core.kernels.activations`."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "activate_with_slope", "pre_activation"]

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_TAU = tl.constexpr(0.3989422804014327)  # 1 / √(2π)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
_TANH_CUBIC = tl.constexpr(0.044715)
_TANH_CUBIC_SLOPE = tl.constexpr(0.134145)


@triton.jit
def _positive(z):
    """``max(z, 0)``, NaN where ``z`` is."""
    return tl.where(z <= 0, 0.0, z)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """``act(z)``."""
    value, _ = activate_with_slope(z, ACTIVATION)
    return value


@triton.jit
def activate_with_slope(z, ACTIVATION: tl.constexpr):
    """``act(z)`` and ``act'(z)``; what the caller does not use, the compiler drops."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        value = z * s
        slope = s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(z * _SQRT_HALF))
        value = z * cdf
        slope = cdf + z * _SQRT_TAU * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh u) / 2 = sigmoid(2u), and there is no tanh that both compiler and interpreter know.
        s = tl.sigmoid((z + z * z * z * _TANH_CUBIC) * _TANH_SCALE)
        value = z * s
        slope = s + z * s * (1.0 - s) * (1.0 + z * z * _TANH_CUBIC_SLOPE) * _TANH_SCALE
    elif ACTIVATION == "relu":
        value = _positive(z)
        slope = tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2", "unknown activation")
        positive = _positive(z)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def pre_activation(product, weight, bias_ptrs, bias_valid, WEIGHT_INPUT: tl.constexpr):
    """``z = product (· w) (+ b)`` of a tile; ``bias_ptrs`` may be None."""
    z = product
    if WEIGHT_INPUT:
        z = z * weight[:, None]
    if bias_ptrs is not None:
        z = z + tl.load(bias_ptrs, mask=bias_valid, other=0.0).to(tl.float32)[None, :]
    return z
