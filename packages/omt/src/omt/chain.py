"""Transports one after another: mixtures at several times and the plans between neighbours.

Letters: ``K_i`` components at time ``i``, ``c`` columns of a set of distributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd

from omt import archive
from omt.interpolation import place_in_time
from omt.mixture import Mixture
from omt.problem import transport
from omt.transport import Transport

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike, NDArray

__all__ = ["TransportChain"]

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class TransportChain:
    """Mixtures at increasing times, and the transport from each to the next.

    Over several steps a component's mass moves as in a Markov chain: the tables of the steps, each with rows that sum
    to 1, are multiplied.

    Parameters
    ----------
    mixtures : sequence of Mixture
        One for each time.
    times : sequence of float
        Increasing numbers.
    transports : sequence of Transport
        From ``mixtures[i]`` to ``mixtures[i + 1]``; one less than there are times.

    Raises
    ------
    ValueError
        If numbers of mixtures, times and transports do not fit, times do not increase, or a transport is between other
        components.

    Examples
    --------
    >>> import omt
    >>> early = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]], names=["stem"])
    >>> late = omt.Mixture.from_gaussians([0.7, 0.3], [[0.0], [5.0]], [[[1.0]], [[1.0]]], names=["stem", "neuron"])
    >>> chain = omt.TransportChain.between([early, late, late], [0, 2, 4])
    >>> chain.fates(0).round(2)
          stem  neuron
    stem   0.7     0.3
    >>> chain.push([1.0], 0, 4).round(2)
    array([0.7, 0.3])
    """

    mixtures: Sequence[Mixture]
    times: Sequence[float]
    transports: Sequence[Transport]

    def __post_init__(self) -> None:
        mixtures, transports = tuple(self.mixtures), tuple(self.transports)
        times = _checked_times(self.times)
        if len(mixtures) != len(times):
            raise ValueError(f"there are {len(mixtures)} mixtures and {len(times)} times; each time needs its mixture")
        if len(transports) != len(times) - 1:
            raise ValueError(
                f"there are {len(transports)} transports and {len(times)} times; "
                f"a chain needs one transport between each two neighbours"
            )
        for i, step in enumerate(transports):
            for side, mixture, j in (("source", step.source, i), ("target", step.target, i + 1)):
                if mixture.names != mixtures[j].names:
                    raise ValueError(
                        f"the {side} of transports[{i}] has components {', '.join(mixture.names)}; "
                        f"the mixture of time {times[j]:g} has {', '.join(mixtures[j].names)}"
                    )
        object.__setattr__(self, "mixtures", mixtures)
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "transports", transports)

    @classmethod
    def between(cls, mixtures: Sequence[Mixture], times: Sequence[float], **options: Any) -> Self:
        """Solve the transports between neighbouring mixtures.

        Parameters
        ----------
        mixtures : sequence of Mixture
            One for each time.
        times : sequence of float
            Increasing numbers.
        **options
            Go to :func:`omt.transport`, the same for all steps.

        Returns
        -------
        TransportChain

        Raises
        ------
        ValueError
            As :class:`TransportChain` and :func:`omt.transport`.
        """
        _checked_times(times)
        steps = [transport(P, Q, **options) for P, Q in pairwise(mixtures)]
        return cls(mixtures, times, steps)

    # ------------------------------------------------------------------------------------------------------- tables
    def transition_matrix(
        self, t0: float, t1: float, *, direction: Literal["forward", "backward"] = "forward"
    ) -> pd.DataFrame:
        """Transition probabilities between the components of two times.

        Parameters
        ----------
        t0, t1 : float
            Times of the chain, ``t0 ≤ t1``.
        direction : {"forward", "backward"}
            ``"forward"``: row ``k`` is where component ``k`` of ``t0`` goes. ``"backward"``: row ``l`` is where
            component ``l`` of ``t1`` comes from.

        Returns
        -------
        pandas.DataFrame
            Rows sum to 1.

        Raises
        ------
        ValueError
            If a time is not in the chain (the message lists those that are), or times are in the wrong order.
        """
        i, j = self._interval(t0, t1)
        table = self._table(i, j, direction)
        rows, columns = (i, j) if direction == "forward" else (j, i)
        return pd.DataFrame(table, index=list(self.mixtures[rows].names), columns=list(self.mixtures[columns].names))

    def joint(self, t0: float, t1: float) -> NDArray[np.float64]:
        """Mass between the components of two times.

        In a balanced chain its marginals are the weights of both mixtures (where growth was assumed, those of
        ``t0`` grown). In a relaxed one rows sum to the mass that
        leaves ``t0``, and columns to what the forward tables of the chain make of it.

        Parameters
        ----------
        t0, t1 : float
            Times of the chain, ``t0 ≤ t1``.

        Returns
        -------
        array [K_0, K_1]

        Raises
        ------
        ValueError
            As :meth:`transition_matrix`.
        """
        i, j = self._interval(t0, t1)
        if i == j:
            return np.diag(self.mixtures[i].weights)
        first = self.transports[i].coupling
        return first if j == i + 1 else first @ self._table(i + 1, j, "forward")

    def push(self, mass: ArrayLike, t0: float, t1: float) -> NDArray[np.float64]:
        """Carry masses on the components of ``t0`` forward to those of ``t1``; the total stays.

        Parameters
        ----------
        mass : array [K_0] or [K_0, c]
            A distribution over components, or several.
        t0, t1 : float
            Times of the chain, ``t0 ≤ t1``.

        Returns
        -------
        array [K_1] or [K_1, c]

        Raises
        ------
        ValueError
            If ``mass`` does not fit, and as :meth:`transition_matrix`.
        """
        i, j = self._interval(t0, t1)
        return self._table(i, j, "forward").T @ self._masses(mass, i)

    def pull(self, mass: ArrayLike, t0: float, t1: float) -> NDArray[np.float64]:
        """Carry masses on the components of ``t1`` back to their origins at ``t0``; the total stays.

        Parameters
        ----------
        mass : array [K_1] or [K_1, c]
            A distribution over components, or several.
        t0, t1 : float
            Times of the chain, ``t0 ≤ t1``.

        Returns
        -------
        array [K_0] or [K_0, c]

        Raises
        ------
        ValueError
            If ``mass`` does not fit, and as :meth:`transition_matrix`.
        """
        i, j = self._interval(t0, t1)
        return self._table(i, j, "backward").T @ self._masses(mass, j)

    def fates(self, t: float, terminal: Sequence[str] | Mapping[str, Sequence[str]] | None = None) -> pd.DataFrame:
        """Probability of each component of ``t`` to end in terminal components of the last time.

        Parameters
        ----------
        t : float
            A time of the chain.
        terminal : sequence of str, or mapping of str to sequences of str, optional
            Components of the last time, or named groups of them; all components if not given. What goes elsewhere is
            not shared among them, so rows may sum to less than 1.

        Returns
        -------
        pandas.DataFrame
            Components of ``t`` by terminal components or groups.

        Raises
        ------
        ValueError
            If ``t`` is not in the chain, or a name is not a component of the last time (the message lists those).
        """
        table = self.transition_matrix(t, self.times[-1])
        if terminal is None:
            return table
        groups = terminal if isinstance(terminal, Mapping) else {name: [name] for name in terminal}
        unknown = [name for members in groups.values() for name in members if name not in table.columns]
        if unknown:
            raise ValueError(
                f"terminal has {unknown[0]!r}, which is no component of the last time {self.times[-1]:g}; "
                f"components there: {', '.join(table.columns)}"
            )
        return pd.DataFrame({group: table[list(members)].sum(axis=1) for group, members in groups.items()})

    def growth(self) -> pd.DataFrame:
        """Growth of the components at each step, as it was assumed and as the plans found it.

        Returns
        -------
        pandas.DataFrame
            A row for each component of each time but the last: ``time``, ``next_time``, ``component``; ``prior`` and
            ``posterior``, descendants per cell until the next time; ``prior_rate`` and ``posterior_rate``, the same as
            factors per unit of time, ``growth^(1/Δt)``.

        Examples
        --------
        >>> import omt
        >>> early, late = (
        ...     omt.Mixture.from_gaussians([a, 1 - a], [[0.0], [9.0]], [[[1.0]], [[1.0]]], names=["A", "B"])
        ...     for a in (0.5, 0.8)
        ... )
        >>> chain = omt.TransportChain.between([early, late], [0, 2], tau=(0.5, 1.0))
        >>> chain.growth()[["component", "posterior", "posterior_rate"]].round(2)
          component  posterior  posterior_rate
        0         A        1.6            1.26
        1         B        0.4            0.63
        """
        parts = []
        for step, (start, end) in zip(self.transports, pairwise(self.times), strict=True):
            prior, posterior = step.prior_growth, step.posterior_growth
            root = 1.0 / (end - start)
            parts.append(
                pd.DataFrame(
                    {
                        "time": start,
                        "next_time": end,
                        "component": list(step.source.names),
                        "prior": prior,
                        "posterior": posterior,
                        "prior_rate": prior**root,
                        "posterior_rate": posterior**root,
                    }
                )
            )
        return pd.concat(parts, ignore_index=True)

    # -------------------------------------------------------------------------------------------------- interpolation
    def interpolate(self, t: float, *, bridge: bool = False) -> Mixture:
        """The mixture at any time between the first and the last.

        Parameters
        ----------
        t : float
            A time; those of the chain give its mixtures.
        bridge : bool
            As in :meth:`omt.Transport.interpolate`.

        Returns
        -------
        Mixture

        Raises
        ------
        ValueError
            If ``t`` is outside (the message lists the times), and as :meth:`omt.Transport.interpolate`.

        Examples
        --------
        >>> import omt
        >>> early = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
        >>> late = omt.Mixture.from_gaussians([1.0], [[4.0]], [[[1.0]]])
        >>> omt.TransportChain.between([early, late], [10, 20]).interpolate(15).mean()
        array([2.])
        """
        step, share = place_in_time(self.times, t)
        if share in {0.0, 1.0}:
            return self.mixtures[step + int(share)]
        return self.transports[step].interpolate(share, bridge=bridge)

    def interpolate_samples(
        self,
        X: Any,
        t: float,
        n: int | None = None,
        rng: np.random.Generator | int | None = None,
        *,
        bridge: bool = False,
    ) -> NDArray[np.float64]:
        """Samples of the last time before ``t``, moved to ``t``; see :meth:`omt.Transport.interpolate_samples`.

        Parameters
        ----------
        X : array [N, d]
            Samples of the time of the chain that ``t`` follows (of the time before the last one, if ``t`` is the last).
        t : float
            Between the first and the last time.
        n : int, optional
            How many; as many as there are if not given.
        rng : Generator or int, optional
            Randomness.
        bridge : bool
            As in :meth:`omt.Transport.interpolate`.

        Returns
        -------
        array [n, d]

        Raises
        ------
        ValueError
            If ``t`` is outside (the message lists the times), and as :meth:`omt.Transport.interpolate_samples`.
        """
        step, share = place_in_time(self.times, t)
        return self.transports[step].interpolate_samples(X, share, n, rng, bridge=bridge)

    # ------------------------------------------------------------------------------------------------------ private
    def _index(self, t: float, argument: str) -> int:
        for i, time in enumerate(self.times):
            if time == t:
                return i
        known = ", ".join(f"{time:g}" for time in self.times)
        raise ValueError(f"{argument}={t!r} is not a time of the chain; its times are {known}")

    def _interval(self, t0: float, t1: float) -> tuple[int, int]:
        i, j = self._index(t0, "t0"), self._index(t1, "t1")
        if i > j:
            raise ValueError(f"t0={t0!r} is after t1={t1!r}; give the earlier time first")
        return i, j

    def _table(self, i: int, j: int, direction: Literal["forward", "backward"]) -> NDArray[np.float64]:
        steps = [step.conditional(direction) for step in self.transports[i:j]]
        if not steps:
            if direction not in {"forward", "backward"}:
                raise ValueError(f"direction is {direction!r}; it must be 'forward' or 'backward'")
            return np.eye(self.mixtures[i].K)
        product: NDArray[np.float64] = reduce(np.matmul, steps if direction == "forward" else steps[::-1])
        return product

    def _masses(self, mass: ArrayLike, i: int) -> NDArray[np.float64]:
        values = np.asarray(mass, dtype=np.float64)
        K = self.mixtures[i].K
        if values.ndim not in {1, 2} or values.shape[0] != K:
            raise ValueError(
                f"mass has shape {values.shape}; time {self.times[i]:g} has {K} components, "
                f"so it must be [{K}] or [{K}, c]"
            )
        if not np.isfinite(values).all():
            k = int(np.argwhere(~np.isfinite(values))[0, 0])
            raise ValueError(
                f"mass of component {self.mixtures[i].names[k]!r} of time {self.times[i]:g} is not finite; give 0 "
                "where there is none"
            )
        return values

    # ------------------------------------------------------------------------------------------------------ storage
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chain into the folder ``path``: ``chain.npz`` and ``meta.json``.

        Each file is written under a temporary name and renamed, so an interrupted run leaves the old one or the new
        one.

        Parameters
        ----------
        path
            Folder; it is made if its parent exists.
        """
        content = {
            "format": _FORMAT,
            "times": np.array(self.times),
            "mixtures": {str(i): mixture.to_dict() for i, mixture in enumerate(self.mixtures)},
            "transports": {str(i): self._stored_step(i) for i in range(len(self.transports))},
        }
        archive.save(path, "chain", content)

    def _stored_step(self, i: int) -> dict[str, Any]:
        """A transport, with its mixtures only where they are not those of the chain (other weights, for example)."""
        step = self.transports[i]
        stored = step.to_dict()
        if step.source is not self.mixtures[i]:
            stored["source"] = step.source.to_dict()
        if step.target is not self.mixtures[i + 1]:
            stored["target"] = step.target.to_dict()
        return stored

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; nothing is unpickled.

        Raises
        ------
        FileNotFoundError
            If the folder or its files do not exist.
        ValueError
            If a file is truncated or damaged, or written in an unknown format version.
        """
        stored = archive.load(path, "chain", _FORMAT)
        with archive.rebuilding(f"the chain in {path}"):
            times = [float(t) for t in stored["times"]]
            mixtures = [Mixture.from_dict(stored["mixtures"][str(i)]) for i in range(len(times))]
            steps = []
            for i, (P, Q) in enumerate(pairwise(mixtures)):
                step = stored["transports"][str(i)]
                source = Mixture.from_dict(step["source"]) if "source" in step else P
                target = Mixture.from_dict(step["target"]) if "target" in step else Q
                steps.append(Transport.from_dict(step, source=source, target=target))
        return cls(mixtures, times, steps)


def _checked_times(times: Sequence[float]) -> tuple[float, ...]:
    values = np.asarray(times)
    if values.ndim != 1 or values.size < 2 or values.dtype.kind not in "iuf":
        raise ValueError(f"times is {times!r}; a chain needs at least two increasing numbers")
    if not np.isfinite(values).all() and not np.isnan(values).any():
        raise ValueError(f"times is {times!r}; every time must be finite")
    steps = np.diff(values.astype(np.float64))
    if not np.all(steps > 0.0):
        i = int(np.flatnonzero(~(steps > 0.0))[0])
        raise ValueError(f"times must increase, but {values[i]:g} is followed by {values[i + 1]:g}")
    return tuple(float(t) for t in values)
