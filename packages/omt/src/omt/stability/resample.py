"""Bayesian bootstrap of a mixture: components estimated again under random weights of the samples.

Each replicate gives every unit (a sample, or a donor or embryo with all of its samples) an exponential weight; divided
by their sum they are a draw from the flat Dirichlet distribution. Components follow from weighted sufficient statistics
with the responsibilities as they are, and these are sums: one product adds up all replicates at once.

Letters: ``N`` samples, ``n`` of a block, ``d`` features, ``K`` components, ``B`` replicates, ``U`` units.

References
----------
D. Rubin, The Bayesian bootstrap, Annals of Statistics 9, 1981.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from omt.chunks import as_source
from omt.families.base import Statistics
from omt.mixture import Mixture

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from omt.chunks import Source
    from omt.families.base import Family

    Array = NDArray[np.float64]

__all__ = ["Replicates", "Sample", "replicate_mixtures"]

_CHUNK = 8192  # rows read at once
_WIDE = 1 << 21  # entries of a block of responsibilities times replicates
_UNIT_ENTRIES = 1 << 26  # numbers that sums by unit may take; beyond, units share the path of single samples
_NEGLIGIBLE = 1e-8  # responsibilities below this do not count: far below the sampling error of their sum
_REFIT_STEPS = 50
_REFIT_TOL = 1e-4  # nats a sample
_GROWN = "grown"  # name under which sums of growth travel with the statistics


@dataclass(frozen=True, eq=False)
class Sample:
    """Samples of one mixture, as the bootstrap needs them.

    Attributes
    ----------
    X : array [N, d], or anything :func:`omt.fit_mixture` reads
        Samples.
    responsibilities : array [N, K]
        Under the fitted mixture; rows sum to 1.
    unit : int array [N] or None
        Which unit each sample belongs to, 0 to ``U − 1``; samples are units if None.
    weight : array [N] or None
        Sample weights.
    growth : array [N] or None
        Descendants of each sample over the next step.
    known : bool array [N] or None
        Samples whose component is given, so that refitting leaves their responsibilities alone.
    """

    X: Any
    responsibilities: Array
    unit: NDArray[np.int64] | None = None
    weight: Array | None = None
    growth: Array | None = None
    known: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Replicates:
    """Mixtures of the replicates, and the growth [B, K] of their components if samples have one."""

    mixtures: list[Mixture]
    growth: Array | None


def replicate_mixtures(
    sample: Sample,
    mixture: Mixture,
    unit_weights: Array | None,
    n_boot: int,
    rng: np.random.Generator,
    *,
    refit: bool = False,
    done: Callable[[], None] = lambda: None,
) -> Replicates:
    """Estimate a mixture again under the weights of each replicate.

    Parameters
    ----------
    sample : Sample
        The samples.
    mixture : Mixture
        What was fitted to them.
    unit_weights : array [U, B] or None
        Exponential weights of the units; drawn for each sample if None.
    n_boot : int
        ``B``.
    rng : Generator
        Where weights of samples come from.
    refit : bool
        Let responsibilities follow: EM from the fitted mixture until it gains less than 1e-4 nats a sample.
    done : callable
        Called after each replicate that was refitted.

    Returns
    -------
    Replicates
    """
    recipe = recipe_of(mixture)
    source = as_source(sample.X)
    tally = _Tally(source, sample, mixture, recipe, _centre(mixture))
    draws = _draws(sample, unit_weights, n_boot, rng, keep=refit)
    sums = tally.by_unit(unit_weights) if tally.units_are_few(unit_weights) else tally.by_sample(draws, n_boot)
    grown = sums.pop(_GROWN) / sums["weight"] if sample.growth is not None else None
    mixtures = []
    for b in range(n_boot):
        statistics = Statistics({name: np.array(value[b]) for name, value in sums.items()}, _centre(mixture))
        statistics.scale(source.n_samples / float(statistics.weight.sum()))
        weights = statistics.weight / statistics.weight.sum()
        found = Mixture(
            weights,
            recipe.m_step(statistics, recipe.prior(statistics), mixture.components),
            **({"names": mixture.names} | _extras(mixture)),
        )
        if refit:
            found = _refitted(tally, found, draws(slice(0, source.n_samples))[:, b])
            done()
        mixtures.append(found)
    return Replicates(mixtures, grown)


def recipe_of(mixture: Mixture) -> Family:
    """The recipe by which components like those of a fitted mixture are estimated, with its shape and shrinkage."""
    from omt.fitting.arguments import family_like

    recipe: Any = family_like(mixture)
    options: dict[str, Any] = {}
    shape: Any = getattr(mixture.components, "gaussian", mixture.components)
    if getattr(shape, "covariance_type", "") == "lowrank":
        options["rank"] = shape.rank
    if mixture.report is not None and hasattr(recipe, "shrinkage"):
        options["shrinkage"] = mixture.report.shrinkage
    same: Family = replace(recipe, **options)
    return same


@dataclass(frozen=True, eq=False)
class _Tally:
    """Sums of the sufficient statistics of all replicates, by name with the replicate as first axis."""

    source: Source
    sample: Sample
    mixture: Mixture
    recipe: Family
    centre: Array | None

    def units_are_few(self, unit_weights: Array | None) -> bool:
        """Whether sums by unit fit into memory."""
        if unit_weights is None or self.sample.unit is None:
            return False
        one = self.recipe.empty(self.mixture.K, self.mixture.d, self.centre)
        return len(unit_weights) * sum(value.size for value in one.sums.values()) <= _UNIT_ENTRIES

    @property
    def _squares_all_pairs(self) -> bool:
        """Whether statistics hold full second moments, for which there is a product over replicates."""
        second = self.recipe.empty(1, 2, None).sums.get("second")
        return second is not None and second.ndim == 3

    def by_unit(self, unit_weights: Array | None) -> dict[str, Array]:
        """Sum over each unit once; a replicate is then a product with the units' weights."""
        assert unit_weights is not None  # noqa: S101  # narrows the type
        assert self.sample.unit is not None  # noqa: S101
        K, U = self.mixture.K, len(unit_weights)
        grown = np.zeros((U, K))
        units = [self.recipe.empty(K, self.mixture.d, self.centre) for _ in range(U)]
        for start, block in self.source.chunks(_CHUNK):
            rows = slice(start, start + block.shape[0])
            R, codes = self._weighted(rows), self.sample.unit[rows]
            for u in np.unique(codes):
                own = np.flatnonzero(codes == u)
                self.recipe.accumulate(units[u], block[own], R[own], **self._sizes(block[own]))
                if self.sample.growth is not None:
                    grown[u] += self.sample.growth[rows][own] @ R[own]
        sums = {name: np.stack([unit.sums[name] for unit in units]) for name in units[0].sums}
        if self.sample.growth is not None:
            sums[_GROWN] = grown
        return {name: np.tensordot(unit_weights.T, value, axes=1) for name, value in sums.items()}

    def by_sample(self, draws: Callable[[slice], Array], n_boot: int) -> dict[str, Array]:
        """Sum over all samples for all replicates at once, block by block."""
        K, d = self.mixture.K, self.mixture.d
        full = self._squares_all_pairs
        packed = np.zeros((n_boot, K, 1 + d + d * (d + 1) // 2)) if full else None
        tiled = None if self.centre is None or full else np.concatenate([self.centre] * n_boot)
        every = self.recipe.empty(1 if full else n_boot * K, d, tiled)
        grown = np.zeros((n_boot, K))
        step = _CHUNK if full else max(64, _WIDE // (n_boot * K))
        for start, block in self.source.chunks(step):
            rows = slice(start, start + block.shape[0])
            weights, R = draws(rows), self._weighted(rows)
            if packed is not None:
                values = np.log(block) if self.mixture.family == "lognormal" else block
                self._add_moments(packed, values, R, weights)
            else:
                wide = (weights[:, :, None] * R[:, None, :]).reshape(len(R), -1)
                self.recipe.accumulate(every, block, wide, **self._sizes(block))
            if self.sample.growth is not None:
                grown += weights.T @ (R * self.sample.growth[rows][:, None])
        if packed is not None:
            sums = _unpacked(packed, d)
        else:
            sums = {name: value.reshape(n_boot, K, *value.shape[1:]) for name, value in every.sums.items()}
        return sums | ({} if self.sample.growth is None else {_GROWN: grown})

    def _weighted(self, rows: slice) -> Array:
        R = np.asarray(self.sample.responsibilities[rows], dtype=np.float64)
        return R if self.sample.weight is None else R * self.sample.weight[rows][:, None]

    def _sizes(self, block: Any) -> dict[str, Array]:
        """Sizes of samples of counts, for families that know them."""
        reference = getattr(self.mixture.components, "reference", None)
        if reference is None:
            return {}
        return {"size": np.asarray(block.sum(axis=1), dtype=np.float64).ravel() / float(reference)}

    def _add_moments(self, packed: Array, X: Array, R: Array, weights: Array) -> None:
        """Weights, first and second moments about the centres: one product for each component."""
        assert self.centre is not None  # noqa: S101  # Gaussians have one
        d = X.shape[1]
        one, other = np.triu_indices(d)
        for k in range(R.shape[1]):
            rows = np.flatnonzero(R[:, k] > _NEGLIGIBLE)
            if rows.size == 0:
                continue
            offset = X[rows] - self.centre[k]
            terms = np.empty((rows.size, packed.shape[2]))
            terms[:, 0] = 1.0
            terms[:, 1 : d + 1] = offset
            np.multiply(offset[:, one], offset[:, other], out=terms[:, d + 1 :])
            terms *= R[rows, k][:, None]
            packed[:, k] += weights[rows].T @ terms


def _unpacked(packed: Array, d: int) -> dict[str, Array]:
    """Moments by name, from the columns that `_Tally` packs."""
    second = np.zeros((*packed.shape[:2], d, d))
    one, other = np.triu_indices(d)
    second[:, :, one, other] = second[:, :, other, one] = packed[:, :, d + 1 :]
    return {"weight": packed[:, :, 0], "first": packed[:, :, 1 : d + 1], "second": second}


def _draws(
    sample: Sample, unit_weights: Array | None, n_boot: int, rng: np.random.Generator, *, keep: bool
) -> Callable[[slice], Array]:
    """Weights ``[n, B]`` of a range of samples; each range once, in order, unless they are kept."""
    if unit_weights is not None and sample.unit is not None:
        table, unit = unit_weights, sample.unit
        return lambda rows: table[unit[rows]]
    if keep:
        drawn = rng.standard_exponential((len(sample.responsibilities), n_boot), dtype=np.float32)
        return lambda rows: drawn[rows].astype(np.float64)
    return lambda rows: rng.standard_exponential((rows.stop - rows.start, n_boot))


def _centre(mixture: Mixture) -> Array | None:
    """Point about which the statistics of each component are taken."""
    components: Any = mixture.components
    centre: Array | None = getattr(components, "centre", components.mean)()
    return centre


def _extras(mixture: Mixture) -> dict[str, Any]:
    """Names of the features, where the mixture has them."""
    names = getattr(mixture, "feature_names", None)
    return {} if names is None else {"feature_names": names}


def _refitted(tally: _Tally, mixture: Mixture, weights: Array) -> Mixture:
    """EM from a mixture under the weights of one replicate."""
    from omt.fitting.arguments import scan, sized
    from omt.fitting.supervision import Supervision
    from omt.fitting.sweeps import Data, Model, maximise, sweep

    sample = tally.sample
    if sample.known is not None and sample.known.all():
        return mixture
    supervision = Supervision()
    if sample.known is not None and sample.known.any():
        supervision = Supervision(soft=np.where(sample.known[:, None], sample.responsibilities, np.nan))
    weight = weights if sample.weight is None else weights * sample.weight
    data = Data(tally.source, _CHUNK, np.dtype(np.float64), weight / weight.mean(), supervision)
    recipe, data.size = sized(tally.recipe, scan(data, tally.recipe)[1])
    model, last = Model(mixture.weights, mixture.components), -np.inf
    for _ in range(_REFIT_STEPS):
        found = sweep(data, recipe, model)
        if found.evidence - last <= _REFIT_TOL * data.N:
            break
        last = found.evidence
        model = maximise(recipe, found.statistics, recipe.prior(found.statistics), model.components)
    return Mixture(model.weights, model.components, **({"names": mixture.names} | _extras(mixture)))
