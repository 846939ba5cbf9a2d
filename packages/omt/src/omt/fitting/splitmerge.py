"""Leaving poor local optima: split a component that covers two groups, merge two that share one.

EM cannot carry a component across a region without samples, so a start that gives one group two components and two
groups one stays like that. A move does both at once and keeps K. Moves are chosen by what they would gain on the
samples of the components concerned, which costs about as much as one sweep, and are kept only if the whole mixture
explains the samples better after some EM iterations.

Letters: ``n`` samples (a subsample in memory), ``K`` components.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omt.chunks import as_source
from omt.families.base import Family
from omt.fitting.iterate import State, batch
from omt.fitting.progress import Progress
from omt.fitting.seeding import kmeans_labels
from omt.fitting.supervision import Supervision
from omt.fitting.sweeps import Data, Model, accumulate, evidence, log_densities, maximise, start, sweep

# Most rounds of moves, EM iterations after a round, and EM iterations of one component's trial split.
_ROUNDS = 8
_ITERATIONS = 12
_LOCAL_ITERATIONS = 5
# Partners of each component that are tried for a merger: its nearest by divergence.
_PARTNERS = 2
# Samples that a component needs for a trial split.
_SMALLEST = 20


@dataclass(frozen=True)
class _Move:
    """Split ``split`` into ``sides`` (a number 0 or 1 for each of its ``rows``) and merge ``pair``."""

    split: int
    rows: NDArray[np.int64]
    sides: NDArray[np.int64]
    pair: tuple[int, int]
    gain: float


def improve(data: Data, family: Family, state: State, seed: int, bar: Progress, features: Any = None) -> State:
    """Split and merge components for as long as that helps.

    Parameters
    ----------
    data
        Samples in memory, without supervision.
    family
        Recipe of the components.
    state
        A model after some EM iterations.
    seed, bar
        Seed of the trial splits; where progress goes.
    features
        Coordinates in which a component's samples are split by k-means, ``[n, r]``; default: those of the family.

    Returns
    -------
    State
        ``state`` itself, or one whose log-likelihood on the samples is higher.

    References
    ----------
    Ueda, Nakano, Ghahramani & Hinton (2000), SMEM algorithm for mixture models. Here moves are ranked by trial fits
    on the samples concerned, and several that share no component are made at once.
    """
    if state.model.components.K < 3:
        return state
    rng = np.random.default_rng([seed, 2**33])
    X = data.source.take(np.arange(data.N), data.dtype)
    features = family.features(X, seed) if features is None else features
    for _ in range(_ROUNDS):
        R = _responsibilities(data, X, state.model)
        moves = _moves(data, X, features, R, family, state, rng)
        for chosen in (moves, moves[:1]):
            trial = _after(data, X, R, family, state, chosen, bar) if chosen else state
            if trial.log_likelihood > state.log_likelihood or len(moves) <= 1:
                break
        if trial.log_likelihood <= state.log_likelihood:
            break
        state = trial
    return state


def grow(data: Data, family: Family, state: State, seed: int, bar: Progress, features: Any = None) -> State | None:
    """One component more: the one whose samples gain most by two components instead of it is split.

    Parameters
    ----------
    data, family, state, seed, bar, features
        As in :func:`improve`.

    Returns
    -------
    State or None
        State with ``K + 1`` components after some EM iterations; ``None`` if no component has samples enough to be
        split.
    """
    X = data.source.take(np.arange(data.N), data.dtype)
    features = family.features(X, seed) if features is None else features
    R = _responsibilities(data, X, state.model)
    K = R.shape[1]
    rng = np.random.default_rng([seed, 2**34, K])
    owner = R.argmax(axis=1)
    found = []
    for k in range(K):
        rows = np.flatnonzero(owner == k)
        split = _trial_split(data, X, features, rows, family, state, k, rng)
        if split is not None:
            found.append((split[0], k, rows[split[1] == 0]))
    if not found:
        return None
    _, k, first = max(found, key=lambda entry: entry[0])
    wider = np.concatenate([R, np.zeros((data.N, 1))], axis=1)
    wider[first, K] = wider[first, k]
    wider[first, k] = 0.0
    return _from_responsibilities(data, family, wider, bar, "more components")


def _responsibilities(data: Data, X: Any, model: Model) -> NDArray[Any]:
    scores = log_densities(data, model.components, slice(0, data.N), X)
    return Supervision().assign(scores, model.log_weights, slice(0, data.N))[0]


def _moves(
    data: Data, X: Any, features: Any, R: NDArray[Any], family: Family, state: State, rng: np.random.Generator
) -> list[_Move]:
    """Moves that promise a gain and share no component, the best first."""
    owner = R.argmax(axis=1)
    members = [np.flatnonzero(owner == k) for k in range(R.shape[1])]
    splits = [_trial_split(data, X, features, rows, family, state, k, rng) for k, rows in enumerate(members)]
    order = sorted((k for k in range(R.shape[1]) if splits[k] is not None), key=lambda k: -splits[k][0])  # type: ignore[index]  # not None
    mergers = sorted(_mergers(data, X, members, family, state))
    used: set[int] = set()
    moves = []
    for k in order:
        found = splits[k]
        assert found is not None  # noqa: S101  # filtered above
        if k in used:
            continue
        for loss, i, j in mergers:
            if loss >= found[0]:
                break
            if k not in (i, j) and not used & {i, j}:
                moves.append(_Move(k, members[k], found[1], (i, j), found[0] - loss))
                used |= {k, i, j}
                break
    return sorted(moves, key=lambda move: -move.gain)


def _local(data: Data, X: Any, rows: NDArray[np.int64]) -> Data:
    weight = None if data.weight is None else data.weight[rows]
    size = None if data.size is None else data.size[rows]
    return Data(as_source(X[rows]), data.batch_size, data.dtype, weight, size=size)


def _trial_split(
    data: Data,
    X: Any,
    features: Any,
    rows: NDArray[np.int64],
    family: Family,
    state: State,
    k: int,
    rng: np.random.Generator,
) -> tuple[float, NDArray[np.int64]] | None:
    """Log-likelihood that a component's samples gain by two components instead of it, and their sides."""
    if rows.size < _SMALLEST:
        return None
    local = _local(data, X, rows)
    sides = kmeans_labels(features[rows], 2, rng, local.weight, steps=3)
    if np.unique(sides).size < 2:
        return None
    local.supervision = Supervision(sides, np.arange(2))
    model, _ = start(local, family, 2)
    local.supervision = Supervision()
    for _ in range(_LOCAL_ITERATIONS):
        found = sweep(local, family, model)
        if found.statistics.weight.min() < 1.0:
            return None
        model = maximise(family, found.statistics, state.prior, model.components)
    alone = Model(np.ones(1), state.model.components.select(np.array([k])))
    sides = _responsibilities(local, X[rows], model).argmax(axis=1)
    return evidence(local, model) - evidence(local, alone), sides


def _mergers(
    data: Data, X: Any, members: list[NDArray[np.int64]], family: Family, state: State
) -> list[tuple[float, int, int]]:
    """Log-likelihood that the samples of near pairs of components lose by one component instead of the two."""
    weights, components = state.model
    divergence = components.kl(components)
    divergence = divergence + divergence.T
    np.fill_diagonal(divergence, np.inf)
    near = np.argsort(divergence, axis=1)[:, :_PARTNERS]
    pairs = {(min(i, int(j)), max(i, int(j))) for i in range(components.K) for j in near[i]}
    found = []
    for i, j in sorted(pairs):
        rows = np.sort(np.concatenate([members[i], members[j]]))
        if rows.size < 2:
            continue
        local = _local(data, X, rows)
        both = np.array([i, j])
        two = Model(weights[both] / weights[both].sum(), components.select(both))
        statistics = family.empty(1, data.source.n_features, components.select(both[:1]).centre())
        for part, block in local.chunks():
            R = np.ones((block.shape[0], 1), dtype=data.dtype)
            R = R if local.weight is None else local.weight[part][:, None] * R
            accumulate(local, family, statistics, part, block, R)
        one = maximise(family, statistics, state.prior, None)
        found.append((evidence(local, two) - evidence(local, one), i, j))
    return found


def _after(
    data: Data, X: Any, R: NDArray[Any], family: Family, state: State, moves: list[_Move], bar: Progress
) -> State:
    """State after the moves and some EM iterations."""
    R = R.astype(np.float64)
    for move in moves:
        i, j = move.pair
        R[:, i] += R[:, j]
        R[:, j] = 0.0
        # The split component keeps its soft borders to the others; only its own samples change sides.
        first = move.rows[move.sides == 0]
        R[first, j] = R[first, move.split]
        R[first, move.split] = 0.0
    return _from_responsibilities(data, family, R, bar, "split and merge")


def _from_responsibilities(data: Data, family: Family, R: NDArray[Any], bar: Progress, title: str) -> State:
    """State after an M-step for given responsibilities and some EM iterations."""
    fixed = replace(data, supervision=Supervision(soft=R))
    state = State.of(*start(fixed, family, R.shape[1]))
    batch(data, family, state, _ITERATIONS, 0.0, None, bar, title=title, adapt=True)
    return state
