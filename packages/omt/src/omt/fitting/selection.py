"""How many components: an information criterion over a range, and one budget shared by several groups.

The criterion is computed from fits on at most 20 000 samples. Each number of components starts from the fit of the
number before: the component that gains most by it is split in two, and components are split and merged for as long as
that helps.

Letters: ``N`` samples, ``K`` components, ``G`` groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from omt.chunks import as_source
from omt.families.base import Family
from omt.families.gaussian import CovarianceType
from omt.families.sizes import SizeFactors
from omt.fitting.arguments import FamilyName, check_ranges, family_named, mean_one_weights, scan, sized
from omt.fitting.iterate import State, batch
from omt.fitting.progress import Progress
from omt.fitting.splitmerge import grow, improve
from omt.fitting.starts import best_start, rows_of, subsample
from omt.fitting.sweeps import Data, log_densities
from omt.report import ComponentCurve
from shared_core import InfeasibleBudgetError, solve_mckp

Criterion: TypeAlias = Literal["bic", "icl"]
CRITERIA = ("bic", "icl")
DEFAULT_RANGE = (1, 20)

# EM iterations after which a fit of the curve is scored. Later ones change the criterion less than one component does.
_ITERATIONS = 40


@dataclass(frozen=True)
class ComponentChoice:
    """Numbers of components of several groups.

    Attributes
    ----------
    names
        Name of each group, ``[G]``.
    n_components
        What was chosen, ``[G]``.
    curves
        The criterion of each group, ``[G]``.
    """

    names: tuple[str, ...]
    n_components: tuple[int, ...]
    curves: tuple[ComponentCurve, ...]

    @property
    def total(self) -> int:
        """Components of all groups together."""
        return sum(self.n_components)


def choose_components(
    groups: Mapping[str, Any] | Iterable[Any],
    budget: int | None = None,
    *,
    component_range: tuple[int, int] = DEFAULT_RANGE,
    criterion: Criterion = "bic",
    family: FamilyName | Family = "gaussian",
    covariance: CovarianceType = "full",
    sample_weights: Iterable[ArrayLike | None] | None = None,
    size_factors: SizeFactors = None,
    n_init: int = 3,
    tol: float = 1e-4,
    random_state: int = 0,
    progress: bool | None = None,
) -> ComponentChoice:
    """Choose the number of components of each group, within a budget for all of them together.

    Without a budget every group takes the number with its lowest criterion. With one, the sum of the criteria is
    minimised subject to the sum of the components: a multiple-choice knapsack, solved exactly. Components then go to
    the groups that gain most by them.

    Parameters
    ----------
    groups
        Samples of each group, ``[N_g, d]``, of any kind that :func:`omt.fit_mixture` reads; a mapping gives them names.
    budget
        Most components of all groups together; no limit by default.
    component_range
        Least and largest number of components of a group. A group of fewer samples ends at that number.
    criterion
        ``"bic"``, or ``"icl"``, which prefers fewer and separated components.
    family, covariance, size_factors
        As in :func:`omt.fit_mixture`.
    sample_weights
        Weights of the samples of each group, ``[N_g]`` each.
    n_init, tol, random_state, progress
        As in :func:`omt.fit_mixture`.

    Returns
    -------
    ComponentChoice

    Raises
    ------
    ValueError
        If an argument is out of range, a group has fewer samples than the least number of components, or the budget
        is less than the groups need at least.

    References
    ----------
    Schwarz (1978), Estimating the dimension of a model. Biernacki, Celeux & Govaert (2000), Assessing a mixture model
    for clustering with the integrated completed likelihood.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> one = rng.normal(size=(200, 2))
    >>> three = np.concatenate([rng.normal(c, 1.0, size=(100, 2)) for c in (0.0, 9.0, 18.0)])
    >>> choose_components({"early": one, "late": three}, component_range=(1, 5)).n_components
    (1, 3)
    >>> choose_components([one, three], budget=3, component_range=(1, 5)).n_components
    (1, 2)
    """
    named = dict(groups) if isinstance(groups, Mapping) else {str(i): X for i, X in enumerate(groups)}
    check_ranges(n_init=n_init, random_state=random_state, tol=tol, dtype="float64")
    check_criterion(criterion, component_range)
    recipe = family_named(family, covariance, size_factors)
    weights = [None] * len(named) if sample_weights is None else list(sample_weights)
    curves = []
    with Progress(progress) as bar:
        for (name, X), weight in zip(named.items(), weights, strict=True):
            source = as_source(X)
            if source.n_samples < max(component_range[0], 2):
                raise ValueError(
                    f"group {name!r} has {source.n_samples} samples; component_range begins at {component_range[0]}, "
                    "and every component needs a sample (a mixture needs two)"
                )
            data = Data(source, 4096, np.dtype(np.float64), mean_one_weights(weight, source.n_samples))
            _, totals = scan(data, recipe)
            fitted, data.size = sized(recipe, totals)
            curves.append(search(data, fitted, component_range, criterion, n_init, tol, random_state, bar)[0])
    return ComponentChoice(tuple(named), allocate(curves, budget), tuple(curves))


def allocate(curves: Iterable[ComponentCurve], budget: int | None = None) -> tuple[int, ...]:
    """The number of components of each group that minimises the sum of the criteria within a budget.

    Parameters
    ----------
    curves
        The criterion of each group.
    budget
        Most components together; no limit by default.

    Returns
    -------
    tuple of int
        ``[G]``.

    Raises
    ------
    ValueError
        If the budget is less than the least numbers of components add up to.

    Examples
    --------
    >>> steep = ComponentCurve("bic", (1, 2, 3), (900.0, 500.0, 490.0))
    >>> flat = ComponentCurve("bic", (1, 2, 3), (300.0, 280.0, 200.0))
    >>> allocate([steep, flat]), allocate([steep, flat], budget=4)
    ((3, 3), (2, 2))
    """
    given = list(curves)
    if budget is None:
        return tuple(curve.best for curve in given)
    check_ranges(tol=0.0, dtype="float64", budget=budget)
    try:
        solution = solve_mckp(
            [np.array(curve.n_components) for curve in given], [-np.array(curve.scores) for curve in given], budget
        )
    except InfeasibleBudgetError as error:
        raise ValueError(
            f"budget is {budget}; the {len(given)} groups need {error.required} components at least, so give a larger "
            "budget or a component_range that begins lower"
        ) from None
    return tuple(curve.n_components[int(i)] for curve, i in zip(given, solution.choice, strict=True))


def search(
    data: Data,
    family: Family,
    component_range: tuple[int, int],
    criterion: Criterion,
    n_init: int,
    tol: float,
    seed: int,
    bar: Progress,
) -> tuple[ComponentCurve, State]:
    """The criterion over a range of numbers of components, and the best fit.

    Parameters
    ----------
    data, family
        Unsupervised samples, and what to fit.
    component_range
        Least and largest number of components.
    criterion
        ``"bic"`` or ``"icl"``.
    n_init, tol, seed, bar
        Starts of the least number; when EM ends; seed; where progress goes.

    Returns
    -------
    curve, state
        The curve ends before the largest number where more components would be empty. ``state`` is a model on the
        subsample.
    """
    small = subsample(data, seed)
    samples = family.features(small.source.take(np.arange(small.N), small.dtype), seed)
    tried: list[int] = []
    scores: list[float] = []
    state: State | None = None
    best: State | None = None
    last = min(component_range[1], small.N)
    with warnings.catch_warnings(), bar.stage(f"components by {criterion}", last - component_range[0] + 1) as advance:
        warnings.filterwarnings("ignore", message=r".*component\(s\) had no samples left")
        for K in range(component_range[0], last + 1):
            grown = None if state is None else grow(small, family, state, seed, bar, samples)
            if grown is None or grown.model.components.K < K:
                state = best_start(small, family, K, n_init, seed, bar)
            else:
                state = improve(small, family, grown, seed, bar, samples)
            state.restart()
            batch(small, family, state, _ITERATIONS, tol, None, bar, title=f"{K} components")
            if state.model.components.K < K:
                break
            tried.append(K)
            scores.append(_criterion(small, state, criterion, data.N))
            if scores[-1] <= min(scores):
                best = state
            advance(state.log_likelihood)
    if best is None:
        raise ValueError(
            f"component_range begins at {component_range[0]}, and the samples have fewer different groups; begin lower"
        )
    return ComponentCurve(criterion, tuple(tried), tuple(scores)), best


def labels_within_budget(
    data: Data,
    family: Family,
    codes: np.ndarray[Any, np.dtype[np.int64]],
    component_range: tuple[int, int],
    criterion: Criterion,
    budget: int | None,
    n_init: int,
    tol: float,
    seed: int,
    bar: Progress,
) -> list[int]:
    """Number of components of each label, from the criterion of the label's own samples.

    Parameters
    ----------
    data, family
        All samples, and what to fit.
    codes
        Label of each sample, ``[N]``; −1 where it is unknown.
    component_range, criterion, budget, n_init, tol, seed, bar
        As in :func:`choose_components` and :func:`search`.
    """
    curves = []
    for label in range(int(codes.max()) + 1):
        members = np.flatnonzero(codes == label)
        if members.size == 1:
            curves.append(ComponentCurve(criterion, (1,), (0.0,)))
            continue
        least = min(component_range[0], members.size)
        bounds = (least, max(least, component_range[1]))
        curves.append(search(rows_of(data, members), family, bounds, criterion, n_init, tol, seed, bar)[0])
    return list(allocate(curves, budget))


def check_criterion(criterion: Any, component_range: Any, name: str = "criterion") -> None:
    """Refuse an unknown criterion, and a range that is none.

    Examples
    --------
    >>> check_criterion("bic", (5, 2))
    Traceback (most recent call last):
        ...
    ValueError: component_range is (5, 2); it must be two integers, the least number of components (≥ 1) and the largest
    """
    if criterion not in CRITERIA:
        raise ValueError(f"{name} is {criterion!r}; it must be 'bic' or 'icl'")
    bounds = tuple(component_range) if isinstance(component_range, Iterable) else ()
    whole = all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) for k in bounds)
    if len(bounds) != 2 or not whole or not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"component_range is {component_range!r}; it must be two integers, the least number of components (≥ 1) "
            "and the largest"
        )


def _criterion(small: Data, state: State, criterion: Criterion, N: int) -> float:
    """The criterion for ``N`` samples of which ``small`` is a part."""
    evidence = entropy = 0.0
    log_weights = state.model.log_weights
    for rows, X in small.chunks():
        R, value = small.supervision.assign(log_densities(small, state.model.components, rows, X), log_weights, rows)
        surprise = -np.sum(R * np.log(R, where=R > 0, out=np.zeros_like(R)), axis=1)
        weight = 1.0 if small.weight is None else small.weight[rows]
        evidence += float(np.sum(weight * value, dtype=np.float64))
        entropy += float(np.sum(weight * surprise, dtype=np.float64))
    n_parameters = state.model.components.n_parameters + state.model.components.K - 1
    score = n_parameters * float(np.log(N)) - 2.0 * N / small.N * evidence
    return score + (2.0 * N / small.N * entropy if criterion == "icl" else 0.0)
