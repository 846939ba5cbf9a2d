"""What a fit did, and how much of a mixture a data set uses: numbers to read, not to compute with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omt.families.base import FloatArray


@dataclass(frozen=True)
class ComponentCurve:
    """A criterion over numbers of components: lower is better.

    Attributes
    ----------
    criterion
        ``"bic"`` or ``"icl"``.
    n_components
        Numbers that were tried, rising.
    scores
        The criterion of each, in nats.

    Examples
    --------
    >>> ComponentCurve("bic", (1, 2, 3), (90.0, 70.5, 74.0)).best
    2
    """

    criterion: str
    n_components: tuple[int, ...]
    scores: tuple[float, ...]

    @property
    def best(self) -> int:
        """The number of components with the lowest criterion, the smaller one of equals."""
        return self.n_components[int(np.argmin(self.scores))]

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain values that JSON and h5ad can hold."""
        return {
            "criterion": self.criterion,
            "n_components": list(self.n_components),
            "scores": list(self.scores),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_dict` gave."""
        numbers, scores = (np.atleast_1d(raw[key]).tolist() for key in ("n_components", "scores"))
        return cls(str(raw["criterion"]), tuple(int(k) for k in numbers), tuple(float(v) for v in scores))


@dataclass(frozen=True, eq=False)
class FitReport:
    """What a fit did: kept with the mixture, saved with it, never needed to use it.

    Attributes
    ----------
    method
        ``"labels"``, ``"responsibilities"``, ``"batch"`` or ``"stepwise"``: what made the components. ``"labels"`` and
        ``"responsibilities"`` mean that components are what the user named, not what was found in the data.
    n_samples
        Samples used.
    n_iter
        Passes of batch EM, or epochs of stepwise EM.
    converged
        Whether the objective rose by less than ``tol`` in the last pass (always true for full labels).
    log_likelihood
        Log-likelihood of the data per sample under the mixture, in nats.
    history
        Objective (log-likelihood plus log-prior) per sample before each update of batch EM; log-likelihood per
        sample of each epoch of stepwise EM.
    shrinkage
        Pseudo-samples ν by which each covariance is pulled to the pooled one.
    floor
        Smallest variance allowed in any direction, in squared units of the data.
    reseeded, removed
        How often an empty component was placed anew, and how many were given up.
    curve
        The criterion over numbers of components, if their number was chosen by one.
    """

    method: str
    n_samples: int
    n_iter: int
    converged: bool
    log_likelihood: float
    history: tuple[float, ...]
    shrinkage: float
    floor: float
    reseeded: int = 0
    removed: int = 0
    curve: ComponentCurve | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values that JSON and h5ad can hold."""
        plain = {**self.__dict__, "history": list(self.history)}
        del plain["curve"]
        return plain if self.curve is None else {**plain, "curve": self.curve.to_dict()}


@dataclass(frozen=True, eq=False)
class MixtureUsage:
    """How much of the mixture a data set uses.

    Attributes
    ----------
    weights
        Share of the data that each component takes, ``[K]``.
    entropy
        Entropy of these shares in nats.
    effective_number
        ``exp(entropy)``: the number of equally used components that would have this entropy.
    dead
        Indices of components that take less than one sample.
    """

    weights: FloatArray
    entropy: float
    effective_number: float
    dead: NDArray[np.int64]


def report_of(raw: Any) -> FitReport | None:
    """Report of a stored mixture; a report that cannot be read costs only itself."""
    if not isinstance(raw, Mapping) or set(raw) | {"curve"} != set(FitReport.__dataclass_fields__):
        return None
    kinds = {"method": str, "n_samples": int, "n_iter": int, "converged": bool, "reseeded": int, "removed": int}
    values = {key: kinds.get(key, float)(value) for key, value in raw.items() if key not in ("history", "curve")}
    curve = ComponentCurve.from_dict(raw["curve"]) if "curve" in raw else None
    return FitReport(history=tuple(float(v) for v in np.atleast_1d(raw["history"])), curve=curve, **values)
