"""Mixtures of the groups of one data set and the plans between them: what the AnnData verbs and the command line work
on.

Letters: `N` samples, `D` features, `K`, `L` components of two groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from omt.scalars import checked_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from numpy.typing import NDArray

    from omt.chain import TransportChain
    from omt.mixture import Mixture
    from omt.transport import Transport

    Array = NDArray[np.float64]

__all__ = ["Group", "GroupedMixtures", "group_label"]

Group: TypeAlias = float | str
# Largest dense array of images that is written into an AnnData: 0.8 GB.
_MOST_WRITTEN = 10**8


def group_label(value: object) -> str:
    """Write a group's value as a user would: `240` for 240.0, names as they are."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, eq=False)
class GroupedMixtures:
    """One mixture a group, and after `transport` the plans of consecutive groups of a chain.

    Attributes
    ----------
    groupby
        Column of `obs` that the groups are values of.
    groups
        Numbers (times) or names, in their order.
    mixtures
        One for each group.
    use_rep
        Key of `obsm` they were fitted on, `"X"` for the expression matrix or the layer that `settings["layer"]` names;
        its genes are the mixtures' `feature_names`.
    labels
        Column of `obs` whose values are the components, if any.
    settings
        How the fit was made: strings and numbers.
    order
        Positions of the groups of the chain, first to last; empty before `transport`.
    transports
        Plan of each two neighbours in `order`.
    prepare
        How raw counts become `use_rep` (`omt.prepare`), if omt did it; empty otherwise.
    """

    groupby: str
    groups: tuple[Group, ...]
    mixtures: tuple[Mixture, ...]
    use_rep: str
    labels: str | None = None
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    transports: tuple[Transport, ...] = ()
    prepare: Mapping[str, object] = field(default_factory=dict)

    def names(self, position: int) -> tuple[str, ...]:
        """Names of the components of a group."""
        return self.mixtures[position].names

    def position(self, value: object, argument: str, *, chain: bool = True) -> int:
        """Position of a group of the chain, or with `chain=False` of any group; `argument` is the name by which the
        caller gave it.
        """
        known = sorted(self.order) if chain else range(len(self.groups))
        for i in known:
            if _same_group(self.groups[i], value):
                return i
        where = "the chain" if chain else "the fitted groups"
        listed = ", ".join(group_label(self.groups[i]) for i in known)
        raise ValueError(f"{argument}={value!r} is not in {where}; {self.groupby} there is one of: {listed}")

    def group(self, value: object) -> Group:
        """The group that a caller's value means."""
        return self.groups[self.position(value, "group", chain=False)]

    def steps(self) -> list[tuple[int, int]]:
        """Pairs of neighbours in the chain, as positions."""
        return list(zip(self.order[:-1], self.order[1:], strict=True))

    def path(self, source: int, target: int) -> list[int]:
        """Positions of the chain from one to the other, both included."""
        i, j = self.order.index(source), self.order.index(target)
        if i >= j:
            a, b = (group_label(self.groups[p]) for p in (source, target))
            raise ValueError(
                f"source={a} must come before target={b} in the chain: "
                f"{' → '.join(group_label(self.groups[p]) for p in self.order)}"
            )
        return list(self.order[i : j + 1])

    @cached_property
    def chain(self) -> TransportChain:
        """The plans as a chain whose times are 0, 1, 2, …: places in `order`."""
        from omt.chain import TransportChain

        return TransportChain(
            [self.mixtures[i] for i in self.order], list(range(len(self.order))), list(self.transports)
        )

    def table(self, source: int, target: int, *, direction: str = "forward") -> Array:
        """Row-stochastic table between two groups of the chain.

        Parameters
        ----------
        source, target
            Positions, in the order of the chain.
        direction
            `"forward"` gives `[K, L]`, a row for each source component; `"backward"` gives `[L, K]`, a row for each
            target component.
        """
        path = self.path(source, target)
        way = cast("Literal['forward', 'backward']", direction)
        frame = self.chain.transition_matrix(self.order.index(path[0]), self.order.index(path[-1]), direction=way)
        return np.asarray(frame, dtype=np.float64)

    def frame(self, source: object, target: object, *, direction: str = "forward") -> pd.DataFrame:
        """The table between two groups, given by their values, with the names of their components."""
        import pandas as pd

        if direction not in {"forward", "backward"}:
            raise ValueError(f"direction is {direction!r}, must be 'forward' or 'backward'")
        i, j = self.position(source, "source"), self.position(target, "target")
        start, end = (i, j) if direction == "forward" else (j, i)
        values = self.table(i, j, direction=direction)
        return pd.DataFrame(values, index=list(self.names(start)), columns=list(self.names(end)))

    def joint(self, source: int, target: int) -> Array:
        """Mass `[K, L]` between the components of two groups of the chain."""
        path = self.path(source, target)
        return np.asarray(self.chain.joint(self.order.index(path[0]), self.order.index(path[-1])), dtype=np.float64)

    def map_cells(
        self,
        X: Any,
        source: int,
        target: int,
        *,
        kind: str,
        random_state: int = 0,
        n_written: int | None = None,
    ) -> Array:
        """Map samples `[N, D]` of one group to another; see `omt.tl.map_to`.

        Parameters
        ----------
        X
            What `omt.Transport.map` reads.
        source, target
            Positions of the groups, in the order of the chain.
        kind
            `"barycentric"`, `"sample"` or `"mode"`.
        random_state
            Seed of `"sample"`.
        n_written
            Cells of the array that the caller will write the images into. Refused where that is absurd.
        """
        from omt.pairs import maps

        if kind not in {"barycentric", "sample", "mode"}:
            raise ValueError(f"kind is {kind!r}, must be 'barycentric', 'sample' or 'mode'")
        D = self.mixtures[target].d
        if (n_written or 0) * D > _MOST_WRITTEN:
            raise ValueError(
                f"images of {n_written} cells with {D} features are {n_written * D:.2g} numbers, more than "  # type: ignore[operator]  # a number here
                f"{_MOST_WRITTEN:.0e}; fit on fewer genes, take a part of the cells, or map blocks of them by "
                "omt.Transport.map"
            )
        P, Q, W = self.mixtures[source], self.mixtures[target], self.joint(source, target)
        epsilon = float(self.transports[self.order.index(source)].epsilon)
        if kind == "sample":
            return maps.sample_map(X, P, Q, W, epsilon, np.random.default_rng(checked_seed(random_state)))
        return (maps.barycentric_map if kind == "barycentric" else maps.mode_map)(X, P, Q, W, epsilon)


def _same_group(group: Group, value: object) -> bool:
    if isinstance(group, float):
        try:
            return float(value) == group  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return False
    return group == str(value)
