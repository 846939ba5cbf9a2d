"""The model that a fit starts from.

Letters: ``K`` components.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omt.chunks import Source, as_source
from omt.families.base import Family
from omt.fitting.iterate import State, batch
from omt.fitting.progress import Progress
from omt.fitting.seeding import kmeans_labels
from omt.fitting.splitmerge import improve
from omt.fitting.supervision import Supervision
from omt.fitting.sweeps import Data, start, sweep

# Samples on which starts are tried and a large fit is warmed up.
_SUBSAMPLE = 20_000
# EM iterations after which the starts are compared.
_SHORT_RUN = 10


def first_model(
    data: Data,
    family: Family,
    K: int,
    n_init: int,
    max_iter: int,
    tol: float,
    seed: int,
    bar: Progress,
    *,
    large: bool,
    rival: State | None = None,
) -> State:
    """Model from which a fit goes on: from the labels, or the best of several short runs on a subsample.

    Parameters
    ----------
    data, family
        What to fit, and how.
    K
        Number of components, where nothing is known about them.
    n_init
        Starts that are tried.
    max_iter, tol
        When the warm-up of a large fit ends.
    seed, bar
        Seed; where progress goes.
    large
        Whether stepwise EM follows, which needs a good model and statistics to begin with.
    rival
        A model on the same subsample that takes the place of the starts if it explains the samples better.
    """
    if data.supervision.is_given:
        owner = data.supervision.owner
        if owner is not None and np.unique(owner).size < owner.size:
            state = _split_labels(data, family, owner, seed)
        else:
            state = State.of(*start(data, family, data.supervision.K))
        if large and not data.supervision.is_complete:
            # All samples, not a subsample, which could lack a rare label.
            state.running = sweep(data, family, state.model).statistics
        return state
    small = subsample(data, seed)
    best = best_start(small, family, K, n_init, seed, bar)
    if rival is not None and rival.log_likelihood > best.log_likelihood:
        best = rival
    best.restart()
    if large:
        batch(small, family, best, max_iter, tol, None, bar, title="warm-up")
        best.restart()
        best.running = sweep(small, family, best.model).statistics
        best.running.scale(data.N / small.N)
    return best


def best_start(small: Data, family: Family, K: int, n_init: int, seed: int, bar: Progress) -> State:
    """The best of ``n_init`` short runs on samples in memory, after splits and mergers."""
    best: State | None = None
    samples = family.features(small.source.take(np.arange(small.N), small.dtype), seed)
    for attempt in range(n_init):
        rng = np.random.default_rng([seed, attempt])
        groups = kmeans_labels(samples, K, rng, small.weight)
        state = _from_partition(small, family, groups)
        batch(small, family, state, _SHORT_RUN, 0.0, None, bar, title=f"start {attempt + 1}", adapt=True)
        # Not the objective: starts whose priors differ are compared by what they explain.
        if best is None or state.log_likelihood > best.log_likelihood:
            best = state
    assert best is not None  # noqa: S101  # n_init is at least 1
    return improve(small, family, best, seed, bar, samples)


def _from_partition(data: Data, family: Family, groups: NDArray[np.int64]) -> State:
    """Model whose components are the groups of a partition; groups without samples are left out."""
    filled, codes = np.unique(groups, return_inverse=True)
    known = Supervision(codes.astype(np.int64), np.arange(filled.size))
    fixed = Data(data.source, data.batch_size, data.dtype, data.weight, known, data.size)
    return State.of(*start(fixed, family, filled.size))


def _split_labels(data: Data, family: Family, owner: NDArray[np.int64], seed: int) -> State:
    """First model with several components a label: each label's samples are partitioned by k-means."""
    codes = data.supervision.codes
    assert codes is not None  # noqa: S101  # owner is only there with codes
    rng = np.random.default_rng([seed, 0])
    rows, groups = [], []
    cap = max(_SUBSAMPLE // (int(owner.max()) + 1), 200)
    for label in range(int(owner.max()) + 1):
        members = np.flatnonzero(codes == label)
        if members.size > cap:
            members = np.sort(rng.choice(members, cap, replace=False))
        parts = np.flatnonzero(owner == label)
        weight = None if data.weight is None else data.weight[members]
        rows.append(members)
        samples = family.features(data.source.take(members, data.dtype), seed)
        groups.append(parts[kmeans_labels(samples, parts.size, rng, weight)])
    order = np.argsort(np.concatenate(rows))
    chosen, group = np.concatenate(rows)[order], np.concatenate(groups)[order]
    small = rows_of(data, chosen)
    # A label of identical samples fills one group only; the others would be empty from the start.
    missing = np.setdiff1d(np.arange(owner.size), group)
    for k in missing:
        twins = np.flatnonzero(owner[group] == owner[k])
        group[twins[rng.integers(twins.size)]] = k
    return _from_partition(small, family, group)


def subsample(data: Data, seed: int) -> Data:
    """At most 20 000 samples in memory, drawn evenly."""
    if data.N <= _SUBSAMPLE:
        return data if data.source.in_memory else rows_of(data, np.arange(data.N))
    rows = np.sort(np.random.default_rng([seed, 2**31]).choice(data.N, _SUBSAMPLE, replace=False))
    return rows_of(data, rows)


def rows_of(data: Data, rows: NDArray[np.int64]) -> Data:
    """Some of the samples in memory, without supervision; weights have mean 1 again."""
    weight = None if data.weight is None else data.weight[rows] / data.weight[rows].mean()
    samples: Source = as_source(data.source.take(rows, data.dtype))
    size = None if data.size is None else data.size[rows]
    return Data(samples, data.batch_size, data.dtype, weight, size=size, engine=data.engine)
