"""Components whose features are independent of each other: what the families of counts and positive numbers share.

Letters: ``N`` samples, ``n`` rows of a block, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from omt.families.base import FloatArray

# Largest number of entries of dense covariances that are made on request.
_MAX_COVARIANCE_ENTRIES = 10**8


class ProductComponents(ABC):
    """K distributions on d features that are independent given the component; a base of frozen dataclasses.

    A subclass names its ``[K, d]`` arrays in ``_arrays`` and says how samples are scored.
    """

    _arrays: ClassVar[tuple[str, ...]]

    # ------------------------------------------------------------------------------------------------ parameters
    @property
    @abstractmethod
    def family(self) -> str:
        """Name of the family."""

    @property
    def K(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of components."""
        return int(getattr(self, self._arrays[0]).shape[0])

    @property
    def d(self) -> int:
        """Number of features."""
        return int(getattr(self, self._arrays[0]).shape[1])

    @property
    def n_parameters(self) -> int:
        """Number of free parameters of all components together."""
        return len(self._arrays) * self.K * self.d

    def parameters(self) -> dict[str, Any]:
        """Constructor arguments that rebuild these components."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses
        return {name: value for name, value in values.items() if value is not None}

    def select(self, index: ArrayLike) -> Self:
        """The components at ``index`` (integers or a mask), in that order."""
        rows = np.asarray(index)
        return replace(self, **{name: getattr(self, name)[rows] for name in self._arrays})  # type: ignore[type-var]  # subclasses are dataclasses

    def centre(self) -> FloatArray | None:
        """``None``: sums over samples are taken about zero."""
        return None

    # --------------------------------------------------------------------------------------------------- moments
    @abstractmethod
    def mean(self) -> FloatArray:
        """Means, ``[K, d]``."""

    @abstractmethod
    def variances(self) -> FloatArray:
        """Variance of each feature, ``[K, d]``."""

    def cov(self) -> FloatArray:
        """Covariances, ``[K, d, d]``: diagonal, so :meth:`variances` says the same in less memory.

        Raises
        ------
        ValueError
            If the dense matrices would have more than 10⁸ entries.
        """
        refuse_wide(self.K, self.d)
        dense = np.zeros((self.K, self.d, self.d))
        dense[:, np.arange(self.d), np.arange(self.d)] = self.variances()
        return dense

    # --------------------------------------------------------------------------------------------------- density
    @abstractmethod
    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` if rows ``X`` (starting at ``first_row`` of the data) are outside the support."""

    @abstractmethod
    def log_prob(self, X: Any, *, dtype: DTypeLike = np.float64, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Log-density of each sample under each component, ``[N, K]``."""

    @abstractmethod
    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw from component ``labels[i]`` for each i, ``[n, d]``."""

    # ---------------------------------------------------------------------------------------------------- checks
    def _settle(self, name: str, *, below: float = np.inf) -> None:
        """Make a ``[K, d]`` parameter a read-only float64 array with entries above 0 and below a bound."""
        value = np.array(getattr(self, name), dtype=np.float64, order="C")
        if value.ndim != 2 or 0 in value.shape:
            raise ValueError(f"{name} has shape {value.shape}; it must be [K, d] with K, d ≥ 1")
        first = np.shape(getattr(self, self._arrays[0]))
        if value.shape != first:
            raise ValueError(
                f"{name} has shape {value.shape}; {self._arrays[0]} has {first}, and they must be the same"
            )
        bad = ~((value > 0) & (value < below))
        if bad.any():
            k, j = (int(i) for i in np.argwhere(bad)[0])
            end = "finite" if below == np.inf else f"< {below:g}"
            raise ValueError(f"{name}[{k}, {j}] is {value[k, j]:g}; every entry must be > 0 and {end}")
        value.setflags(write=False)
        object.__setattr__(self, name, value)

    def _check_width(self, X: Any) -> None:
        if X.ndim != 2 or X.shape[1] != self.d:
            raise ValueError(f"X has shape {X.shape}; these components have d = {self.d}, so it must be [N, {self.d}]")

    def _check_peer(self, other: ProductComponents) -> None:
        if type(other) is not type(self):
            raise ValueError(
                f"the components are of families {self.family!r} and {other.family!r}; they must be the same"
            )
        if other.d != self.d:
            raise ValueError(f"the components have {self.d} and {other.d} features; they must have the same")


def refuse_wide(K: int, d: int) -> None:
    """Raise ``ValueError`` where ``K`` dense covariances of ``d`` features would be absurd."""
    if K * d * d > _MAX_COVARIANCE_ENTRIES:
        raise ValueError(
            f"covariances of {K} component(s) with d = {d} features have {K * d * d:.2g} entries; use the components' "
            "variances(), [K, d]"
        )


def finish(scores: FloatArray, dtype: DTypeLike, out: NDArray[Any] | None) -> NDArray[Any]:
    """Scores in the array or the type that the caller asked for."""
    if out is None:
        return scores.astype(dtype, copy=False)
    out[...] = scores
    return out


def times(X: Any, W: FloatArray) -> FloatArray:
    """``X W`` of dense or CSR ``X [n, d]`` and dense ``W [d, K]``, in float64."""
    if hasattr(X, "toarray"):
        return np.asarray(X @ W)
    return np.asarray(np.asarray(X, dtype=np.float64) @ W)


def transposed_times(X: Any, R: NDArray[Any]) -> FloatArray:
    """``Rᵀ X`` of dense or CSR ``X [n, d]`` and ``R [n, K]``, ``[K, d]`` in float64."""
    R = np.ascontiguousarray(R, dtype=np.float64)
    if hasattr(X, "toarray"):
        return np.asarray(X.T @ R).T
    return np.asarray(R.T @ np.asarray(X, dtype=np.float64))


def row_sums(X: Any, values: NDArray[Any]) -> FloatArray:
    """Sum over each row, ``[n]``, of ``values``: numbers in the place of X's entries (CSR: of its stored ones)."""
    if not hasattr(X, "toarray"):
        return np.asarray(values.sum(axis=1))
    sums = np.zeros(X.shape[0])
    # Segments without entries would take the first number of the next one.
    filled = np.flatnonzero(np.diff(X.indptr))
    if filled.size:
        sums[filled] = np.add.reduceat(values, X.indptr[filled])
    return sums


def entries(X: Any) -> NDArray[Any]:
    """The numbers of X: all of a dense array, the stored ones of a CSR matrix."""
    return np.asarray(X.data if hasattr(X, "toarray") else X)
