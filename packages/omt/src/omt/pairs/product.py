"""Components whose features are independent: cost and images, family by family.

For a squared cost the optimal plan between two product laws is the product of the plans of their features, and each of
these is comonotone: :mod:`omt.pairs.comonotone` for counts, :mod:`omt.pairs.positive` for positive numbers.

Letters: ``K`` source components, ``L`` target components, ``d`` features, ``n`` samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.spatial.distance import cdist

from omt.families import (
    BernoulliComponents,
    ExponentialComponents,
    GammaComponents,
    NegativeBinomialComponents,
    PoissonComponents,
)
from omt.families.base import FloatArray
from omt.families.product import ProductComponents
from omt.families.sizes import totals_of
from omt.pairs.comonotone import count_cost, count_draw, count_mean
from omt.pairs.countlaws import CountLaws
from omt.pairs.positive import gamma_cost, gamma_map

__all__ = ["product_cost", "product_images"]

# Pairs of one-dimensional laws that are compared at once.
_BLOCK_PAIRS = 1 << 21


def product_cost(p: ProductComponents, q: ProductComponents) -> FloatArray:
    """Squared Wasserstein-2 distances between components of one product family.

    Parameters
    ----------
    p, q : ProductComponents
        Source and target components, at the same sample size.

    Returns
    -------
    array [K, L]
        Sums over the features.

    Raises
    ------
    ValueError
        For multinomial components, whose features are tied by their total.

    Examples
    --------
    >>> import numpy as np
    >>> p, q = BernoulliComponents(np.array([[0.25, 0.5]])), BernoulliComponents(np.array([[0.75, 0.5]]))
    >>> product_cost(p, q)
    array([[0.5]])
    """
    if isinstance(p, BernoulliComponents) and isinstance(q, BernoulliComponents):
        return np.asarray(cdist(p.probs, q.probs, "cityblock"))
    if isinstance(p, ExponentialComponents) and isinstance(q, ExponentialComponents):
        return np.asarray(2.0 * cdist(1.0 / p.rates, 1.0 / q.rates, "sqeuclidean"))
    if isinstance(p, GammaComponents) and isinstance(q, GammaComponents):
        return gamma_cost(p.shapes, p.rates, q.shapes, q.rates)
    return _count_cost_table(*_count_parameters(p), *_count_parameters(q))


def product_images(
    X: Any,
    p: ProductComponents,
    q: ProductComponents,
    k: int,
    l: int,
    rng: np.random.Generator | None = None,
) -> FloatArray:
    """Where the inner plan of one pair of components takes samples.

    Samples of counts keep their size: with size factors, a sample of size ``s`` moves from the law of the source
    component at size ``s`` to that of the target component at size ``s``.

    Parameters
    ----------
    X : array or CSR [n, d]
        Samples in the families' support; the zeros of counts are never stored one by one unless sizes differ.
    p, q : ProductComponents
        Components of one family.
    k, l : int
        The pair.
    rng : numpy.random.Generator, optional
        Draw images of counts, whose plans split mass; otherwise their conditional mean.

    Returns
    -------
    array [n, d]
        Images.

    Examples
    --------
    >>> import numpy as np
    >>> p, q = PoissonComponents(np.array([[3.0]])), PoissonComponents(np.array([[3.0]]))
    >>> product_images(np.array([[2.0], [0.0]]), p, q, 0, 0).round(12)
    array([[2.],
           [0.]])
    """
    if isinstance(p, ExponentialComponents) and isinstance(q, ExponentialComponents):
        return np.asarray(np.asarray(X, dtype=np.float64) * (p.rates[k] / q.rates[l]))
    if isinstance(p, GammaComponents) and isinstance(q, GammaComponents):
        return gamma_map(np.asarray(X, dtype=np.float64), p.shapes[k], p.rates[k], q.shapes[l], q.rates[l])
    (mean_p, phi_p), (mean_q, phi_q) = _count_parameters(p), _count_parameters(q)
    source, target = CountLaws(mean_p[k], phi_p), CountLaws(mean_q[l], phi_q)
    reference_p, reference_q = getattr(p, "reference", None), getattr(q, "reference", None)
    if reference_p is not None and reference_q is not None:
        totals = totals_of(X)
        return _images_of_sizes(X, source, target, totals / reference_p, totals / reference_q, rng)
    return _images_of_one_size(X, source, target, rng)


def _count_parameters(p: ProductComponents) -> tuple[FloatArray, FloatArray]:
    """Means [K, d] and dispersions [d] of the laws of the features, see :class:`omt.pairs.countlaws.CountLaws`."""
    if isinstance(p, PoissonComponents):
        return p.rates, np.zeros(p.d)
    if isinstance(p, NegativeBinomialComponents):
        return p.means, p.dispersion
    if isinstance(p, BernoulliComponents):
        return p.probs, np.full(p.d, -1.0)
    raise ValueError(
        f"family {p.family!r} has no closed optimal plan (its features are tied by their total): use cost='kl', "
        "'jeffreys' or 'hellinger', or fit with family='poisson' and size_factors='total'"
    )


def _count_cost_table(mean_p: FloatArray, phi_p: FloatArray, mean_q: FloatArray, phi_q: FloatArray) -> FloatArray:
    """Costs [K, L]; pairs of laws that occur several times, as those of rarely seen genes do, are computed once."""
    (K, d), L = mean_p.shape, len(mean_q)
    out = np.zeros((K, L))
    step = max(1, _BLOCK_PAIRS // (K * L))
    for start in range(0, d, step):
        genes = np.arange(start, min(start + step, d))
        # Genes come first, so that neighbouring pairs share laws.
        p, i = _distinct(mean_p[:, genes].T, np.broadcast_to(phi_p[genes, None], (genes.size, K)))
        q, j = _distinct(mean_q[:, genes].T, np.broadcast_to(phi_q[genes, None], (genes.size, L)))
        i, j = np.broadcast_arrays(i[:, :, None], j[:, None, :])
        if p.mean.size < genes.size * K or q.mean.size < genes.size * L:
            code, first, place = np.unique(i * q.mean.size + j, return_index=True, return_inverse=True)
            order = np.argsort(first, kind="stable")
            cost = np.empty(code.size)
            cost[order] = count_cost(p, q, code[order] // q.mean.size, code[order] % q.mean.size)
            out += cost[place].reshape(i.shape).sum(axis=0)
        else:
            out += count_cost(p, q, i.ravel(), j.ravel()).reshape(i.shape).sum(axis=0)
    return out


def _distinct(mean: FloatArray, phi: FloatArray) -> tuple[CountLaws, NDArray[np.intp]]:
    """The distinct laws among given ones, in the order in which they first occur, and which one each is."""
    m, f = mean.ravel(), phi.ravel()
    order = np.lexsort((f, m))
    new = np.ones(m.size, dtype=bool)
    new[1:] = (np.diff(m[order]) != 0.0) | (np.diff(f[order]) != 0.0)
    group = np.empty(m.size, dtype=np.intp)
    group[order] = np.cumsum(new) - 1
    first = order[new]  # lexsort is stable: the earliest of equal ones
    rank = np.empty(first.size, dtype=np.intp)
    by_occurrence = np.argsort(first)
    rank[by_occurrence] = np.arange(first.size)
    kept = first[by_occurrence]
    return CountLaws(m[kept], f[kept]), rank[group].reshape(mean.shape)


def _images_of_one_size(X: Any, source: CountLaws, target: CountLaws, rng: np.random.Generator | None) -> FloatArray:
    n, d = X.shape
    if rng is not None:
        x = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64).ravel()
        gene = np.tile(np.arange(d), n)
        return count_draw(x, source, target, rng, gene, gene).reshape(n, d)
    # Cells share laws, so an image depends on gene and count only: one for the zeros, and one for each other count.
    counts = X.tocsr() if hasattr(X, "tocsr") else sparse.csr_array(np.asarray(X, dtype=np.float64))
    out = np.repeat(count_mean(np.zeros(d), source, target)[None], n, axis=0)
    if counts.data.size:
        value, which = np.unique(counts.data, return_inverse=True)
        code, place = np.unique(counts.indices.astype(np.int64) * value.size + which, return_inverse=True)
        gene = code // value.size
        image = count_mean(value[code % value.size].astype(np.float64), source, target, gene, gene)
        out[np.repeat(np.arange(n), np.diff(counts.indptr)), counts.indices] = image[place]
    return out


def _images_of_sizes(
    X: Any,
    source: CountLaws,
    target: CountLaws,
    size_p: FloatArray,
    size_q: FloatArray,
    rng: np.random.Generator | None,
) -> FloatArray:
    x = np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float64)
    out = np.zeros_like(x)
    rows = np.flatnonzero(size_p > 0.0)  # a cell without counts stays without
    first = CountLaws(np.outer(size_p[rows], source.mean).ravel(), np.tile(source.dispersion, rows.size))
    second = CountLaws(np.outer(size_q[rows], target.mean).ravel(), np.tile(target.dispersion, rows.size))
    flat = x[rows].ravel()
    image = count_mean(flat, first, second) if rng is None else count_draw(flat, first, second, rng)
    out[rows] = image.reshape(rows.size, x.shape[1])
    return out
