r"""Inner plans: optimal transport inside one pair of Gaussian components, batched over pairs.

Dimension letters: ``K`` source components, ``L`` target components, ``n`` pairs, ``d`` features, ``N``/``M`` points.

For ``p = N(m, A)``, ``q = N(m', B)``, cost ``‖x − y‖²`` and inner temperature ``ε ≥ 0`` everything follows from one
singular value decomposition. Take any factors ``A = F Fᵀ``, ``B = G Gᵀ``, and ``Gᵀ F = V diag(s) Uᵀ``. In the
*canonical coordinates* ``x − m = (F U) ξ`` and ``y − m' = (G V) η`` both components are standard normal and the optimal
plan couples axis ``i`` of ``ξ`` with axis ``i`` of ``η`` alone, with correlation ``c_i = γ_i / s_i``:

======================  ==================================================================================
gain                    ``g_i = 1 / (ε/4 + √(ε²/16 + s_i²))``
covariance on an axis   ``γ_i = s_i² g_i``  (``= −ε/4 + √(ε²/16 + s_i²)``; ``→ s_i`` as ``ε → 0``)
unexplained variance    ``1 − c_i² = ε g_i / 2``
cost                    ``‖m − m'‖² + tr A + tr B − 2 Σ γ_i + (ε/2) Σ log(1 + 2 γ_i / ε)``
plan                    ``y | x ~ N(m' + T (x − m), B − T A T)``, ``T = (G V) diag(g) (G V)ᵀ``
density ratio           ``ε log dπ/d(p⊗q) = 2⟨x−m, y−m'⟩ − (x−m)ᵀT(x−m) − (y−m')ᵀT'(y−m') + (ε/2) Σ log(1 + 2 γ_i/ε)``
======================  ==================================================================================

with ``T' = (F U) diag(g) (F U)ᵀ`` the map back. Three things make this form the one to compute with. No covariance
is inverted and no determinant is taken, so a singular covariance or ``d = 512`` is no special case. ``T`` is a Gram
matrix: symmetric and positive semi-definite to the last bit. And the ``s_i`` come from a product of *factors*, not
from the eigenvalues of ``A^{1/2} B A^{1/2}``, whose square root would lose half of the digits where ``s_i`` is
small.

References
----------
Janati, Muzellec, Peyré, Cuturi, "Entropic optimal transport between unbalanced Gaussian measures has a closed form",
NeurIPS 2020 (Theorem 1). Takatsu, "Wasserstein geometry of Gaussian measures", Osaka J. Math. 48, 2011.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from omt.families.base import FloatArray

__all__ = [
    "InnerPlans",
    "covariance_factors",
    "diagonal_cost",
    "diagonal_plans",
    "gaussian_cost",
    "gaussian_plans",
    "quadratic_form",
]

# Work arrays of a batch of pairs stay near the size of a core's second-level cache: the batch is a stream of small
# matrix products and decompositions, and none of them should wait for main memory.
_BLOCK_ENTRIES = 1 << 18


def covariance_factors(covariances: FloatArray) -> FloatArray:
    """Square factors ``F`` with ``F Fᵀ`` the covariance, for singular covariances too.

    Parameters
    ----------
    covariances : array [n, d, d]
        Symmetric positive semi-definite matrices.

    Returns
    -------
    array [n, d, d]
        Eigenvectors times the roots of the eigenvalues. Eigenvalues of the size of rounding are taken as zero: a root
        would make them look like real spread.

    Raises
    ------
    ValueError
        If a matrix has an eigenvalue that is negative beyond rounding; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> F = covariance_factors(np.array([[[2.0, 1.0], [1.0, 2.0]]]))
    >>> bool(np.allclose(F @ F.transpose(0, 2, 1), [[2.0, 1.0], [1.0, 2.0]]))
    True
    """
    values, vectors = np.linalg.eigh(covariances)
    largest = np.abs(values).max(axis=-1, initial=0.0)
    negative = values.min(axis=-1, initial=0.0) < -1e-8 * largest
    if negative.any():
        k = int(np.flatnonzero(negative)[0])
        raise ValueError(
            f"covariance {k} is not positive semi-definite: its smallest eigenvalue is {values[k].min():.3g} "
            f"(largest {largest[k]:.3g})"
        )
    rounding = values.shape[-1] * np.finfo(np.float64).eps * largest[..., None]
    return np.asarray(vectors * np.sqrt(np.where(values > rounding, values, 0.0))[..., None, :])


def gaussian_cost(
    means_p: FloatArray, covariances_p: FloatArray, means_q: FloatArray, covariances_q: FloatArray, epsilon: float = 0.0
) -> FloatArray:
    """Optimal transport cost between every two Gaussians of two lists.

    Only singular values are computed, in blocks of pairs.

    Parameters
    ----------
    means_p, means_q : array [K, d], [L, d]
        Means.
    covariances_p, covariances_q : array [K or 1, d, d], [L or 1, d, d]
        Covariances; a first axis of length one is shared by all components of its side and decomposed only once.
    epsilon : float
        Inner temperature ``ε ≥ 0`` in units of the cost; 0 gives the squared Wasserstein-2 (Bures) distance.

    Returns
    -------
    array [K, L]
        ``min_π ∫ ‖x − y‖² dπ + ε KL(π ‖ p⊗q)``, never negative.

    Examples
    --------
    >>> import numpy as np
    >>> C = gaussian_cost(np.zeros((1, 2)), np.eye(2)[None], np.ones((1, 2)), 4.0 * np.eye(2)[None])
    >>> round(float(C[0, 0]), 12)  # |m - m'|² + Σ (1 - 2)²
    4.0
    """
    d = means_p.shape[1]
    F = covariance_factors(covariances_p)
    Gt = covariance_factors(covariances_q).transpose(0, 2, 1)
    K, L = len(F), len(Gt)
    spectral = np.empty((K, L))
    columns = max(1, min(L, _BLOCK_ENTRIES // d**2))
    rows = max(1, _BLOCK_ENTRIES // (columns * d**2))
    for i in range(0, K, rows):
        for j in range(0, L, columns):
            products = Gt[None, j : j + columns] @ F[i : i + rows, None]
            s = np.asarray(np.linalg.svd(products, compute_uv=False))
            spectral[i : i + rows, j : j + columns] = _spectral_cost(s, epsilon)
    traces_p = np.trace(covariances_p, axis1=1, axis2=2)
    traces_q = np.trace(covariances_q, axis1=1, axis2=2)
    inner = traces_p[:, None] + traces_q[None, :] + spectral
    return np.asarray(np.maximum(cdist(means_p, means_q, "sqeuclidean") + inner, 0.0))


def diagonal_cost(
    means_p: FloatArray, variances_p: FloatArray, means_q: FloatArray, variances_q: FloatArray, epsilon: float = 0.0
) -> FloatArray:
    """The cost of :func:`gaussian_cost` for axis-aligned covariances: axis by axis, without any decomposition.

    Parameters
    ----------
    means_p, means_q : array [K, d], [L, d]
        Means.
    variances_p, variances_q : array [K, d], [L, d]
        Variances along the axes.
    epsilon : float
        Inner temperature ``ε ≥ 0`` in units of the cost.

    Returns
    -------
    array [K, L]
        Costs, never negative.

    Examples
    --------
    >>> import numpy as np
    >>> diagonal_cost(np.zeros((1, 1)), np.ones((1, 1)), np.zeros((1, 1)), np.full((1, 1), 9.0))
    array([[4.]])
    """
    sd_p, sd_q = np.sqrt(variances_p), np.sqrt(variances_q)
    if epsilon == 0.0:
        # Σ (m−m')² + Σ (σ−σ')²: one Euclidean distance, summed without cancellation.
        return np.asarray(cdist(np.hstack([means_p, sd_p]), np.hstack([means_q, sd_q]), "sqeuclidean"))
    C = cdist(means_p, means_q, "sqeuclidean")
    C += variances_p.sum(axis=1)[:, None] + variances_q.sum(axis=1)[None, :]
    rows = max(1, _BLOCK_ENTRIES // sd_q.size)
    for i in range(0, len(C), rows):
        C[i : i + rows] += _spectral_cost(sd_p[i : i + rows, None] * sd_q, epsilon)
    return np.asarray(np.maximum(C, 0.0))


@dataclass(frozen=True, eq=False)
class InnerPlans:
    """The optimal plans of ``n`` Gaussian pairs, in canonical coordinates.

    Arrays of axis-aligned pairs are ``[n, d]`` (the diagonals), those of general pairs ``[n, d, d]``;
    :attr:`axis_aligned` says which. Build it with :func:`gaussian_plans` or :func:`diagonal_plans`.

    Parameters
    ----------
    source_axes : array [n, d, d] or [n, d]
        ``F U``: canonical axes of the source components, ``A = (F U)(F U)ᵀ``.
    target_axes : array [n, d, d] or [n, d]
        ``G V``: canonical axes of the target components, ``B = (G V)(G V)ᵀ``.
    singular_values : array [n, d]
        ``s``, in units of the squared features.
    epsilon : float
        Inner temperature in units of the cost.
    """

    source_axes: FloatArray
    target_axes: FloatArray
    singular_values: FloatArray
    epsilon: float

    @property
    def axis_aligned(self) -> bool:
        """Whether the pairs are axis-aligned, so that maps are vectors."""
        return self.source_axes.ndim == 2

    def gains(self) -> FloatArray:
        """``g``, shape [n, d]; zero on an axis where neither side varies with the other."""
        return _gains(self.singular_values, self.epsilon, exact=self.axis_aligned)

    def correlations(self) -> FloatArray:
        """Canonical correlations ``c = γ/s`` in [0, 1], shape [n, d]."""
        return self.singular_values * self.gains()

    def maps(self) -> FloatArray:
        """``T`` with ``E[y | x] = m' + T (x − m)``: symmetric, positive semi-definite, [n, d, d] or [n, d]."""
        return self._gram(self.target_axes)

    def inverse_maps(self) -> FloatArray:
        """``T'`` with ``E[x | y] = m + T' (y − m')``: the maps of the pairs with source and target exchanged."""
        return self._gram(self.source_axes)

    def noise_factors(self) -> FloatArray:
        """``H`` with ``H Hᵀ = Cov(y | x) = B − T A T``, so that ``y = m' + T (x − m) + H z`` for standard normal ``z``.

        For ``ε > 0`` the covariance is ``(ε/2) T``. For ``ε = 0`` it is zero, except on an axis where the source has no
        spread and the target has: mass on a point has to split there.
        """
        gains = self.gains()
        # At ε = 0 the plan is a map wherever the source varies; where it does not, nothing is explained.
        unexplained = 0.5 * self.epsilon * gains if self.epsilon > 0.0 else np.where(gains > 0.0, 0.0, 1.0)
        root = np.sqrt(unexplained)
        return self.target_axes * (root if self.axis_aligned else root[:, None, :])

    def log_normalizers(self) -> FloatArray:
        """``½ Σ log(1 + 2γ/ε) = −½ Σ log(1 − c²)``, shape [n]: the log density ratio at the two means."""
        self._require_density()
        gamma = self.singular_values * self.correlations()
        return np.asarray(0.5 * np.log1p(2.0 * gamma / self.epsilon).sum(axis=1))

    def log_density_ratio(self, i: int, centred_x: FloatArray, centred_y: FloatArray) -> FloatArray:
        """``log dπ/d(p⊗q)`` of pair ``i`` at all pairs of points.

        Parameters
        ----------
        i : int
            Index of the pair.
        centred_x, centred_y : array [N, d], [M, d]
            Points minus the mean of their component.

        Returns
        -------
        array [N, M]
            Log density ratio.

        Raises
        ------
        ValueError
            If ``epsilon`` is zero: the plan then sits on a graph and has no density.
        """
        log_normalizer = self.log_normalizers()[i]
        cross = 2.0 * (centred_x @ centred_y.T)
        quadratic_x = quadratic_form(self[i : i + 1].maps()[0], centred_x)
        quadratic_y = quadratic_form(self[i : i + 1].inverse_maps()[0], centred_y)
        return np.asarray((cross - quadratic_x[:, None] - quadratic_y[None, :]) / self.epsilon + log_normalizer)

    def __getitem__(self, index: slice) -> InnerPlans:
        return InnerPlans(self.source_axes[index], self.target_axes[index], self.singular_values[index], self.epsilon)

    def __len__(self) -> int:
        return len(self.singular_values)

    def _gram(self, axes: FloatArray) -> FloatArray:
        gains = self.gains()
        if self.axis_aligned:
            return axes * axes * gains
        scaled = axes * np.sqrt(gains)[:, None, :]
        gram = scaled @ scaled.transpose(0, 2, 1)
        # BLAS may sum the two triangles in different orders; downstream code relies on exact symmetry.
        return np.asarray(0.5 * (gram + gram.transpose(0, 2, 1)))

    def _require_density(self) -> None:
        if self.epsilon == 0.0:
            raise ValueError("a plan at epsilon=0 is a map and has no density; use epsilon > 0")


def gaussian_plans(factors_p: FloatArray, factors_q: FloatArray, epsilon: float = 0.0) -> InnerPlans:
    """Optimal plans of ``n`` pairs of Gaussians with general covariances.

    Parameters
    ----------
    factors_p, factors_q : array [n, d, d]
        Factors of the covariances (:func:`covariance_factors`) of the source and target component of each pair.
    epsilon : float
        Inner temperature ``ε ≥ 0`` in units of the cost.

    Returns
    -------
    InnerPlans
        Holds ``2 n d²`` numbers: call it in blocks where ``n`` is large.

    Examples
    --------
    >>> import numpy as np
    >>> A, B = np.array([[[2.0, 1.0], [1.0, 2.0]]]), np.array([[[1.0, 0.0], [0.0, 9.0]]])
    >>> T = gaussian_plans(covariance_factors(A), covariance_factors(B)).maps()
    >>> bool(np.allclose(T @ A @ T, B))
    True
    """
    V, s, Ut = np.linalg.svd(factors_q.transpose(0, 2, 1) @ factors_p)
    return InnerPlans(factors_p @ Ut.transpose(0, 2, 1), factors_q @ V, s, float(epsilon))


def diagonal_plans(variances_p: FloatArray, variances_q: FloatArray, epsilon: float = 0.0) -> InnerPlans:
    """Optimal plans of ``n`` pairs of axis-aligned Gaussians.

    Parameters
    ----------
    variances_p, variances_q : array [n, d]
        Variances of the source and target component of each pair.
    epsilon : float
        Inner temperature ``ε ≥ 0`` in units of the cost.

    Returns
    -------
    InnerPlans
        With :attr:`InnerPlans.axis_aligned` true.

    Examples
    --------
    >>> import numpy as np
    >>> diagonal_plans(np.array([[1.0, 4.0]]), np.array([[9.0, 1.0]])).maps()
    array([[3. , 0.5]])
    """
    sd_p, sd_q = np.sqrt(variances_p), np.sqrt(variances_q)
    return InnerPlans(sd_p, sd_q, sd_p * sd_q, float(epsilon))


def quadratic_form(matrix: FloatArray, points: FloatArray) -> FloatArray:
    """``xᵀ T x`` of every row ``x`` of ``points`` [N, d], for ``T`` [d, d] or the diagonal [d]: shape [N]."""
    image = points * matrix if matrix.ndim == 1 else points @ matrix
    return np.asarray(np.einsum("nd,nd->n", image, points))


def _gains(s: FloatArray, epsilon: float, *, exact: bool) -> FloatArray:
    """``g = 1/(ε/4 + √(ε²/16 + s²))``; at ``ε = 0`` the pseudo-inverse ``1/s``.

    Singular values of a decomposition carry rounding of the size of the largest one, and what is below it counts as
    zero; products of standard deviations (``exact``) are known to the last digit however small they are.
    """
    if epsilon > 0.0:
        return np.asarray(1.0 / (0.25 * epsilon + np.hypot(0.25 * epsilon, s)))
    rounding = s.shape[-1] * np.finfo(np.float64).eps * s.max(axis=-1, keepdims=True, initial=0.0)
    return np.divide(1.0, s, out=np.zeros_like(s), where=s > (0.0 if exact else rounding))


def _spectral_cost(s: FloatArray, epsilon: float) -> FloatArray:
    """``Σ (ε/2) log(1 + 2γ/ε) − 2γ`` over the last axis."""
    if epsilon == 0.0:
        return np.asarray(-2.0 * s.sum(axis=-1))
    gamma = s * (s * _gains(s, epsilon, exact=True))
    return np.asarray((0.5 * epsilon * np.log1p(2.0 * gamma / epsilon) - 2.0 * gamma).sum(axis=-1))
