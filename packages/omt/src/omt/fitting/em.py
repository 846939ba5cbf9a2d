"""Fitting mixtures by expectation-maximisation: batch for what is small, stepwise for what is large or on disk.

Letters: ``N`` samples, ``d`` features, ``K`` components.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from omt.chunks import as_source, largest, require_finite
from omt.families import Gaussian
from omt.families.base import Family, FloatArray
from omt.families.gaussian import CovarianceType
from omt.fitting.checkpoint import Checkpoint
from omt.fitting.iterate import State, batch, stepwise
from omt.fitting.progress import Progress
from omt.fitting.starts import first_model
from omt.fitting.supervision import Supervision, from_labels, from_responsibilities
from omt.fitting.sweeps import Data, Model, evidence, maximise, sweep
from omt.mixture import Mixture
from omt.report import FitReport

# Largest number of samples that batch EM sweeps over until it converges.
_BATCH_LIMIT = 50_000
# Smallest weight of a sample, in units of the largest.
_LIGHTEST = 1e-20


def fit_mixture(
    X: Any,
    n_components: int = 10,
    *,
    family: Literal["gaussian"] | Family = "gaussian",
    covariance: CovarianceType = "full",
    labels: Any = None,
    n_per_label: int = 1,
    responsibilities: Any = None,
    sample_weight: ArrayLike | None = None,
    n_init: int = 3,
    max_iter: int = 200,
    tol: float = 1e-4,
    epochs: int = 2,
    batch_size: int = 4096,
    random_state: int = 0,
    dtype: Literal["float64", "float32"] = "float64",
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Mixture:
    """Fit a mixture to samples.

    Without labels, components are found: greedy k-means++ and Lloyd steps on at most 20 000 samples, ``n_init``
    short EM runs of which the best goes on, then batch EM up to 50 000 samples, or stepwise EM (``epochs`` passes
    of shuffled batches) and one exact pass beyond. Covariances are shrunk to the pooled one and bounded below, so
    components of few samples stay finite; :class:`omt.families.Gaussian` sets how much, and ``mixture.report`` says
    it.

    Parameters
    ----------
    X
        Samples, ``[N, d]``: array, CSR matrix, on-disk matrix (``h5py``, the ``X`` of an AnnData opened backed) or
        a callable without arguments that yields blocks of rows. Memory in use beyond ``X`` does not grow with N
        beyond one number a sample.
    n_components
        ``K``; ignored with ``labels`` or ``responsibilities``.
    family
        ``"gaussian"``, or a family object such as ``Gaussian("lowrank", rank=5, shrinkage=0)``.
    covariance
        ``"full"``, ``"diag"``, ``"spherical"``, ``"tied"`` or ``"lowrank"``, for ``family="gaussian"``.
    labels
        One label a sample, ``[N]``: one component for each label, named after it. Samples whose label is missing
        (NaN, None) are shared out by Bayes' rule.
    n_per_label
        Components a label.
    responsibilities
        Soft labels, ``[N, K]``, rows summing to 1; a row of NaN is shared out by Bayes' rule. Columns of a table
        give the names.
    sample_weight
        Weight of each sample, ``[N]``, positive; only ratios matter.
    n_init
        Starts that are tried.
    max_iter
        Most iterations of batch EM.
    tol
        Batch EM stops when the objective rises by less than this, in nats per sample (so it does not depend on the
        units of X).
    epochs
        Passes of stepwise EM.
    batch_size
        Samples of one chunk, and of one update of stepwise EM.
    random_state
        Seed. The same seed and number of threads give the same mixture, bit by bit.
    dtype
        ``"float32"`` computes densities in half the time; responsibilities are off by up to 1e-4.
    checkpoint
        File that keeps the state after each pass. If it exists, the fit goes on from there; a finished fit removes it.
    progress
        Show a progress bar on stderr for fits over two seconds; default: if stderr is a terminal.

    Returns
    -------
    Mixture
        With ``.report``, a :class:`omt.report.FitReport`. Components without labels are ordered by falling weight.

    Raises
    ------
    ValueError
        For input outside these ranges; the message names the argument, or the row and column of the first NaN.

    References
    ----------
    Cappé & Moulines (2009), On-line expectation-maximization algorithm for latent data models.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = np.concatenate([rng.normal(0, 1, (300, 2)), rng.normal(8, 1, (100, 2))])
    >>> mixture = fit_mixture(X, 2)
    >>> mixture.weights.round(2).tolist(), mixture.report.converged
    ([0.75, 0.25], True)
    >>> fit_mixture(X, labels=["A"] * 300 + ["B"] * 100).names
    ('A', 'B')
    """
    _check_ranges(
        n_init=n_init,
        max_iter=max_iter,
        epochs=epochs,
        batch_size=batch_size,
        n_components=n_components,
        n_per_label=n_per_label,
        random_state=random_state,
        tol=tol,
        dtype=dtype,
    )
    recipe = _family(family, covariance)
    source = as_source(X)
    N = source.n_samples
    if labels is not None and responsibilities is not None:
        raise ValueError("give labels or responsibilities, not both")
    names: tuple[str, ...] | None = None
    supervision = Supervision()
    if labels is not None:
        supervision, names = from_labels(labels, N, n_per_label)
    elif responsibilities is not None:
        supervision, names = from_responsibilities(responsibilities, N)
    elif n_components > N:
        raise ValueError(
            f"n_components is {n_components} and X has {N} samples; give at most as many components as samples"
        )
    if N < 2:
        raise ValueError("X has one sample; a mixture needs at least two")
    data = Data(source, batch_size, np.dtype(dtype), _weights(sample_weight, N), supervision)
    checksum = _scan(data, recipe)
    _warn_of_single_samples(supervision, names)

    method = "labels" if labels is not None else "responsibilities" if responsibilities is not None else ""
    fingerprint = {
        "n_samples": N,
        "n_features": source.n_features,
        "sum of X": checksum,
        "family": repr(recipe),
        "components": n_components if names is None else list(names),
        **{"n_init": n_init, "max_iter": max_iter, "tol": tol, "epochs": epochs, "batch_size": batch_size},
        **{"random_state": random_state, "dtype": dtype},
        "supervision": _checksum(supervision, data.weight),
    }
    store = Checkpoint(checkpoint, fingerprint)
    large = N > _BATCH_LIMIT
    with Progress(progress) as bar, _resumable(store):
        state = State.restore(store)
        if state is None:
            state = first_model(data, recipe, n_components, n_init, max_iter, tol, random_state, bar, large=large)
            state.save(store, now=True)
        if supervision.is_complete:
            state.converged = True
        elif large:
            stepwise(data, recipe, state, epochs, random_state, store, bar)
        else:
            batch(data, recipe, state, max_iter, tol, store, bar)
            if not state.converged:
                _warn_unconverged(max_iter, tol)
        mixture = _finish(data, recipe, state, method or ("stepwise" if large else "batch"), names)
        store.remove()
    return mixture


def em_step(
    X: Any, mixture: Mixture, *, family: Family | None = None, sample_weight: ArrayLike | None = None
) -> Mixture:
    """One iteration of batch EM from a given mixture: the step of which :func:`fit_mixture` makes many.

    Parameters
    ----------
    X
        Samples, ``[N, d]``, of any kind that :func:`fit_mixture` reads.
    mixture
        The current mixture.
    family
        Recipe of the new components; default: Gaussian with the shape of the current ones.
    sample_weight
        Weight of each sample, ``[N]``.

    Returns
    -------
    Mixture
        ``report.log_likelihood`` is that of the *given* mixture, per sample.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(500, 1))
    >>> m = Mixture.from_gaussians([0.5, 0.5], [[-1.0], [1.0]], [[[1.0]], [[1.0]]])
    >>> after = em_step(X, m)
    >>> bool(em_step(X, after).report.log_likelihood > after.report.log_likelihood)
    True
    """
    recipe: Family = family if family is not None else Gaussian(getattr(mixture.components, "covariance_type", "full"))
    source = as_source(X)
    data = Data(source, 4096, np.dtype(np.float64), _weights(sample_weight, source.n_samples))
    found = sweep(data, recipe, Model(mixture.weights, mixture.components))
    prior = recipe.prior(found.statistics)
    model = maximise(recipe, found.statistics, prior, mixture.components)
    report = _report("batch", data, 1, False, found.evidence / data.N, (found.evidence / data.N,), prior)
    return Mixture(model.weights, model.components, names=mixture.names, report=report)


# ------------------------------------------------------------------------------------------ result
def _finish(data: Data, family: Family, state: State, method: str, names: tuple[str, ...] | None) -> Mixture:
    """The mixture and its report; components without names of their own are ordered by weight."""
    model = state.model
    if names is not None:
        names = tuple(names[k] for k in state.origin)
    elif not data.supervision.is_given:
        order = np.argsort(-model.weights, kind="stable")
        model = Model(model.weights[order], model.components.select(order))
    known = state.converged and not data.supervision.is_given
    value = state.log_likelihood if known else evidence(data, model) / data.N
    report = _report(method, data, state.iteration, state.converged, value, tuple(state.history), state.prior)
    report = FitReport(**{**report.__dict__, "reseeded": int(state.attempts.sum()), "removed": state.removed})
    return Mixture(model.weights, model.components, names=names or (), report=report)


def _report(
    method: str, data: Data, n_iter: int, converged: bool, value: float, history: tuple[float, ...], prior: Any
) -> FitReport:
    return FitReport(
        method=method,
        n_samples=data.N,
        n_iter=n_iter,
        converged=converged,
        log_likelihood=value,
        history=history,
        shrinkage=float(prior.get("shrinkage", 0.0)),
        floor=float(prior.get("floor", 0.0)),
    )


def _warn_unconverged(max_iter: int, tol: float) -> None:
    from sklearn.exceptions import ConvergenceWarning  # heavy, and only needed here

    warnings.warn(
        f"batch EM still gained more than tol={tol:g} nats a sample after max_iter={max_iter} iterations; give a "
        "larger max_iter, or fewer components",
        ConvergenceWarning,
        stacklevel=3,
    )


@contextmanager
def _resumable(store: Checkpoint) -> Iterator[None]:
    """After Ctrl-C, keep the last pass and say how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if store.path is not None:
            store.flush()
            interrupt.add_note(f"the state after the last pass is in {store.path}; the same call goes on from there")
        raise


# ------------------------------------------------------------------------------------------ checks
def _check_ranges(*, tol: Any, dtype: Any, **counts: Any) -> None:
    for name, value in counts.items():
        least = 0 if name == "random_state" else 1
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer ≥ {least}")
    if not isinstance(tol, (int, float, np.number)) or not (np.isfinite(tol) and tol >= 0):
        raise ValueError(f"tol is {tol!r}; it must be a finite number ≥ 0")
    if dtype not in ("float64", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")


def _family(family: Any, covariance: CovarianceType) -> Family:
    if not isinstance(family, str):
        if not hasattr(family, "m_step"):
            raise TypeError(
                f"family is {family!r}; it must be 'gaussian' or a family object such as omt.families.Gaussian(…)"
            )
        return family  # type: ignore[no-any-return]  # the protocol was checked by its main method
    if family != "gaussian":
        raise ValueError(
            f"family is {family!r}; it must be 'gaussian' or a family object such as omt.families.Gaussian(…)"
        )
    return Gaussian(covariance)


def _weights(sample_weight: ArrayLike | None, N: int) -> FloatArray | None:
    if sample_weight is None:
        return None
    weight = np.array(sample_weight, dtype=np.float64)
    if weight.shape != (N,):
        raise ValueError(f"sample_weight has shape {weight.shape}; X has {N} samples, so it must be [{N}]")
    bad = ~(np.isfinite(weight) & (weight > 0))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"sample_weight[{i}] is {weight[i]:g}; every weight must be positive and finite")
    weight /= weight.max()
    lost = weight < _LIGHTEST
    if lost.any():
        i = int(lost.argmax())
        raise ValueError(
            f"sample_weight[{i}] is {weight[i]:.3g} of the largest weight; below {_LIGHTEST:g} a sample is lost in "
            "float64 sums, so leave it out"
        )
    mean_one: FloatArray = weight / weight.mean()
    return mean_one


def _scan(data: Data, family: Family) -> float:
    """Check every sample once, before anything is computed; give a number that tells data sets apart."""
    total, lowest, highest = 0.0, np.inf, -np.inf
    for start_row, block in data.source.chunks(data.batch_size):
        require_finite(block, start_row, dtype=data.dtype)
        family.check(block, start_row)
        total += float(block.sum())
        lowest, highest = min(lowest, float(block.min())), max(highest, float(block.max()))
    if 0.0 < highest - lowest < 1.0 / largest(data.dtype):
        raise ValueError(
            f"X varies by {highest - lowest:g} only; squares of such numbers underflow, so give X in another unit"
        )
    return total


def _checksum(supervision: Supervision, weight: FloatArray | None) -> float:
    position = 0.0
    for values in (supervision.codes, supervision.soft, weight):
        if values is not None:
            flat = np.nan_to_num(np.asarray(values, dtype=np.float64)).reshape(values.shape[0], -1).sum(axis=1)
            position += float(flat @ np.linspace(1.0, 2.0, flat.size))
    return position


def _warn_of_single_samples(supervision: Supervision, names: tuple[str, ...] | None) -> None:
    if supervision.codes is None or names is None or supervision.owner is None:
        return
    counts = np.bincount(supervision.codes[supervision.codes >= 0], minlength=int(supervision.owner.max()) + 1)
    single = [names[k] for k in range(len(names)) if counts[supervision.owner[k]] == 1]
    if single:
        warnings.warn(
            f"labels with one sample: {', '.join(single)}; their components take the pooled covariance",
            UserWarning,
            stacklevel=3,
        )
