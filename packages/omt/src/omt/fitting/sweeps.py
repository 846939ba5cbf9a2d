"""One sweep of expectation-maximisation over the data, for any family: responsibilities, statistics, new components.

Letters: ``N`` samples, ``n`` rows of a block, ``d`` features, ``K`` components.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from omt.chunks import Source
from omt.families.base import (
    Components,
    Family,
    FloatArray,
    Prior,
    SizedComponents,
    SizedFamily,
    Statistics,
)
from omt.fitting.supervision import Rows, Supervision

# Samples that each chunk offers as places for an empty component.
CANDIDATES = 8
# How often an empty component is placed anew before it is given up.
ATTEMPTS = 2
# A component responsible for less than this many samples is empty.
_EMPTY = 0.5


class Engine(Protocol):
    """E-steps on another device."""

    @property
    def rows(self) -> int:
        """Rows of a block that are worth the transfer."""

    def expectation(self, data: Data, model: Model, rows: Rows, X: NDArray[Any], result: Sweep) -> NDArray[Any]:
        """Add the sums of one block to ``result``; give the log-likelihood of each of its samples, ``[n]``."""

    def evidence(self, data: Data, model: Model, X: NDArray[Any]) -> NDArray[Any]:
        """Log-likelihood of each sample of a block, ``[n]``."""

    def accumulate(self, statistics: Statistics, X: NDArray[Any], R: NDArray[Any]) -> None:
        """Add a block with given weighted responsibilities ``[n, K]`` to the statistics."""


@dataclass(eq=False)
class Data:
    """What a fit sweeps over.

    Attributes
    ----------
    source
        The samples.
    batch_size
        Rows of a chunk.
    dtype
        Type of samples and responsibilities in the products; sums are float64 always.
    weight
        Weight of each sample, ``[N]``, with mean 1, or ``None``.
    supervision
        What is known about responsibilities.
    size
        Size factor of each sample, ``[N]``, for families that were asked to use them, or ``None``.
    engine
        What computes the E-step on another device, or ``None`` for numpy.
    """

    source: Source
    batch_size: int
    dtype: np.dtype[Any]
    weight: FloatArray | None = None
    supervision: Supervision = field(default_factory=Supervision)
    size: FloatArray | None = None
    engine: Engine | None = None

    @property
    def N(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of samples."""
        return self.source.n_samples

    def chunks(self) -> Iterator[tuple[Rows, Any]]:
        """Rows and samples of each chunk, in order."""
        size = self.batch_size if self.engine is None else max(self.batch_size, self.engine.rows)
        for start, block in self.source.chunks(size, self.dtype):
            yield slice(start, start + block.shape[0]), block


def log_densities(data: Data, components: Components, rows: Rows, X: Any, out: NDArray[Any] | None = None) -> Any:
    """Log-densities of a block under each component, ``[n, K]``, in the data's type."""
    if data.size is None:
        return components.log_prob(X, dtype=data.dtype, out=out)
    sized = cast("SizedComponents", components)
    return sized.log_prob(X, dtype=data.dtype, out=out, size=data.size[rows])


def accumulate(data: Data, family: Family, statistics: Statistics, rows: Rows, X: Any, R: NDArray[Any]) -> None:
    """Add a block of samples with weighted responsibilities ``[n, K]`` to the statistics, in place."""
    if data.engine is not None:
        data.engine.accumulate(statistics, X, R)
    elif data.size is None:
        family.accumulate(statistics, X, R)
    else:
        cast("SizedFamily", family).accumulate(statistics, X, R, size=data.size[rows])


class Model(NamedTuple):
    """Weights ``[K]`` and components of a mixture in the making."""

    weights: FloatArray
    components: Components

    @property
    def log_weights(self) -> FloatArray:
        """Logarithms of the weights: −∞ for a component that no sample is left in, which gets no sample then."""
        with np.errstate(divide="ignore"):
            return np.log(self.weights)


@dataclass
class Sweep:
    """Result of one pass of the E-step.

    Attributes
    ----------
    statistics
        Sums under the responsibilities.
    evidence
        Sum of the samples' weighted log-likelihoods.
    candidates
        Evidence and row (dense ``[d]``, or a CSR matrix of one row) of badly explained samples, worst first when
        sorted.
    """

    statistics: Statistics
    evidence: float = 0.0
    candidates: list[tuple[float, Any]] = field(default_factory=list)


def sweep(data: Data, family: Family, model: Model) -> Sweep:
    """E-step over all samples; statistics about the current means."""
    result = Sweep(family.empty(model.components.K, data.source.n_features, model.components.centre()))
    buffer = np.empty((0 if data.engine else min(data.batch_size, data.N), model.components.K), dtype=data.dtype)
    for rows, X in data.chunks():
        expectation(data, family, model, rows, X, result, buffer)
    return result


def expectation(
    data: Data, family: Family, model: Model, rows: Rows, X: Any, result: Sweep, buffer: NDArray[Any]
) -> None:
    """E-step of one block of samples; its sums are added to ``result``."""
    if data.engine is not None:
        _note_worst(result, data.engine.expectation(data, model, rows, X, result), X)
        return
    scores = log_densities(data, model.components, rows, X, out=buffer[: X.shape[0]])
    R, evidence = data.supervision.assign(scores, model.log_weights, rows)
    if data.weight is not None:
        R *= data.weight[rows][:, None].astype(data.dtype)
        result.evidence += float(evidence.astype(np.float64) @ data.weight[rows])
    else:
        result.evidence += float(evidence.sum(dtype=np.float64))
    accumulate(data, family, result.statistics, rows, X, R)
    _note_worst(result, evidence, X)


def _note_worst(result: Sweep, evidence: NDArray[Any], X: Any) -> None:
    """Remember the worst explained samples of a block as places for empty components."""
    worst = np.argpartition(evidence, min(CANDIDATES, evidence.size - 1))[:CANDIDATES]
    for i in worst:
        result.candidates.append((float(evidence[i]), X[[i]] if hasattr(X, "toarray") else np.array(X[i])))
    if len(result.candidates) > 16 * CANDIDATES:
        result.candidates = sorted(result.candidates, key=lambda pair: pair[0])[:CANDIDATES]


def evidence(data: Data, model: Model) -> float:
    """Sum of the samples' weighted log-likelihoods under the mixture, whatever is known about their components."""
    total = 0.0
    free = Supervision()
    for rows, X in data.chunks():
        if data.engine is not None:
            values = data.engine.evidence(data, model, X)
        else:
            values = free.assign(log_densities(data, model.components, rows, X), model.log_weights, rows)[1]
        total += float(values.astype(np.float64) @ (np.ones(values.size) if data.weight is None else data.weight[rows]))
    return total


def start(data: Data, family: Family, K: int) -> tuple[Model, Prior]:
    """First model, from what is known about responsibilities alone.

    Two passes: means first, so that second moments are taken about them and not about some far origin.
    """
    centre: FloatArray | None = None
    for _ in range(2):
        statistics = family.empty(K, data.source.n_features, centre)
        for rows, X in data.chunks():
            R = data.supervision.given(rows, K).astype(data.dtype)
            if data.weight is not None:
                R *= data.weight[rows][:, None].astype(data.dtype)
            accumulate(data, family, statistics, rows, X, R)
        prior = family.prior(statistics)
        components = family.m_step(statistics, prior)
        centre = components.centre()
    return Model(statistics.weight / statistics.weight.sum(), components), prior


def maximise(family: Family, statistics: Statistics, prior: Prior, previous: Components | None) -> Model:
    """M-step: weights and components from statistics."""
    # A label that was not seen for many steps of stepwise EM keeps a weight whose logarithm exists.
    weight = np.maximum(statistics.weight, np.finfo(float).tiny)
    return Model(weight / weight.sum(), family.m_step(statistics, prior, previous))


def refill(
    family: Family, found: Sweep, prior: Prior, attempts: NDArray[np.int64], *, supervised: bool
) -> tuple[NDArray[np.bool_], int]:
    """Place empty components at the worst-explained samples, in the statistics; say which must go instead.

    Parameters
    ----------
    family, found, prior
        ``found.statistics`` is changed in place.
    attempts
        How often each component was placed anew, ``[K]``; counted up in place.
    supervised
        Components are what the user named: an empty one is never placed elsewhere.

    Returns
    -------
    keep
        Components to keep, ``[K]``.
    placed
        How many were placed anew.
    """
    weight = found.statistics.weight
    keep = np.ones(weight.size, dtype=bool)
    if supervised:
        # A label with one sample, or a soft label with half of one, is what the user asked for.
        keep[:] = weight > 1e-12 * weight.sum()
        return keep, 0
    empty = np.flatnonzero(weight < _EMPTY)
    places = sorted(found.candidates, key=lambda pair: pair[0])
    placed = 0
    for k in empty:
        if attempts[k] >= ATTEMPTS or placed >= len(places):
            keep[k] = False
            continue
        place = places[placed][1]
        place = np.asarray(place.toarray())[0] if hasattr(place, "toarray") else place
        family.place(found.statistics, int(k), place, prior, 0.5 * float(weight.sum()) / weight.size)
        attempts[k] += 1
        placed += 1
    return keep, placed
