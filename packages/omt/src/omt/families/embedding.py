"""Where k-means looks at samples whose own coordinates are no good for distances: few dense coordinates of each.

Letters: ``n`` samples, ``d`` features, ``r ≤ 30`` coordinates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from omt.families.base import FloatArray
from omt.families.sizes import totals_of

# Coordinates of an embedding, and passes of the randomised singular value decomposition.
_COORDINATES = 30
_POWER_ITERATIONS = 4


def embed_counts(X: Any, seed: int) -> FloatArray:
    """Leading singular coordinates of ``log(1 + x)`` after every sample is scaled to the median total.

    Parameters
    ----------
    X
        Counts, ``[n, d]``, dense or CSR; zeros are never stored.
    seed
        Of the randomised decomposition.

    Returns
    -------
    ndarray ``[n, r]``
        With ``r = min(30, n, d)``.
    """
    totals = totals_of(X)
    positive = totals[totals > 0]
    scale = np.divide(np.median(positive) if positive.size else 1.0, totals, out=np.ones_like(totals), where=totals > 0)
    counts = _csr(X)
    values = np.log1p(counts.data * np.repeat(scale, np.diff(counts.indptr)))
    return _leading(sparse.csr_array((values, counts.indices, counts.indptr), shape=counts.shape), seed)


def embed_binary(X: Any, seed: int) -> FloatArray:
    """Leading singular coordinates of zeros and ones, ``[n, min(30, n, d)]``."""
    return _leading(_csr(X), seed)


def _csr(X: Any) -> Any:
    return X if hasattr(X, "toarray") else sparse.csr_array(np.asarray(X, dtype=np.float64))


def _leading(Y: Any, seed: int) -> FloatArray:
    n, d = Y.shape
    if d <= _COORDINATES:
        return np.asarray(Y @ np.eye(d))
    from sklearn.utils.extmath import randomized_svd  # heavy, and only needed here

    U, s, _ = randomized_svd(Y, min(_COORDINATES, n), n_iter=_POWER_ITERATIONS, random_state=seed)
    return np.asarray(U * s, dtype=np.float64)
