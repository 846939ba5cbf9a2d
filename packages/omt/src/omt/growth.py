"""Growth between two times: from gene scores to rates, from rates of cells to descendants of components.

A rate ``g`` is the factor by which a cell's descendants multiply in one unit of time, so over a step of length ``Δt``
there are ``g^Δt`` of them.

Letters: ``N`` cells, ``G`` genes of a set, ``K`` components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.scalars import is_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = ["birth_death_rate", "checked_growth", "component_growth", "grown_weights", "logistic", "mean_z_score"]

_CHUNK = 4096  # cells read at once
_LARGEST = 5.0  # z-scores are cut off there, as Waddington-OT does


def logistic(score: ArrayLike, *, lowest: float, highest: float, center: float, width: float) -> NDArray[np.float64]:
    """Logistic curve from ``lowest`` to ``highest``, with slope ``(highest − lowest)/width`` at ``center``.

    Parameters
    ----------
    score : array [...]
        Where to evaluate it.
    lowest, highest : float
        Its limits.
    center, width : float
        Middle and width of the rise, in units of the score.

    Returns
    -------
    array [...]

    Examples
    --------
    >>> logistic([-9.0, 0.25, 9.0], lowest=0.3, highest=1.7, center=0.25, width=0.5).round(3).tolist()
    [0.3, 1.0, 1.7]
    """
    from scipy.special import expit

    _check_curve({"lowest": lowest, "highest": highest, "center": center, "width": width})
    rise: NDArray[np.float64] = expit(4.0 / width * (np.asarray(score, dtype=np.float64) - center))
    return lowest + (highest - lowest) * rise


def _check_curve(given: Mapping[str, Any]) -> None:
    """Refuse what is no logistic curve, by the names that the caller knows its numbers by; the last is the width."""
    for name, value in given.items():
        if not is_number(value) or not np.isfinite(value):
            raise ValueError(f"{name} is {value!r}; it must be a finite number")
    if not value > 0.0:
        raise ValueError(f"{name} is {value!r}; it must be > 0")


def birth_death_rate(
    proliferation: ArrayLike,
    apoptosis: ArrayLike,
    *,
    beta_min: float = 0.3,
    beta_max: float = 1.7,
    beta_center: float = 0.25,
    beta_width: float = 0.5,
    delta_min: float = 0.3,
    delta_max: float = 1.7,
    delta_center: float = 0.1,
    delta_width: float = 0.2,
) -> NDArray[np.float64]:
    """Growth rate of cells from how much they express genes of proliferation and of apoptosis.

    ``exp(β − δ)``: birth ``β`` rises with the proliferation score, death ``δ`` with the apoptosis score, each along a
    logistic curve. The defaults are those of Waddington-OT, with the day as unit of time: a cell divides between 0.3
    and 1.7 times a day, so a population at least halves in 2.3 days and at most doubles in 0.4.

    Parameters
    ----------
    proliferation, apoptosis : arrays [N]
        Scores: mean z-scores of the genes of each set.
    beta_min, beta_max : float
        Least and greatest rate of birth, per unit of time.
    beta_center, beta_width : float
        Proliferation score at which birth is half way, and the width of its rise.
    delta_min, delta_max : float
        Least and greatest rate of death, per unit of time.
    delta_center, delta_width : float
        Apoptosis score at which death is half way, and the width of its rise.

    Returns
    -------
    array [N]
        Factor per unit of time; 1 where births and deaths balance.

    References
    ----------
    G. Schiebinger et al., Optimal-transport analysis of single-cell gene expression, Cell 176, 2019, "Estimating growth
    and death rates".

    Examples
    --------
    >>> birth_death_rate([2.0, 0.25, -2.0], [-2.0, 0.1, 2.0]).round(2).tolist()
    [4.06, 1.0, 0.25]
    """
    beta = {"beta_min": beta_min, "beta_max": beta_max, "beta_center": beta_center, "beta_width": beta_width}
    delta = {"delta_min": delta_min, "delta_max": delta_max, "delta_center": delta_center, "delta_width": delta_width}
    _check_curve(beta)
    _check_curve(delta)
    birth = logistic(proliferation, lowest=beta_min, highest=beta_max, center=beta_center, width=beta_width)
    death = logistic(apoptosis, lowest=delta_min, highest=delta_max, center=delta_center, width=delta_width)
    rate: NDArray[np.float64] = np.exp(birth - death)
    return rate


def mean_z_score(expression: Any, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean over genes of their z-scores over cells, cut off at ±5.

    Zeros of a sparse matrix have one z-score a gene, so only the others are looked at.

    Parameters
    ----------
    expression : [N, genes]
        Dense, sparse, or on disk; never densified.
    columns : int array [G]
        Which genes.

    Returns
    -------
    array [N]
        A gene that all cells express alike adds 0.

    Raises
    ------
    ValueError
        If a number is not finite.

    Examples
    --------
    >>> mean_z_score(np.array([[0.0, 1.0], [2.0, 1.0]]), np.array([0, 1])).tolist()
    [-0.5, 0.5]
    """
    N, G = expression.shape[0], columns.size
    total, square = np.zeros(G), np.zeros(G)
    shift: NDArray[np.float64] | None = None
    for start, block in _blocks(expression, columns):
        values, gene, _ = _entries(block)
        if not np.isfinite(values).all():
            raise ValueError(f"expression is not finite in one of the rows {start} to {start + block.shape[0] - 1}")
        if shift is None:  # squares about a typical value lose no digits
            shift = np.zeros(G) if hasattr(block, "tocoo") else block.mean(axis=0)
        moved = values - shift[gene]
        total += np.bincount(gene, moved, G)
        square += np.bincount(gene, moved**2, G)
    mean = total / N
    spread = np.sqrt(np.maximum(square / N - mean**2, 0.0))
    assert shift is not None  # noqa: S101  # there is at least one block
    mean = mean + shift
    flat = spread <= 1e-12 * np.maximum(np.abs(mean), 1.0)
    spread[flat] = np.inf
    score = np.zeros(N)
    for start, block in _blocks(expression, columns):
        values, gene, cell = _entries(block)
        z = np.clip((values - mean[gene]) / spread[gene], -_LARGEST, _LARGEST)
        part = slice(start, start + block.shape[0])
        if hasattr(block, "tocoo"):
            absent = np.clip(-mean / spread, -_LARGEST, _LARGEST)
            score[part] = absent.sum()
            z = z - absent[gene]
        score[part] += np.bincount(cell, z, block.shape[0])
    return score / G


def component_growth(
    rates: ArrayLike, responsibilities: ArrayLike, dt: float, *, sample_weight: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Descendants per cell of each component over a step: the mean of ``g^Δt`` over its cells.

    Weighting cells by ``g^Δt`` and summing over a component gives its weight times this number.

    Parameters
    ----------
    rates : array [N]
        ``g``, positive, per unit of time.
    responsibilities : array [N, K]
        Of the cells for the components.
    dt : float
        ``Δt > 0``, length of the step.
    sample_weight : array [N], optional
        Weights of the cells; equal ones if not given.

    Returns
    -------
    array [K]
        1 for a component without cells.

    Raises
    ------
    ValueError
        If a rate is not positive and finite, ``dt`` is not positive, or ``g^Δt`` is too large or small for float64.

    Examples
    --------
    >>> component_growth([2.0, 2.0, 1.0], [[1, 0], [0.5, 0.5], [0, 1]], dt=3.0).round(3).tolist()
    [8.0, 3.333]
    """
    g = np.asarray(rates, dtype=np.float64)
    R = np.asarray(responsibilities, dtype=np.float64)
    if g.ndim != 1 or R.ndim != 2 or R.shape[0] != g.size:
        raise ValueError(f"rates has shape {g.shape} and responsibilities {R.shape}; they must be [N] and [N, K]")
    if not (np.isfinite(dt) and dt > 0.0):
        raise ValueError(f"dt is {dt!r}; it must be a finite number > 0, the time that the step takes")
    bad = ~(np.isfinite(g) & (g > 0.0))
    if bad.any():
        raise ValueError(f"rates[{int(bad.argmax())}] is {g[bad][0]:g}; a growth rate must be > 0 (1: no change)")
    with np.errstate(over="ignore", under="ignore"):
        factor = g**dt
    bad = ~(np.isfinite(factor) & (factor > 0.0))
    if bad.any():
        raise ValueError(
            f"rates[{int(bad.argmax())}] is {g[bad][0]:g}, which over dt={dt:g} is beyond float64; rates are per unit "
            "of time, in the unit of the times"
        )
    weighted = R if sample_weight is None else R * np.asarray(sample_weight, dtype=np.float64)[:, None]
    total = weighted.sum(axis=0)
    growth: NDArray[np.float64] = np.divide(factor @ weighted, total, out=np.ones(R.shape[1]), where=total > 0.0)
    return growth


def checked_growth(growth: ArrayLike, K: int, what: str, names: Sequence[str] | None = None) -> NDArray[np.float64]:
    """Growth [K] of components as an array, or a ValueError that names the component."""
    values = np.array(growth, dtype=np.float64)
    if values.shape != (K,):
        raise ValueError(f"{what} has shape {values.shape}; there are {K} source components, so it must be [{K}]")
    bad = ~(np.isfinite(values) & (values > 0.0))
    if bad.any():
        k = int(bad.argmax())
        of = f" (component {names[k]!r})" if names is not None else ""
        raise ValueError(f"{what}[{k}]{of} is {values[k]:g}; descendants per cell must be finite and > 0")
    return values


def grown_weights(weights: NDArray[np.float64], growth: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Weights [K] that sum to 1 after each component has grown; as they are without growth."""
    if growth is None:
        return weights
    grown = weights * (growth / growth.max())  # no overflow, whatever the unit of growth
    normalised: NDArray[np.float64] = grown / grown.sum()
    return normalised


def _blocks(expression: Any, columns: NDArray[np.int64]) -> Iterator[tuple[int, Any]]:
    for start in range(0, expression.shape[0], _CHUNK):
        rows = expression[start : start + _CHUNK]
        part = rows[:, columns]
        yield start, part if hasattr(part, "tocoo") else np.asarray(part, dtype=np.float64)


def _entries(block: Any) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Values of a block with their genes and cells: those stored of a sparse one, all of a dense one."""
    if hasattr(block, "tocoo"):
        coo = block.tocoo()
        return coo.data.astype(np.float64), coo.col.astype(np.int64), coo.row.astype(np.int64)
    cell, gene = np.indices(block.shape)
    return block.ravel(), gene.ravel(), cell.ravel()
