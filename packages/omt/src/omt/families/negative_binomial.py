"""Components of overdispersed counts: products of negative binomials with one dispersion a feature.

Letters: ``N`` samples, ``n`` rows of a block, ``d`` features, ``K`` components, ``L`` components of another mixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import sparse

from omt.families.base import FloatArray
from omt.families.loggamma import log_rising, rising_table
from omt.families.product import ProductComponents, finish, row_sums, times
from omt.families.sizes import check_reference, panels, size_basis, sizes_of, totals_of
from omt.families.support import require_counts

# Numbers that are worked on at a time: 512 KiB, a part of the second-level cache.
_PIECE = 65536


@dataclass(frozen=True, eq=False)
class NegativeBinomialComponents(ProductComponents):
    """K products of negative binomial distributions, stacked; their variances are ``μ + φ μ²``.

    Parameters
    ----------
    means
        ``μ [K, d]``, positive: the mean counts of a sample of size one.
    dispersion
        ``φ > 0``, one a feature ``[d]`` or one number for all.
    reference
        Total count of a sample of size one. If given, a sample ``x`` has size ``s = Σ_g x_g / reference``, means
        ``s μ`` and variances ``s μ + φ (s μ)²``; if ``None``, every sample has size one.

    Raises
    ------
    ValueError
        If a shape does not fit, or a mean or dispersion is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> nb = NegativeBinomialComponents(np.array([[2.0, 0.5]]), 0.5)
    >>> nb.variances().tolist(), nb.dispersion.tolist()
    ([[4.0, 0.625]], [0.5, 0.5])
    >>> float(np.exp(nb.log_prob(np.array([[0, 0]])))[0, 0].round(12))
    0.16
    """

    means: FloatArray
    dispersion: FloatArray
    reference: float | None = None
    _arrays: ClassVar[tuple[str, ...]] = ("means",)
    # Σ_g log(1 + φ_g s μ_kg) / φ_g at the nodes of a panel of size factors, [18, K], by panel.
    _panels: dict[int, FloatArray] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._settle("means")
        object.__setattr__(self, "dispersion", checked_dispersion(self.dispersion, self.d))
        if self.reference is not None:
            check_reference(float(self.reference))
            object.__setattr__(self, "reference", float(self.reference))

    @property
    def family(self) -> str:
        """``"negative_binomial"``."""
        return "negative_binomial"

    @property
    def n_parameters(self) -> int:
        """Means of all components and the dispersions that they share."""
        return self.K * self.d + self.d

    def parameters(self) -> dict[str, Any]:
        """Constructor arguments that rebuild these components."""
        known = {"means": self.means, "dispersion": self.dispersion}
        return known if self.reference is None else {**known, "reference": self.reference}

    def centre(self) -> FloatArray:
        """Means and dispersions, where the next M-step takes its weights from, ``[K, 2, d]``."""
        return np.stack([self.means, np.broadcast_to(self.dispersion, self.means.shape)], axis=1)

    # --------------------------------------------------------------------------------------------------- density
    @cached_property
    def _linear(self) -> FloatArray:
        """``log μ − log(1 + φ μ)``, ``[d, K]``."""
        return np.ascontiguousarray((np.log(self.means) - np.log1p(self.dispersion * self.means)).T)

    @cached_property
    def _log_means(self) -> FloatArray:
        return np.ascontiguousarray(np.log(self.means).T)

    @cached_property
    def _scaled(self) -> FloatArray:
        """``φ μ``, ``[K, d]``."""
        return self.dispersion * self.means

    @cached_property
    def _partition(self) -> FloatArray:
        """``Σ_g log(1 + φ μ) / φ`` of samples of size one, ``[K]``."""
        return np.log1p(self._scaled) @ (1.0 / self.dispersion)

    @cached_property
    def _rising(self) -> FloatArray:
        return rising_table(self.dispersion)

    def check(self, X: Any, first_row: int) -> None:
        """Raise ``ValueError`` for entries that are no counts."""
        require_counts(X, first_row, self.family)

    def log_prob(
        self,
        X: Any,
        *,
        dtype: DTypeLike = np.float64,
        out: NDArray[Any] | None = None,
        size: FloatArray | None = None,
    ) -> NDArray[Any]:
        """Log-probability of each sample under each component.

        Without size factors one product; with them also one logarithm for each non-zero count and component, and the
        zeros' share by interpolation in the size factor (:mod:`omt.families.sizes`), exact to rounding.

        Parameters
        ----------
        X
            Counts, ``[N, d]``, dense or CSR.
        dtype, out
            Type of the result, or an array ``[N, K]`` to fill; sums are in float64 always.
        size
            Size factor of each sample, ``[N]``; default: from the totals, if there is a ``reference``.

        Returns
        -------
        ndarray ``[N, K]``
        """
        self._check_width(X)
        X = X if hasattr(X, "toarray") else sparse.csr_array(np.asarray(X, dtype=np.float64))
        size = sizes_of(X, size, self.reference)
        base = row_sums(X, log_rising(X.data, X.indices, self.dispersion, self._rising))
        if size is None:
            scores = times(X, self._linear)
            scores -= self._partition
        else:
            scores = times(X, self._log_means)
            scores -= self._zeros(size)
            base += totals_of(X) * np.log(np.where(size > 0, size, 1.0))
            for rows, _, values, v in shrinkages(X, size, self._scaled):
                np.log(v, out=v)
                np.multiply(v, values, out=v)
                filled = np.flatnonzero(np.diff(X.indptr[rows.start : rows.stop + 1]))
                starts = X.indptr[rows.start : rows.stop][filled] - X.indptr[rows.start]
                scores[rows.start + filled] -= np.add.reduceat(v, starts, axis=1).T
        scores += base[:, None]
        return finish(scores, dtype, out)

    def _zeros(self, size: FloatArray) -> FloatArray:
        """``Σ_g log(1 + φ_g s_i μ_kg) / φ_g``, ``[n, K]``: minus the log-probability of a sample of zeros."""
        basis = size_basis(size)
        parts = []
        for panel, nodes in panels(basis.nodes):
            if panel not in self._panels:
                self._panels[panel] = np.stack([np.log1p(s * self._scaled) @ (1.0 / self.dispersion) for s in nodes])
            parts.append(self._panels[panel])
        return basis.weights @ np.concatenate(parts) if parts else np.zeros((size.size, self.K))

    # --------------------------------------------------------------------------------------- samples and moments
    def sample(self, labels: NDArray[np.int64], rng: np.random.Generator) -> FloatArray:
        """One draw of size one from component ``labels[i]`` for each i, ``[n, d]``."""
        means = self.means[np.asarray(labels)]
        return rng.poisson(rng.gamma(1.0 / self.dispersion, self.dispersion * means)).astype(np.float64)

    def mean(self) -> FloatArray:
        """Means of a sample of size one, ``[K, d]``."""
        return self.means

    def variances(self) -> FloatArray:
        """Variances of a sample of size one, ``[K, d]``."""
        return self.means + self.dispersion * self.means**2

    # ----------------------------------------------------------------------------------------------- divergences
    def kl(self, other: NegativeBinomialComponents) -> FloatArray:
        """Kullback-Leibler divergences of samples of size one, in nats, ``[K, L]``; closed for equal dispersions.

        Raises
        ------
        ValueError
            If the dispersions differ: then there is no closed form.
        """
        self._check_peer(other)
        differ = ~np.isclose(self.dispersion, other.dispersion, rtol=1e-9, atol=0.0)
        if differ.any():
            g = int(differ.argmax())
            raise ValueError(
                f"dispersion of feature {g} is {self.dispersion[g]:g} on one side and {other.dispersion[g]:g} on the "
                "other; divergences are closed for equal dispersions only: fit both with "
                "NegativeBinomial(dispersion=first.components.dispersion), or use cost='w2'"
            )
        own = (self.means * self._linear.T).sum(axis=1) - self._partition
        return np.asarray(np.maximum(own[:, None] + other._partition - self.means @ other._linear, 0.0))

    def natural_parameters(self) -> FloatArray:
        """Log-odds ``log(φμ / (1 + φμ))``, ``[K, d]``."""
        return np.log(self._scaled) - np.log1p(self._scaled)

    def mean_parameters(self) -> FloatArray:
        """``μ``, ``[K, d]``."""
        return self.means

    def log_partition(self, eta: FloatArray) -> FloatArray:
        """``−Σ_g log(1 − exp η_g) / φ_g`` of natural parameters ``[..., d]``."""
        return np.asarray(-np.log(-np.expm1(eta)) @ (1.0 / self.dispersion))


def shrinkages(
    X: Any, size: FloatArray, scaled: FloatArray
) -> Iterator[tuple[slice, NDArray[np.intp], NDArray[Any], FloatArray]]:
    """``1 + φ_g s_i μ_kg`` for the stored counts of a CSR block, a few rows at a time so that they stay in the cache.

    Parameters
    ----------
    X
        CSR, ``[n, d]``.
    size
        Size factors, ``[n]``.
    scaled
        ``φ μ``, ``[K, d]``.

    Yields
    ------
    rows, columns, values, v
        Rows of the piece, features and values of its ``m`` stored counts, and the numbers ``[K, m]``, which the caller
        may overwrite.
    """
    n, K = X.shape[0], scaled.shape[0]
    step = max(1, _PIECE * n // max(K * X.nnz, 1))
    for first in range(0, n, step):
        last = min(first + step, n)
        part = slice(int(X.indptr[first]), int(X.indptr[last]))
        if part.start == part.stop:
            continue
        # Native integers and no check of bounds: the gather is what this costs.
        columns = X.indices[part].astype(np.intp)
        sizes = np.repeat(size[first:last], np.diff(X.indptr[first : last + 1]))
        v = np.empty((K, columns.size))
        for k in range(K):
            scaled[k].take(columns, out=v[k], mode="clip")
        v *= sizes
        v += 1.0
        yield slice(first, last), columns, X.data[part], v


def checked_dispersion(dispersion: ArrayLike, d: int | None) -> FloatArray:
    """A dispersion for each of ``d`` features, read-only.

    Raises
    ------
    ValueError
        If its shape does not fit or a value is not positive.
    """
    value = np.array(dispersion, dtype=np.float64)
    if value.ndim == 0 and d is not None:
        value = np.full(d, float(value))
    if value.ndim > 1 or (d is not None and value.shape != (d,)):
        raise ValueError(f"dispersion has shape {value.shape}; it must be one number, or [{d or 'd'}], one a feature")
    bad = ~(np.isfinite(value) & (value > 0))
    if bad.any():
        g = int(bad.argmax())
        raise ValueError(
            f"dispersion of feature {g} is {value.ravel()[g]:g}; every dispersion must be > 0 (without overdispersion "
            "use family='poisson')"
        )
    value.setflags(write=False)
    return value
