"""What this machine's CPU multiplies fastest: facts that the choice of a product depends on, never a measurement.

The same machine always gives the same answers, so the same inputs always take the same path.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["CpuFeatures", "cpu_features"]


@dataclass(frozen=True)
class CpuFeatures:
    """CPU facts that decide which library multiplies matrices.

    Attributes
    ----------
    name : str
        Vendor and family as PyTorch reports them; empty if unknown.
    onednn_fp32 : bool
        Float32 products go to oneDNN: an x86 CPU for which MKL does not use its AVX-512 kernels (not Intel).
    widen_bf16 : bool
        Bfloat16 products with enough rows are faster after widening the weights to float32: there is no AMX unit, and
        the dot-product instruction is absent or (Intel) does half of the multiply-adds a cycle that float32 does.
    """

    name: str
    onednn_fp32: bool
    widen_bf16: bool


@functools.cache
def cpu_features() -> CpuFeatures:
    """Read the facts once per process.

    Returns
    -------
    CpuFeatures

    Examples
    --------
    >>> from shared_core.kernels.cpu_features import cpu_features
    >>> cpu_features() is cpu_features()
    True
    """
    # Older releases of PyTorch lack the function or some keys; every fact then falls back to the plain library call.
    read = getattr(torch.cpu, "get_capabilities", dict)
    facts = dict(read())
    name = str(facts.get("cpu_name", ""))
    x86 = facts.get("architecture") == "x86_64"
    intel = "Intel" in name
    native_bf16 = bool(facts.get("amx_bf16")) or (bool(facts.get("avx512_bf16")) and not intel)
    return CpuFeatures(
        name=name,
        onednn_fp32=x86 and bool(name) and not intel and bool(facts.get("avx512_f")),
        widen_bf16=x86 and bool(name) and not native_bf16,
    )
