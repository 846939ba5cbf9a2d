"""Size factors: how much larger than one unit each sample is, so that cells of different depth can be compared.

A sample of size ``s`` from a component with rates ``λ`` has mean ``s λ``. Where a family needs sums over samples of a
smooth function of ``s`` (the negative binomial does), the function is interpolated in ``log s`` on a fixed lattice of
Chebyshev nodes: to rounding, and at a cost that does not grow with the number of features times samples.

Letters: ``N`` samples, ``n`` rows of a block, ``d`` features, ``P`` nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omt.families.base import FloatArray

SizeFactors: TypeAlias = Literal["total"] | ArrayLike | None

# The lattice covers log s in [−20, 20) in panels of width 2. The functions of use have their nearest singularities at
# a distance π from the real axis, so within a panel Chebyshev coefficients fall by a factor ≥ π + √(π² + 1) = 6.4 each.
_LOWEST, _WIDTH, _PANELS = -20.0, 2.0, 20
_ORDER = 18
N_NODES = _PANELS * _ORDER
"""Nodes of the whole lattice."""
# Explicit size factors must lie well inside.
_SMALLEST, _LARGEST = 1e-8, 1e8


def totals_of(X: Any) -> FloatArray:
    """Sum of each row, ``[n]``."""
    return np.asarray(X.sum(axis=1), dtype=np.float64).ravel()


def sizes_of(X: Any, size: FloatArray | None, reference: float | None) -> FloatArray | None:
    """Size factors of a block: the given ones, or totals over ``reference``, or ``None`` where all are one."""
    if size is not None or reference is None:
        return size
    return totals_of(X) / reference


def resolve_sizes(size_factors: SizeFactors, reference: float | None, totals: FloatArray) -> tuple[FloatArray, float]:
    """Size factor of each sample of a fit, and the total of a sample of size one.

    Parameters
    ----------
    size_factors
        ``"total"``, or the factors ``[N]``.
    reference
        Total of a sample of size one; default: the mean total, or what the given factors imply.
    totals
        Total of each sample, ``[N]``.

    Returns
    -------
    sizes, reference
        ``[N]`` and a positive number.

    Raises
    ------
    ValueError
        If factors are not one positive number a sample, or there is no count at all.

    Examples
    --------
    >>> import numpy as np
    >>> resolve_sizes("total", None, np.array([2.0, 6.0]))
    (array([0.5, 1.5]), 4.0)
    """
    if not totals.sum() > 0:
        raise ValueError("X has no counts at all; size factors need at least one")
    if isinstance(size_factors, str):
        reference = float(totals.mean()) if reference is None else reference
        return totals / reference, reference
    sizes = np.array(size_factors, dtype=np.float64)
    if sizes.shape != totals.shape:
        raise ValueError(
            f"size_factors has shape {sizes.shape}; X has {totals.size} samples, so it must be [{totals.size}]"
        )
    bad = ~((sizes >= _SMALLEST) & (sizes <= _LARGEST))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(
            f"size_factors[{i}] is {sizes[i]:g}; every factor must be between {_SMALLEST:g} and {_LARGEST:g}, with a "
            "mean near one"
        )
    return sizes, float(totals.sum() / sizes.sum()) if reference is None else reference


def check_size_factors(size_factors: SizeFactors, reference: float | None) -> None:
    """Raise ``ValueError`` for arguments that no data could make sense of."""
    if isinstance(size_factors, str) and size_factors != "total":
        raise ValueError(
            f"size_factors is {size_factors!r}; it must be None, 'total' or an array of one factor a sample"
        )
    if reference is not None:
        if size_factors is None:
            raise ValueError(
                "reference is the total of a sample of size one; it needs size_factors='total' or an array"
            )
        check_reference(reference)


def check_reference(reference: float) -> None:
    """Raise ``ValueError`` if the total of a sample of size one is not a positive number."""
    if not (np.isfinite(reference) and reference > 0):
        raise ValueError(f"reference is {reference!r}; it must be a positive total count, or None")


@dataclass(frozen=True, eq=False)
class SizeBasis:
    """How functions of the size factor are read off the lattice.

    Attributes
    ----------
    nodes
        Positions on the lattice that are in use, ``[P]``.
    weights
        Lagrange weights, ``[n, P]``: ``f(s_i) = Σ_p weights_ip f(node_p)``. Rows of samples of size zero are zero.
    """

    nodes: NDArray[np.int64]
    weights: FloatArray


@cache
def lattice() -> FloatArray:
    """Size factors at the nodes, ``[N_NODES]``."""
    middle = _LOWEST + _WIDTH * (np.arange(_PANELS) + 0.5)
    nodes: FloatArray = np.exp(middle[:, None] + 0.5 * _WIDTH * _chebyshev()[0]).ravel()
    nodes.setflags(write=False)
    return nodes


@cache
def _chebyshev() -> tuple[FloatArray, FloatArray]:
    """Chebyshev nodes of the first kind in (−1, 1) and their barycentric weights."""
    angle = (2.0 * np.arange(_ORDER) + 1.0) * np.pi / (2.0 * _ORDER)
    return np.cos(angle), np.where(np.arange(_ORDER) % 2 == 0, 1.0, -1.0) * np.sin(angle)


def largest_size(nodes: NDArray[np.int64]) -> float:
    """Upper end of the last panel among nodes in use: no size is larger."""
    return float(np.exp(_LOWEST + _WIDTH * (nodes[-1] // _ORDER + 1))) if nodes.size else 0.0


def panels(nodes: NDArray[np.int64]) -> list[tuple[int, FloatArray]]:
    """Number and size factors ``[18]`` of each panel among nodes in use."""
    numbers = nodes[::_ORDER] // _ORDER
    return [(int(p), lattice()[p * _ORDER : (p + 1) * _ORDER]) for p in numbers]


def size_basis(size: FloatArray) -> SizeBasis:
    """Lagrange weights of size factors ``[n] ≥ 0`` on the lattice.

    References
    ----------
    Berrut & Trefethen (2004), Barycentric Lagrange interpolation.

    Examples
    --------
    >>> import numpy as np
    >>> basis = size_basis(np.array([0.3, 1.7]))
    >>> bool(np.allclose(basis.weights @ np.log1p(5.0 * lattice()[basis.nodes]), np.log1p([1.5, 8.5]), atol=1e-13))
    True
    """
    known = size > 0
    position = (np.log(np.where(known, size, 1.0)) - _LOWEST) / _WIDTH
    panel = np.clip(np.floor(position), 0, _PANELS - 1).astype(np.int64)
    local = 2.0 * (position - panel) - 1.0
    used = np.unique(panel[known])
    points, barycentric = _chebyshev()
    weights = np.zeros((size.size, used.size * _ORDER))
    for j, p in enumerate(used):
        rows = np.flatnonzero(known & (panel == p))
        offset = local[rows, None] - points
        hit = offset == 0.0
        part = barycentric / np.where(hit, 1.0, offset)
        part /= part.sum(axis=1, keepdims=True)
        exact = hit.any(axis=1)
        part[exact] = hit[exact]
        weights[rows, j * _ORDER : (j + 1) * _ORDER] = part
    nodes = (used[:, None] * _ORDER + np.arange(_ORDER)).ravel()
    return SizeBasis(nodes, weights)
