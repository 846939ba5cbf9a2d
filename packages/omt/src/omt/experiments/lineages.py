"""Lineages of a time course: how much mass goes to true descendants, with labels as components and without labels.

The data are the sensory neurons of the C. elegans embryo (Packer et al. 2019) or the generated branching process.
Truth: a type descends from itself; ADL from ADL_parent; ASG and AWA from Neuroblast_ASG_AWA.

Without labels, mass between components is shared out to cells and then counted by the cells' types, which nothing but
the score has seen. Few components mix types. What works is *a component for every four cells, one covariance for all
of them, the plan between cells, and the consensus of several fits* (`CELLS_PER_COMPONENT`, `covariance="tied"`,
`resolution="cell"`, :func:`omt.plans.consensus.consensus_plan`). Components then are small patches that average noise
out, the shared covariance is the one thing that so few cells can estimate, and the consensus drops what one partition
joins by accident.

Letters: `N`, `M` cells of two stages, `D` features.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from omt import datasets
from omt.experiments.labelled import between_labels, consistency

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from omt.families.gaussian import CovarianceType
    from omt.metrics import LineageConsistency
    from omt.mixture import Mixture

    Array = NDArray[np.float64]
    Labels = NDArray[np.object_]

__all__ = [
    "BINS",
    "CELLS_PER_COMPONENT",
    "DESCENDANTS",
    "LineageRow",
    "TimeCourse",
    "attained_share",
    "best_between_cells",
    "branching_course",
    "halves_course",
    "lineage_table",
    "lineages_between_cells",
    "lineages_by_consensus",
    "lineages_by_labels",
    "lineages_unsupervised",
    "worm_course",
]

BINS = "210,270,330,390,450,510,580,650"
DESCENDANTS = {"ADL_parent": {"ADL_parent", "ADL"}, "Neuroblast_ASG_AWA": {"Neuroblast_ASG_AWA", "ASG", "AWA"}}
CELLS_PER_COMPONENT = 4
# Temperatures, in mean costs, of which the peer is given the best.
PEER_REGS = (0.1, 0.05, 0.02, 0.01, 0.005)


class TimeCourse(NamedTuple):
    """Cells of consecutive stages.

    Attributes
    ----------
    states
        Features of each stage, `[N, D]`.
    types
        Cell types of each stage, `[N]`.
    descendants
        Types that each type may become in a step; a type that is not named stays itself.
    """

    states: list[Array]
    types: list[Labels]
    descendants: Mapping[str, Collection[str]]

    def steps(self) -> Iterable[tuple[int, int]]:
        """Neighbouring stages."""
        return itertools.pairwise(range(len(self.states)))


class LineageRow(NamedTuple):
    """One way to find lineages.

    Attributes
    ----------
    name
        What it is.
    tau
        Mass conservation of its plans.
    attained
        `Σ consistent mass / Σ composition bound` over the steps, one for each seed: 1 is the most there is.
    share
        Mean consistent mass over the steps, one for each seed.
    """

    name: str
    tau: float
    attained: tuple[float, ...]
    share: tuple[float, ...]


def worm_course(path: str | os.PathLike[str], *, n_pcs: int = 20) -> TimeCourse:
    """The worm embryo's labelled cells in seven stages, in principal components of their counts.

    Parameters
    ----------
    path
        The file `worm_embryo.h5ad`.
    n_pcs
        Principal components.
    """
    from omt.io import read_h5ad
    from omt.prepare import bin_times, prepare

    adata = read_h5ad(path)
    types = adata.obs["cell_type"].astype(object).replace("AWC_ON", "AWC")
    adata = adata[types.notna().to_numpy()].copy()
    X, _ = prepare(adata, n_pcs=n_pcs)
    stage = adata.obs[bin_times(adata, "embryo_time", BINS)].to_numpy(dtype=np.float64)
    return _course(X, types.dropna().astype(str).to_numpy(dtype=object), stage, DESCENDANTS)


def branching_course(*, seed: int, n_cells: int = 300) -> TimeCourse:
    """The generated branching process of :func:`omt.datasets.branching_process` as a time course."""
    adata, truth = datasets.branching_process(n_cells, random_state=seed)
    descendants = {
        name: {truth.types[l] for l in np.flatnonzero(truth.allowed[k])} for k, name in enumerate(truth.types)
    }
    types = adata.obs["cell_type"].astype(str).to_numpy(dtype=object)
    time = adata.obs["time"].to_numpy(dtype=np.float64)
    return _course(np.asarray(adata.obsm["X_state"], dtype=np.float64), types, time, descendants)


def halves_course(*, seed: int) -> TimeCourse:
    """Two random halves of the blood cells (pbmc68k) as two stages: every type should stay what it is."""
    cells = datasets.pbmc68k_reduced()
    X = np.asarray(cells.obsm["X_pca"][:, :20], dtype=np.float64)
    half = np.random.default_rng(seed).permutation(len(X)) < len(X) // 2
    return _course(X, cells.obs["bulk_labels"].astype(str).to_numpy(dtype=object), (~half).astype(np.float64), {})


def best_between_cells(course: TimeCourse, *, tau: float = 1.0) -> tuple[float, list[LineageConsistency]]:
    """The peer at that one of `PEER_REGS` that keeps most mass on true descents, and that temperature."""
    runs = {reg: lineages_between_cells(course, reg=reg, tau=tau) for reg in PEER_REGS}
    reg = max(runs, key=lambda r: sum(step.share for step in runs[r]))
    return reg, runs[reg]


def lineages_by_labels(course: TimeCourse, *, tau: float = 1.0) -> list[LineageConsistency]:
    """Cell types as components, one plan a step. The labels that make the components also score them."""
    X, y = course.states, course.types
    plans = (between_labels(X[s], y[s].tolist(), X[t], y[t].tolist(), tau) for s, t in course.steps())
    return [consistency(plan, course.descendants) for plan in plans]


def patches(n_cells: int) -> int:
    """A component for every four cells, and two at least."""
    return max(2, n_cells // CELLS_PER_COMPONENT)


def lineages_unsupervised(
    course: TimeCourse,
    *,
    n_components: int | Callable[[int], int] = patches,
    covariance: CovarianceType = "tied",
    resolution: Literal["component", "cell"] = "cell",
    tau: float = 1.0,
    seed: int = 0,
) -> list[LineageConsistency]:
    """Components found by EM without labels, and the types of the cells between which mass goes.

    Parameters
    ----------
    course
        The cells.
    n_components
        Components of a stage: a number, or a function of its number of cells.
    covariance
        Shape of the covariances.
    resolution
        Plan between components, or between cells.
    tau
        Mass conservation.
    seed
        Seed of the fits.
    """
    from omt.problem import transport

    fits = [_fitted(X, n_components, covariance, seed) for X in course.states]
    found = []
    for s, t in course.steps():
        plan = transport(fits[s], fits[t], tau=tau).plan(course.states[s], course.states[t], resolution=resolution)
        source, source_names = _one_hot(course.types[s])
        target, target_names = _one_hot(course.types[t])
        found.append(_scored(plan.push(source).T @ target, source_names, target_names, course.descendants))
    return found


def lineages_by_consensus(course: TimeCourse, *, n_fits: int = 5, seed: int = 0) -> list[LineageConsistency]:
    """Components found by EM without labels, several times, and the plan between cells on which the fits agree.

    Parameters
    ----------
    course
        The cells.
    n_fits
        Fits of each stage.
    seed
        Fits have the seeds `seed · n_fits, …, seed · n_fits + n_fits − 1`.
    """
    from omt.plans.consensus import consensus_plan
    from omt.problem import transport

    seeds = range(seed * n_fits, (seed + 1) * n_fits)
    fits = [[_fitted(X, patches, "tied", i, n_init=1) for i in seeds] for X in course.states]
    found = []
    for s, t in course.steps():
        X, Y = course.states[s], course.states[t]
        plans = [transport(P, Q).plan(X, Y, resolution="cell") for P, Q in zip(fits[s], fits[t], strict=True)]
        source, source_names = _one_hot(course.types[s])
        target, target_names = _one_hot(course.types[t])
        found.append(_scored(source.T @ consensus_plan(plans) @ target, source_names, target_names, course.descendants))
    return found


def lineages_between_cells(course: TimeCourse, *, reg: float, tau: float = 1.0) -> list[LineageConsistency]:
    """The peer: entropic transport between all cells, by POT.

    Parameters
    ----------
    course
        The cells.
    reg
        Temperature in units of the mean squared distance.
    tau
        Mass conservation; below 1 marginals are relaxed by a Kullback-Leibler penalty of `reg·τ/(1−τ)`, as in omt.
    """
    import ot
    from scipy.spatial.distance import cdist

    found = []
    for s, t in course.steps():
        C = cdist(course.states[s], course.states[t], "sqeuclidean")
        a, b = (np.full(n, 1.0 / n) for n in C.shape)
        lam = reg * float(C.mean())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a run that ends at its last iteration, within 1e-6 of the marginals
            if tau == 1.0:
                P = ot.sinkhorn(a, b, C, lam, method="sinkhorn_log", numItermax=1000, stopThr=1e-6)
            else:
                P = ot.unbalanced.sinkhorn_unbalanced(
                    a, b, C, lam, lam * tau / (1.0 - tau), method="sinkhorn_stabilized", reg_type="kl",
                    numItermax=1000, stopThr=1e-6,
                )  # fmt: skip
        source, source_names = _one_hot(course.types[s])
        target, target_names = _one_hot(course.types[t])
        found.append(_scored(source.T @ np.asarray(P) @ target, source_names, target_names, course.descendants))
    return found


def lineage_table(course: TimeCourse, *, seeds: Iterable[int] = range(5), tau: float = 0.9) -> list[LineageRow]:
    """All ways side by side; the peer at the best of `PEER_REGS`, which only it may choose with the labels in sight.

    Parameters
    ----------
    course
        The cells.
    seeds
        Seeds of the fits without labels.
    tau
        Mass conservation of the unbalanced rows.
    """
    chosen = list(seeds)

    def row(name: str, runs: list[list[LineageConsistency]], tau: float = 1.0) -> LineageRow:
        shares = tuple(float(np.mean([step.share for step in run])) for run in runs)
        return LineageRow(name, tau, tuple(attained_share(run) for run in runs), shares)

    small = f"no labels, a component for {CELLS_PER_COMPONENT} cells"
    rows = [
        row("labels as components", [lineages_by_labels(course)]),
        row("labels as components", [lineages_by_labels(course, tau=tau)], tau),
        row(
            "no labels, six components",
            [
                lineages_unsupervised(course, n_components=6, covariance="full", resolution="component", seed=seed)
                for seed in chosen
            ],
        ),
        row(
            f"{small}, plan between components",
            [lineages_unsupervised(course, resolution="component", seed=seed) for seed in chosen],
        ),
        row(f"{small}, plan between cells", [lineages_unsupervised(course, seed=seed) for seed in chosen]),
        row("no labels, consensus of five such fits", [lineages_by_consensus(course, seed=seed) for seed in chosen]),
        row(
            f"{small}, plan between cells", [lineages_unsupervised(course, tau=tau, seed=seed) for seed in chosen], tau
        ),
    ]
    for relaxed in (1.0, tau):
        reg, run = best_between_cells(course, tau=relaxed)
        rows.append(row(f"entropic transport between cells, best reg={reg:g}", [run], relaxed))
    return rows


def attained_share(steps: Iterable[LineageConsistency]) -> float:
    """`Σ share / Σ bound` over the steps."""
    found = list(steps)
    return sum(step.share for step in found) / sum(step.bound for step in found)


def _course(X: Array, types: Labels, stage: Array, descendants: Mapping[str, Collection[str]]) -> TimeCourse:
    rows = [np.flatnonzero(stage == value) for value in np.unique(stage[np.isfinite(stage)])]
    return TimeCourse([X[i] for i in rows], [types[i] for i in rows], descendants)


def _fitted(X: Array, n_components: Any, covariance: CovarianceType, seed: int, n_init: int = 3) -> Mixture:
    from omt.fitting.em import fit_mixture

    K = int(n_components(len(X)) if callable(n_components) else n_components)
    return fit_mixture(X, K, covariance=covariance, n_init=n_init, random_state=seed, progress=False)


def _one_hot(types: Labels) -> tuple[Array, list[str]]:
    names, codes = np.unique(types.astype(str), return_inverse=True)
    return np.eye(len(names))[codes], names.tolist()


def _scored(
    table: Array, source: list[str], target: list[str], descendants: Mapping[str, Collection[str]]
) -> LineageConsistency:
    import pandas as pd

    from omt.metrics import lineage_consistency

    return lineage_consistency(pd.DataFrame(table, index=source, columns=target), descendants)
