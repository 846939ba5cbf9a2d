"""Fitting mixtures by expectation-maximisation: batch for what is small, stepwise for what is large or on disk.

Letters: ``N`` samples, ``d`` features, ``K`` components.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from omt.chunks import as_source
from omt.families.base import Family
from omt.families.gaussian import CovarianceType
from omt.families.sizes import SizeFactors
from omt.features import checked_feature_names, column_names
from omt.fitting.arguments import (
    FamilyName,
    check_ranges,
    checksum_of,
    family_like,
    family_named,
    mean_one_weights,
    scan,
    sized,
    warn_of_single_samples,
)
from omt.fitting.checkpoint import Checkpoint
from omt.fitting.device import engine_for
from omt.fitting.iterate import State, batch, stepwise
from omt.fitting.progress import Progress
from omt.fitting.selection import DEFAULT_RANGE, Criterion, check_criterion, labels_within_budget, search
from omt.fitting.starts import first_model
from omt.fitting.supervision import Supervision, from_labels, from_responsibilities
from omt.fitting.sweeps import Data, Model, evidence, maximise, sweep
from omt.mixture import Mixture
from omt.report import FitReport

# Largest number of samples that batch EM sweeps over until it converges.
_BATCH_LIMIT = 50_000


def fit_mixture(
    X: Any,
    n_components: int | Criterion = 10,
    *,
    component_range: tuple[int, int] = DEFAULT_RANGE,
    family: FamilyName | Family = "gaussian",
    covariance: CovarianceType = "full",
    labels: Any = None,
    n_per_label: int | Criterion = 1,
    budget: int | None = None,
    responsibilities: Any = None,
    sample_weight: ArrayLike | None = None,
    size_factors: SizeFactors = None,
    feature_names: Iterable[str] | None = None,
    n_init: int = 3,
    max_iter: int = 200,
    tol: float = 1e-4,
    epochs: int = 2,
    batch_size: int = 4096,
    random_state: int = 0,
    device: str = "cpu",
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
        ``K``; or ``"bic"`` or ``"icl"`` for the number within ``component_range`` whose criterion is lowest, with the
        curve in ``report.curve``. Ignored with ``labels`` or ``responsibilities``.
    component_range
        Least and largest number of components that ``"bic"`` and ``"icl"`` try.
    family
        ``"gaussian"``; for counts ``"poisson"``, ``"negative_binomial"`` or ``"multinomial"``, for zeros and ones
        ``"bernoulli"`` (sparse samples of these four are never densified); for positive numbers ``"gamma"``,
        ``"exponential"`` or ``"lognormal"``. Or a family object such as ``Gaussian("lowrank", rank=5, shrinkage=0)``
        or ``NegativeBinomial(dispersion=0.3)`` from :mod:`omt.families`.
    covariance
        ``"full"``, ``"diag"``, ``"spherical"``, ``"tied"`` or ``"lowrank"``, for ``"gaussian"`` and ``"lognormal"``.
    labels
        One label a sample, ``[N]``: one component for each label, named after it. Samples whose label is missing
        (NaN, None) are shared out by Bayes' rule.
    n_per_label
        Components a label; or ``"bic"`` or ``"icl"`` for each label's own best number within ``component_range``.
    budget
        Most components of all labels together, for ``n_per_label="bic"``: they go where the criterion gains most.
    responsibilities
        Soft labels, ``[N, K]``, rows summing to 1; a row of NaN is shared out by Bayes' rule. Columns of a table
        give the names.
    sample_weight
        Weight of each sample, ``[N]``, positive; only ratios matter.
    size_factors
        Size of each sample for ``"poisson"`` and ``"negative_binomial"``: ``"total"`` (its total count over the mean
        total, so that cells of different depth become comparable), positive factors ``[N]``, or ``None`` (all one).
    feature_names
        Name of each feature, ``[d]``; default: the columns, if ``X`` is a table.
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
    device
        Where densities and statistics of Gaussian families are computed: ``"cpu"`` (numpy), or a device of PyTorch such
        as ``"cuda"`` or ``"cuda:1"``, for which the extra ``omt[torch]`` is needed. M-steps and everything small stay
        in numpy. Results differ by rounding only.
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
    check_ranges(
        n_init=n_init,
        max_iter=max_iter,
        epochs=epochs,
        batch_size=batch_size,
        random_state=random_state,
        tol=tol,
        dtype=dtype,
    )
    for name, number in (("n_components", n_components), ("n_per_label", n_per_label)):
        if isinstance(number, str):
            check_criterion(number, component_range, name)
        else:
            check_ranges(tol=tol, dtype=dtype, **{name: number})
    if budget is not None and not (labels is not None and isinstance(n_per_label, str)):
        raise ValueError("budget is shared among labels; give labels and n_per_label='bic' or 'icl' with it")
    recipe = family_named(family, covariance, size_factors)
    if dtype == "float32" and not recipe.single_precision:
        raise ValueError(
            f"dtype is 'float32'; family {recipe.name!r} needs 'float64', because its log-densities are sums over all "
            "features"
        )
    source = as_source(X)
    features = checked_feature_names(column_names(X) if feature_names is None else feature_names, source.n_features)
    N = source.n_samples
    if labels is not None and responsibilities is not None:
        raise ValueError("give labels or responsibilities, not both")
    names: tuple[str, ...] | None = None
    supervision = Supervision()
    if labels is not None:
        supervision, names = from_labels(labels, N, 1 if isinstance(n_per_label, str) else int(n_per_label))
    elif responsibilities is not None:
        supervision, names = from_responsibilities(responsibilities, N)
    elif isinstance(n_components, str):
        if component_range[0] > N:
            raise ValueError(f"component_range begins at {component_range[0]} and X has {N} samples; begin lower")
    elif n_components > N:
        raise ValueError(
            f"n_components is {n_components} and X has {N} samples; give at most as many components as samples"
        )
    if N < 2:
        raise ValueError("X has one sample; a mixture needs at least two")
    data = Data(source, batch_size, np.dtype(dtype), mean_one_weights(sample_weight, N), supervision)
    data.engine = engine_for(device, recipe, dtype, sparse=source.is_sparse)
    checksum, totals = scan(data, recipe)
    recipe, data.size = sized(recipe, totals)
    if isinstance(n_per_label, str) and supervision.codes is not None:
        free = replace(data, supervision=Supervision())
        with Progress(progress) as bar:
            parts = labels_within_budget(
                free, recipe, supervision.codes, component_range, n_per_label, budget, n_init, tol, random_state, bar
            )
        data.supervision, names = from_labels(labels, N, parts)
        supervision = data.supervision
    warn_of_single_samples(supervision, names)

    method = "labels" if labels is not None else "responsibilities" if responsibilities is not None else ""
    fingerprint = {
        "n_samples": N,
        "n_features": source.n_features,
        "sum of X": checksum,
        "family": repr(recipe),
        "components": _components_asked(n_components, component_range) if names is None else list(names),
        **{"n_init": n_init, "max_iter": max_iter, "tol": tol, "epochs": epochs, "batch_size": batch_size},
        **{"random_state": random_state, "dtype": dtype, "device": device},
        "supervision": checksum_of(supervision, data.weight),
        "size factors": 0.0 if data.size is None else checksum_of(Supervision(), data.size),
    }
    store = Checkpoint(checkpoint, fingerprint)
    large = N > _BATCH_LIMIT
    with Progress(progress) as bar, _resumable(store):
        state = State.restore(store)
        if state is None:
            K, rival, curve = n_components, None, None
            if isinstance(K, str):
                if not supervision.is_given:
                    curve, rival = search(data, recipe, component_range, K, n_init, tol, random_state, bar)
                K = curve.best if curve is not None else 1
            state = first_model(data, recipe, K, n_init, max_iter, tol, random_state, bar, large=large, rival=rival)
            state.curve = curve
            state.save(store, now=True)
        if supervision.is_complete and recipe.one_step:
            state.converged = True
        elif large:
            stepwise(data, recipe, state, epochs, random_state, store, bar)
        else:
            batch(data, recipe, state, max_iter, tol, store, bar)
            if not state.converged:
                _warn_unconverged(max_iter, tol)
        mixture = _finish(data, recipe, state, method or ("stepwise" if large else "batch"), names)
        store.finish()
    return replace(mixture, feature_names=features)


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
        Recipe of the new components; default: that of the current ones' family.
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
    recipe = family if family is not None else family_like(mixture)
    source = as_source(X)
    data = Data(source, 4096, np.dtype(np.float64), mean_one_weights(sample_weight, source.n_samples))
    recipe, data.size = sized(recipe, scan(data, recipe)[1])
    found = sweep(data, recipe, Model(mixture.weights, mixture.components))
    prior = recipe.prior(found.statistics)
    model = maximise(recipe, found.statistics, prior, mixture.components)
    report = _report("batch", data, 1, False, found.evidence / data.N, (found.evidence / data.N,), prior)
    return Mixture(
        model.weights, model.components, names=mixture.names, report=report, feature_names=mixture.feature_names
    )


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
    report = replace(report, reseeded=int(state.attempts.sum()), removed=state.removed, curve=state.curve)
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


def _components_asked(n_components: int | Criterion, component_range: tuple[int, int]) -> int | str:
    if isinstance(n_components, str):
        return f"{n_components} from {component_range[0]} to {component_range[1]}"
    return int(n_components)


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
