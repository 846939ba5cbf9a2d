"""How sure the transitions are: plans of many bootstrap replicates, summarised entry by entry.

Letters: ``N``, ``M`` samples of source and target, ``K``, ``L`` components, ``B`` replicates, ``U`` units, ``T`` times.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from omt.scalars import generator, is_number
from omt.solver.solution import ConvergenceWarning
from omt.stability.resample import Sample, replicate_mixtures

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from omt.pairs.cost import CostName
    from omt.transport import Transport

    Array = NDArray[np.float64]

__all__ = ["Bootstrap", "Summary", "bootstrap", "bootstrap_chain", "unit_codes"]

_FEWEST_UNITS = 3


@dataclass(frozen=True, eq=False)
class Summary:
    """Mean, standard deviation and interval of each entry of a table over the replicates."""

    mean: Array
    sd: Array
    lower: Array
    upper: Array

    @classmethod
    def of(cls, tables: Array, level: float) -> Summary:
        """Summarise tables ``[B, ...]``; the interval leaves out ``(1 − level)/2`` of the replicates on each side."""
        lower, upper = np.quantile(tables, [0.5 - level / 2.0, 0.5 + level / 2.0], axis=0)
        return cls(tables.mean(axis=0), tables.std(axis=0, ddof=1), lower, upper)


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Uncertainty of the plan between two mixtures; :func:`bootstrap` makes it.

    Attributes
    ----------
    forward, backward : Summary
        Of the row-stochastic tables: where mass goes ``[K, L]``, where it comes from ``[L, K]``.
    coupling : Summary
        Of the masses ``W`` [K, L].
    lift : Summary
        Of ``W m / (W1 ⊗ Wᵀ1)`` [K, L] (``m`` the plan's mass): the transition over what it would be if descendants were
        drawn without regard to their origin. 1 is independence.
    sign_stability : array [K, L]
        Share of replicates in which the transition is on the same side of independence as in the plan itself.
    source_names, target_names : tuple of str
        Components.
    level : float
        Of the intervals.
    n_boot : int
        Replicates.
    """

    forward: Summary
    backward: Summary
    coupling: Summary
    lift: Summary
    sign_stability: Array
    source_names: tuple[str, ...]
    target_names: tuple[str, ...]
    level: float
    n_boot: int

    @property
    def verdict(self) -> NDArray[np.int8]:
        """[K, L]: 1 where the whole interval says more than independence, −1 where it says less, 0 if it holds 1."""
        return (self.lift.lower > 1.0).astype(np.int8) - (self.lift.upper < 1.0).astype(np.int8)

    def to_dict(self) -> dict[str, Any]:
        """Arrays, strings and numbers in a nested dict that h5ad can hold."""
        tables = {"forward": self.forward, "backward": self.backward, "coupling": self.coupling, "lift": self.lift}
        return {
            **{name: dict(vars(table)) for name, table in tables.items()},
            "sign_stability": self.sign_stability,
            "verdict": self.verdict.astype(np.int64),
            "source_names": np.array(self.source_names, dtype=str),
            "target_names": np.array(self.target_names, dtype=str),
            "level": self.level,
            "n_boot": self.n_boot,
        }


def bootstrap(
    transport: Transport,
    X: Any,
    Y: Any,
    *,
    R: ArrayLike | None = None,
    S: ArrayLike | None = None,
    unit_x: ArrayLike | None = None,
    unit_y: ArrayLike | None = None,
    n_boot: int = 200,
    level: float = 0.9,
    refit: bool = False,
    cost: CostName | Callable[..., Any] | ArrayLike = "w2",
    rng: np.random.Generator | int | None = None,
) -> Bootstrap:
    """Bayesian bootstrap of the plan between two mixtures.

    In each replicate samples, or whole units of them, get random weights, the components are estimated again, and the
    plan is solved again at the same relative temperature.

    Parameters
    ----------
    transport : Transport
        The plan.
    X, Y : array [N, d], [M, d], or anything :func:`omt.fit_mixture` reads
        Samples that source and target were fitted to.
    R, S : array [N, K], [M, L], optional
        Their responsibilities; those of the mixtures by Bayes' rule if not given.
    unit_x, unit_y : array [N], [M], optional
        Unit of each sample, such as its donor: the right one is what would be drawn anew if the study were repeated. A
        unit that occurs on both sides has one weight. Each sample is its own unit if not given.
    n_boot : int
        Replicates, at least 2.
    level : float
        Of the intervals, in (0, 1).
    refit : bool
        Run EM from the fitted mixture in each replicate, so that responsibilities follow; slower. Fixed ones
        understate the uncertainty of components that overlap.
    cost : str, callable or array
        Cost of the transport.
    rng : Generator or int, optional
        Randomness.

    Returns
    -------
    Bootstrap

    Raises
    ------
    ValueError
        If samples and responsibilities do not fit, a side has fewer than three units, or a number is out of range.

    References
    ----------
    D. Rubin, The Bayesian bootstrap, Annals of Statistics 9, 1981.

    Examples
    --------
    >>> import numpy as np, omt
    >>> from omt.stability import bootstrap
    >>> rng = np.random.default_rng(0)
    >>> P, Q = (omt.Mixture.from_gaussians([a, 1 - a], [[0.0], [6.0]], [[[1.0]], [[1.0]]]) for a in (0.5, 0.2))
    >>> X, Y = P.sample(400, rng), Q.sample(400, rng)
    >>> found = bootstrap(omt.transport(P, Q), X, Y, n_boot=100, rng=0)
    >>> bool(found.forward.lower[0, 0] < 0.4 < found.forward.upper[0, 0])  # 0.2 of 0.5 stay
    True
    >>> found.verdict.tolist()
    [[1, -1], [-1, 1]]
    """
    sides = []
    for name, mixture, data, given in (("R", transport.source, X, R), ("S", transport.target, Y, S)):
        responsibilities = np.asarray(mixture.responsibilities(data) if given is None else given, dtype=np.float64)
        if responsibilities.ndim != 2 or responsibilities.shape[1] != mixture.K:
            raise ValueError(
                f"{name} has shape {responsibilities.shape}; the mixture has {mixture.K} components, so it must be "
                f"[samples, {mixture.K}]"
            )
        sides.append((data, responsibilities))
    if (unit_x is None) != (unit_y is None):
        raise ValueError("give unit_x and unit_y, or neither")
    codes: list[NDArray[np.int64] | None] = [None, None]
    if unit_x is not None and unit_y is not None:
        codes = list(unit_codes([np.asarray(unit_x), np.asarray(unit_y)], ["the source", "the target"]))
    samples = [Sample(data, weights, unit=code) for (data, weights), code in zip(sides, codes, strict=True)]
    found = bootstrap_chain(
        [transport], samples, n_boot=n_boot, level=level, refit=refit, cost=cost, rng=generator(rng)
    )
    return found[0, 1]


def bootstrap_chain(
    transports: Sequence[Transport],
    samples: Sequence[Sample],
    *,
    n_boot: int,
    level: float,
    refit: bool,
    cost: Any,
    rng: np.random.Generator,
    done: Callable[[], None] = lambda: None,
) -> dict[tuple[int, int], Bootstrap]:
    """Bayesian bootstrap of a chain of plans: all pairs of its times.

    Parameters
    ----------
    transports : sequence of Transport
        Steps of the chain.
    samples : sequence of Sample
        Those of each time, one more than there are steps. Units are the same numbers at all times.
    n_boot, level, refit, cost, rng
        As in :func:`bootstrap`.
    done : callable
        Called ``n_boot`` times for each step, and for each time that is refitted.

    Notes
    -----
    Beyond the samples, memory holds the components of ``B`` replicates at two times, and ``B`` tables ``[K, L]`` of
    each step.

    Returns
    -------
    dict
        Places of two times in the chain to their :class:`Bootstrap`.
    """
    count: Any = n_boot
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 2:
        raise ValueError(f"n_boot is {n_boot!r}; it must be an integer ≥ 2, and some hundred for stable intervals")
    if not is_number(level) or not 0.0 < level < 1.0:
        raise ValueError(f"level is {level!r}; it must be between 0 and 1, for example 0.9")
    units = [sample.unit for sample in samples if sample.unit is not None]
    table = rng.standard_exponential((1 + max(int(u.max()) for u in units), n_boot)) if units else None
    mixtures = [transports[0].source, *(step.target for step in transports)]
    replicates = (
        replicate_mixtures(sample, mixture, table, n_boot, rng, refit=refit, done=done)
        for sample, mixture in zip(samples, mixtures, strict=True)
    )
    steps: list[_Tables] = []
    failed = 0
    # Replicates of two neighbouring times are in memory, never those of all.
    for step, (here, there) in zip(transports, pairwise(replicates), strict=True):
        tables = _Tables.empty(n_boot, step.coupling.shape)
        for b in range(n_boot):
            growth = step.growth if here.growth is None else here.growth[b]
            solved = _solved_again(step, (here.mixtures[b], there.mixtures[b]), growth, cost)
            failed += not solved.converged
            tables.put(b, solved)
            done()
        steps.append(tables)
    if failed:
        warnings.warn(
            f"{failed} of {n_boot * len(transports)} plans of the bootstrap stopped above their tolerance; "
            "take a larger reg",
            ConvergenceWarning,
            stacklevel=3,
        )
    originals = [_Tables.of(step) for step in transports]
    return {
        (i, j): _summarised(
            reduce(_Tables.then, steps[i:j]),
            reduce(_Tables.then, originals[i:j]),
            (mixtures[i].names, mixtures[j].names),
            level,
        )
        for i in range(len(transports))
        for j in range(i + 1, len(transports) + 1)
    }


def unit_codes(columns: Sequence[NDArray[Any]], where: Sequence[str]) -> list[NDArray[np.int64]]:
    """Number the units of several groups of samples; one that occurs in two groups has one number.

    Parameters
    ----------
    columns : sequence of arrays
        Unit of each sample of each group.
    where : sequence of str
        What to call the groups in messages.

    Raises
    ------
    ValueError
        If a unit is missing (None, NaN), or a group has fewer than three.
    """
    import pandas as pd

    for column, place in zip(columns, where, strict=True):
        missing = pd.isna(column)
        if missing.any():
            raise ValueError(
                f"{int(missing.sum())} sample(s) of {place} have no unit; give them one, or leave them out"
            )
        n = len(pd.unique(column))
        if n < _FEWEST_UNITS:
            raise ValueError(
                f"{place} has {n} unit(s), and the variation between fewer than {_FEWEST_UNITS} cannot be told; take "
                "unit='cell', which answers for these units only, or a column with more of them"
            )
    codes = pd.factorize(np.concatenate([np.asarray(column, dtype=object) for column in columns]))[0]
    ends = np.cumsum([len(column) for column in columns])
    return [np.asarray(part, dtype=np.int64) for part in np.split(codes, ends[:-1])]


# ------------------------------------------------------------------------------------------------------------ private
@dataclass(frozen=True, eq=False)
class _Tables:
    """Coupling [..., K, L] and row-stochastic tables [..., K, L], [..., L, K] of one plan or of many."""

    coupling: Array
    forward: Array
    backward: Array

    @classmethod
    def empty(cls, n: int, shape: tuple[int, ...]) -> _Tables:
        K, L = shape
        return cls(np.empty((n, K, L)), np.empty((n, K, L)), np.empty((n, L, K)))

    @classmethod
    def of(cls, t: Transport) -> _Tables:
        return cls(t.coupling, t.conditional("forward"), t.conditional("backward"))

    def put(self, b: int, t: Transport) -> None:
        self.coupling[b], self.forward[b], self.backward[b] = t.coupling, t.conditional(), t.conditional("backward")

    def then(self, later: _Tables) -> _Tables:
        """Tables over two steps, as those of a chain."""
        return _Tables(self.coupling @ later.forward, self.forward @ later.forward, later.backward @ self.backward)

    def lift(self) -> Array:
        mass = self.coupling.sum(axis=(-2, -1), keepdims=True)
        by_chance = self.coupling.sum(axis=-1, keepdims=True) * self.coupling.sum(axis=-2, keepdims=True) / mass
        ratio: Array = np.divide(self.coupling, by_chance, out=np.ones_like(self.coupling), where=by_chance > 0.0)
        return ratio


def _summarised(
    tables: _Tables, original: _Tables, names: tuple[tuple[str, ...], tuple[str, ...]], level: float
) -> Bootstrap:
    lift, found = tables.lift(), original.lift()
    return Bootstrap(
        forward=Summary.of(tables.forward, level),
        backward=Summary.of(tables.backward, level),
        coupling=Summary.of(tables.coupling, level),
        lift=Summary.of(lift, level),
        sign_stability=((lift > 1.0) == (found > 1.0)).mean(axis=0),
        source_names=names[0],
        target_names=names[1],
        level=float(level),
        n_boot=len(lift),
    )


def _solved_again(step: Transport, mixtures: tuple[Any, Any], growth: Array | None, cost: Any) -> Transport:
    """The same problem between other mixtures, at the same temperature relative to the mean cost."""
    from omt.problem import transport

    mean = float(step.cost_matrix.mean())
    temperature: dict[Literal["reg", "lam"], Any] = {"reg": step.lam / mean} if mean > 0.0 else {"lam": step.lam}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return transport(
            *mixtures,
            cost=cost,
            **temperature,
            epsilon=step.epsilon,
            tau=step.tau,
            tol=step.tol,
            max_iter=step.max_iter,
            forbidden=step.forbidden,
            growth=growth,
        )
