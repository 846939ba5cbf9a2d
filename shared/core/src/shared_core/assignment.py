"""Soft assignment of rows to components: row softmax with its log-sum-exp, dense or top-k. numpy only.

This is the routing step of section "scores" without a gate and without gradients: the E-step of a mixture model.

Letters: ``N`` rows, ``C`` components, ``k`` kept components a row.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shared_core.traces import RoutingTrace

# One block of scores stays in the second-level cache while it is read five times.
_BLOCK_BYTES = 1 << 18
# Up to this many components, blocks are worked on transposed.
_FEW = 64
# Up to this many kept components, repeated argmax beats a sort.
_ROUNDS = 16


@overload
def soft_assign(
    scores: NDArray[Any], *, top_k: None = None, logit_bias: NDArray[Any] | None = None, out: NDArray[Any] | None = None
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def soft_assign(
    scores: NDArray[Any], *, top_k: int, renormalize: bool = False, logit_bias: NDArray[Any] | None = None
) -> tuple[RoutingTrace, NDArray[Any]]: ...
def soft_assign(
    scores: NDArray[Any],
    *,
    top_k: int | None = None,
    renormalize: bool = False,
    logit_bias: NDArray[Any] | None = None,
    out: NDArray[Any] | None = None,
) -> tuple[NDArray[Any] | RoutingTrace, NDArray[Any]]:
    r"""Turn scores into responsibilities :math:`r_{nc} = e^{z_{nc} - \ell_n}`, :math:`\ell_n = \ln\sum_c e^{z_{nc}}`.

    Rows are processed in blocks that fit the cache, so nothing of size ``N * C`` is allocated besides the result, and
    a row's result does not depend on the rows around it. Arithmetic is in the dtype of `scores`.

    Parameters
    ----------
    scores
        Scores or log-densities, ``[N, C]``, float32 or float64 (float16 and integers are converted first). ``-inf``
        makes a component unavailable; a row of ``-inf`` gets responsibilities 0 and log-sum-exp ``-inf``. NaN and
        ``+inf`` make their row NaN.
    top_k
        Keep the `top_k` largest of each row, as a :class:`RoutingTrace`: ordered by descending score, ties to the
        lower index, the sentinel ``C`` with weight 0 where fewer than `top_k` components are available. The
        log-sum-exp is still over all components.
    renormalize
        With `top_k`: divide the kept weights of a row by their sum.
    logit_bias
        Added to every row before anything else, ``[C]``: log-weights of a mixture.
    out
        Without `top_k`: where to write the responsibilities; ``out=scores`` works in place.

    Returns
    -------
    responsibilities
        ``[N, C]`` in the dtype of `scores`, or a :class:`RoutingTrace` with ``[N, top_k]`` (weights float32).
    log_normalizer
        Log-sum-exp of each row, ``[N]``, in the dtype of `scores`: the log-likelihood of each row under a mixture.

    Raises
    ------
    ValueError
        If `scores` is not 2-D or has no components, `top_k` is not in ``1..C``, or `logit_bias` or `out` do not fit.
    TypeError
        If `scores` does not hold real numbers.

    Examples
    --------
    >>> log_density = np.log([[0.2, 0.6], [0.5, 0.5]])
    >>> responsibilities, log_likelihood = soft_assign(log_density, logit_bias=np.log([0.5, 0.5]))
    >>> responsibilities
    array([[0.25, 0.75],
           [0.5 , 0.5 ]])
    >>> np.exp(log_likelihood)
    array([0.4, 0.5])
    >>> trace, _ = soft_assign(log_density, top_k=1)
    >>> trace.indices.tolist()
    [[1], [0]]
    """
    z, bias = _checked(scores, logit_bias)
    N, C = z.shape
    log_normalizer = np.empty(N, dtype=z.dtype)
    rows = min(N, max(1, _BLOCK_BYTES // (C * z.itemsize)))
    blocks = [slice(start, start + rows) for start in range(0, N, max(1, rows))]
    # numpy's inner loops run along the last axis. Few components make that axis short, so such blocks are transposed.
    few = C <= _FEW
    workspace = np.empty((C, rows) if few else (rows, C), dtype=z.dtype)

    def softmax(block: slice) -> NDArray[Any]:
        """Give the responsibilities of a block of rows, in the workspace, and note their log-sum-exp."""
        source = z[block]
        p = workspace[:, : len(source)].T if few else workspace[: len(source)]
        np.copyto(p, source) if bias is None else np.add(source, bias, out=p)
        _softmax(p.T if few else p, 0 if few else 1, log_normalizer[block])
        return p

    if top_k is None:
        if renormalize:
            raise ValueError("renormalize=True needs top_k: dense responsibilities sum to 1 already")
        if out is None:
            out = np.empty_like(z)
        elif out.shape != z.shape or out.dtype != z.dtype:
            raise ValueError(f"out must have shape {[N, C]} and dtype {z.dtype}, not {list(out.shape)} and {out.dtype}")
        with np.errstate(divide="ignore", invalid="ignore"):
            for block in blocks:
                out[block] = softmax(block)
        return out, log_normalizer

    if out is not None:
        raise ValueError("out holds dense responsibilities; it cannot be given together with top_k")
    if not 1 <= top_k <= C:
        raise ValueError(f"top_k={top_k} exceeds num_components={C}" if top_k > C else f"top_k={top_k} must be >= 1")
    indices, weights = np.empty((N, top_k), dtype=np.int32), np.empty((N, top_k), dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        for block in blocks:
            _largest(z[block] + (0 if bias is None else bias), softmax(block), indices[block], weights[block])
    if renormalize:
        total = weights.sum(1, keepdims=True)
        np.divide(weights, total, out=weights, where=total != 0)
    return RoutingTrace(indices, weights, C), log_normalizer


def _checked(scores: Any, logit_bias: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Check scores and bias; give both in the dtype the arithmetic uses."""
    z = np.asarray(scores)
    if z.dtype.kind not in "iuf":
        raise TypeError(f"scores must hold real numbers, not {z.dtype}")
    if z.ndim != 2 or z.shape[1] == 0:
        raise ValueError(f"scores must have shape [N, C] with at least one component, not {list(z.shape)}")
    if z.dtype not in (np.float32, np.float64):
        z = z.astype(np.float32 if z.dtype == np.float16 else np.float64)
    if logit_bias is None:
        return z, None
    bias = np.asarray(logit_bias, dtype=z.dtype)
    if bias.shape != (z.shape[1],):
        raise ValueError(
            f"logit_bias must have shape {[z.shape[1]]} to fit scores {list(z.shape)}, not {list(bias.shape)}"
        )
    return z, bias


def _softmax(z: NDArray[Any], axis: int, log_normalizer: NDArray[Any]) -> None:
    """Replace `z` by its softmax over the components, which lie along `axis`; write the log-sum-exp."""
    peak = z.max(axis, keepdims=True)
    # Only -inf: subtract 0 instead of -inf, so that it becomes exp(-inf) = 0 and not exp(NaN).
    np.copyto(peak, 0, where=np.isneginf(peak))
    z -= peak
    np.exp(z, out=z)
    total = z.sum(axis, keepdims=True)
    np.add(np.log(total), peak, out=np.expand_dims(log_normalizer, axis))
    np.copyto(total, 1, where=total == 0)
    np.divide(1, total, out=total)
    z *= total


def _largest(z: NDArray[Any], p: NDArray[Any], indices: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
    """Write the largest entries of each row of `z` and their `p`, in order, ties to the lower index; spoils `z`."""
    C, k = z.shape[1], indices.shape[1]
    row = np.arange(len(z))
    if k <= _ROUNDS:
        for slot in range(k):
            choice = z.argmax(1)  # the first of equals
            available = z[row, choice] != -np.inf
            indices[:, slot] = np.where(available, choice, C)
            weights[:, slot] = np.where(available, p[row, choice], 0)
            z[row, choice] = -np.inf
        return
    order = np.argsort(-z, axis=1, kind="stable")[:, :k]
    available = z[row[:, None], order] != -np.inf
    indices[:] = np.where(available, order, C)
    weights[:] = np.where(available, p[row[:, None], order], 0)
