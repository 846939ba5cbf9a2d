"""The mixture: weights and components; everything that can be asked of a fitted one.

Letters: ``N`` samples, ``d`` features, ``K`` components.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike

from omt import archive
from omt.chunks import Source, as_source, require_finite
from omt.families import GaussianComponents
from omt.families.base import Components, FloatArray
from omt.families.build import components_from, components_of
from omt.families.product import ProductComponents, refuse_wide
from omt.features import checked_feature_names, column_names, require_same
from omt.report import FitReport, MixtureUsage, report_of
from omt.scalars import generator
from shared_core import RoutingTrace, load_stats, soft_assign

_FORMAT = 1
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Mixture:
    """A finite mixture ``Σ_k a_k p_k`` of distributions of one family.

    Parameters
    ----------
    weights
        ``a``, ``[K]``: positive, summing to 1.
    components
        The K distributions, stacked (e.g. :class:`omt.families.GaussianComponents`).
    names
        Name of each component; ``"0", "1", …`` if not given.
    report
        What the fit did, if the mixture was fitted.
    feature_names
        Name of each feature, ``[d]``, e.g. genes. Mixtures whose features have different names are never compared.

    Raises
    ------
    ValueError
        If a weight is not positive or weights do not sum to 1, numbers of weights, components and names differ, or a
        name occurs twice.

    Examples
    --------
    >>> import numpy as np
    >>> m = Mixture.from_gaussians([0.25, 0.75], [[0.0], [4.0]], [[[1.0]], [[1.0]]], names=["A", "B"])
    >>> m
    Mixture(family='gaussian', K=2, d=1, names=(A, B))
    >>> m.components.means.tolist()
    [[0.0], [4.0]]
    >>> float(m.mean()[0])
    3.0
    >>> m.responsibilities(np.array([[0.0], [4.0]])).round(2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    weights: FloatArray
    components: Components
    names: tuple[str, ...] = field(default=(), kw_only=True)
    report: FitReport | None = field(default=None, kw_only=True, repr=False)
    feature_names: tuple[str, ...] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)
        K = self.components.K
        if weights.shape != (K,):
            raise ValueError(f"weights has shape {weights.shape}; there are {K} components, so it must be [{K}]")
        names = tuple(str(k) for k in range(K)) if not self.names else tuple(str(name) for name in self.names)
        if len(names) != K:
            raise ValueError(f"names has {len(names)} entries; there are {K} components")
        if len(set(names)) != K:
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(f"names has {twice!r} twice; every component needs its own name")
        bad = ~(np.isfinite(weights) & (weights > 0))
        if bad.any():
            k = int(bad.argmax())
            raise ValueError(
                f"weights[{k}] (component {names[k]!r}) is {weights[k]:g}; every weight must be > 0, so leave out "
                "empty components"
            )
        total = weights.sum()
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"weights sum to {total:.9g}; they must sum to 1 (divide them by their sum)")
        # Weights that sum to one but for rounding stay as they are, so that a stored mixture comes back bit by bit.
        if abs(total - 1.0) > K * np.finfo(float).eps:
            weights /= total
        weights.setflags(write=False)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "feature_names", checked_feature_names(self.feature_names, self.components.d))

    def __repr__(self) -> str:
        shown = ", ".join(self.names[:8]) + (", …" if self.K > 8 else "")
        return f"Mixture(family={self.family!r}, K={self.K}, d={self.d}, names=({shown}))"

    # ----------------------------------------------------------------------------------------------- construction
    @classmethod
    def from_gaussians(
        cls, weights: ArrayLike, means: ArrayLike, covariances: ArrayLike, *, names: Iterable[str] | None = None
    ) -> Self:
        """Mixture of Gaussians with full covariances.

        Parameters
        ----------
        weights, means, covariances
            ``[K]``, ``[K, d]`` and ``[K, d, d]``.
        names
            Name of each component.
        """
        components = GaussianComponents(
            np.asarray(means, dtype=float), "full", covariances=np.asarray(covariances, dtype=float)
        )
        return cls._named(np.asarray(weights, dtype=float), components, names)

    @classmethod
    def from_params(
        cls,
        family: str,
        weights: ArrayLike,
        *,
        names: Iterable[str] | None = None,
        feature_names: Iterable[str] | None = None,
        **arrays: Any,
    ) -> Self:
        """Mixture of any family from its parameters.

        Parameters
        ----------
        family
            ``"poisson"`` (``rates``, optional ``reference``), ``"negative_binomial"`` (``means``, ``dispersion``,
            optional ``reference``), ``"multinomial"`` (``probs``, ``total``), ``"bernoulli"`` (``probs``), ``"gamma"``
            (``shapes``, ``rates``), ``"exponential"`` (``rates``), ``"gaussian"`` or ``"lognormal"`` (``means`` and
            ``covariances``, ``variances``, or ``factors`` and ``noise``; of the logarithms for ``"lognormal"``).
        weights
            ``[K]``.
        names, feature_names
            Name of each component and feature.
        **arrays
            The parameters; ``[K, d]`` where the family's class does not say otherwise.

        Raises
        ------
        ValueError
            If the family is unknown or its parameters are malformed.
        TypeError
            If a parameter is missing or unknown; the message lists what the family takes.

        Examples
        --------
        >>> rates = [[1.0, 9.0], [9.0, 1.0]]
        >>> m = Mixture.from_params("poisson", [0.5, 0.5], rates=rates, feature_names=["CD3", "CD19"])
        >>> m.responsibilities([[0, 8]]).round(3).tolist()
        [[1.0, 0.0]]
        """
        components = components_from(family, arrays)
        features = checked_feature_names(feature_names, components.d)
        return cls(
            np.asarray(weights, dtype=float),
            components,
            names=() if names is None else tuple(names),
            feature_names=features,
        )

    @classmethod
    def from_sklearn(cls, model: Any, *, names: Iterable[str] | None = None) -> Self:
        """Mixture with the parameters of a fitted :class:`sklearn.mixture.GaussianMixture` of any covariance type.

        Raises
        ------
        TypeError
            If the model is not a Gaussian mixture, or not fitted.
        """
        if not all(hasattr(model, a) for a in ("weights_", "means_", "covariances_", "covariance_type")):
            raise TypeError(
                f"{type(model).__name__} is not a fitted sklearn.mixture.GaussianMixture; call its fit first"
            )
        kind = model.covariance_type
        key = "variances" if kind in {"diag", "spherical"} else "covariances"
        components = GaussianComponents(model.means_, kind, **{key: model.covariances_})
        return cls._named(model.weights_, components, names)

    def to_sklearn(self) -> Any:
        """Give a :class:`sklearn.mixture.GaussianMixture` with these parameters, ready to predict; names are lost.

        Low-rank covariances become full ones, which scikit-learn knows.

        Raises
        ------
        TypeError
            If the components are not Gaussian.
        """
        from sklearn.mixture import GaussianMixture  # heavy, and only needed here

        if not isinstance(self.components, GaussianComponents):
            raise TypeError(f"scikit-learn has no mixture of {self.family} components")
        g = self.components
        kind = "full" if g.covariance_type == "lowrank" else g.covariance_type
        model = GaussianMixture(self.K, covariance_type=kind)
        model.weights_, model.means_ = self.weights.copy(), g.means.copy()
        if g.variances is not None:
            model.covariances_ = g.variances.copy()
            model.precisions_ = 1.0 / model.covariances_
            model.precisions_cholesky_ = np.sqrt(model.precisions_)
        else:
            model.covariances_ = g.covariances.copy() if g.covariances is not None else g.covariance_matrices()
            upper = g._whitening.swapaxes(1, 2)
            model.precisions_cholesky_ = upper[0].copy() if kind == "tied" else upper.copy()
            model.precisions_ = model.precisions_cholesky_ @ model.precisions_cholesky_.swapaxes(-1, -2)
        model.n_features_in_ = self.d
        model.converged_, model.n_iter_ = True, 0
        model.lower_bound_ = self.report.log_likelihood if self.report is not None else float("nan")
        return model

    @classmethod
    def _named(cls, weights: FloatArray, components: Components, names: Iterable[str] | None) -> Self:
        if names is None:
            return cls(weights, components)
        return cls(weights, components, names=tuple(names))

    # --------------------------------------------------------------------------------------------------- basics
    @property
    def K(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of components."""
        return self.components.K

    @property
    def d(self) -> int:
        """Number of features."""
        return self.components.d

    @property
    def family(self) -> str:
        """Name of the components' family."""
        return self.components.family

    @cached_property
    def _log_weights(self) -> FloatArray:
        return np.log(self.weights)

    def mean(self) -> FloatArray:
        """Mean of the mixture, ``[d]``."""
        centre: FloatArray = self.weights @ self.components.mean()
        return centre

    def cov(self) -> FloatArray:
        """Covariance of the mixture, ``[d, d]``: within the components plus between their means.

        Raises
        ------
        ValueError
            If it would have more than 10⁸ entries.
        """
        refuse_wide(1, self.d)
        offset = self.components.mean() - self.mean()
        within: FloatArray
        if isinstance(self.components, ProductComponents) and self.family != "multinomial":
            within = np.diag(self.weights @ self.components.variances())
        else:
            within = np.einsum("k,kij->ij", self.weights, self.components.cov())
        return within + (offset.T * self.weights) @ offset

    # ------------------------------------------------------------------------------------------------- densities
    def log_prob(self, X: Any) -> FloatArray:
        """Log-density of each sample, ``[N]``.

        Parameters
        ----------
        X
            ``[N, d]``, any kind that :func:`omt.fit_mixture` reads.
        """
        source = self._source(X)
        result = np.empty(source.n_samples)
        for start, scores in self._scores(source):
            _, result[start : start + scores.shape[0]] = soft_assign(scores, logit_bias=self._log_weights, out=scores)
        return result

    def responsibilities(self, X: Any, top_k: int | None = None) -> FloatArray | RoutingTrace:
        """Probability of each component given each sample.

        Parameters
        ----------
        X
            ``[N, d]``, any kind that :func:`omt.fit_mixture` reads.
        top_k
            Keep only the largest ``top_k`` of each sample.

        Returns
        -------
        ndarray ``[N, K]``, or :class:`shared_core.RoutingTrace` with ``[N, top_k]`` indices and weights
            Rows of the dense form sum to 1.
        """
        source = self._source(X)
        if top_k is None:
            dense = np.empty((source.n_samples, self.K))
            for start, scores in self._scores(source):
                self._assigned(start, scores, out=dense[start : start + scores.shape[0]])
            return dense
        parts = [self._assigned(start, scores, top_k=top_k)[0] for start, scores in self._scores(source)]
        indices = np.concatenate([part.indices for part in parts])
        return RoutingTrace(indices, np.concatenate([part.weights for part in parts]), self.K)

    def _source(self, X: Any) -> Source:
        columns = column_names(X)
        if columns is not None and self.feature_names is not None:
            require_same(columns, self.feature_names, "X", "the mixture")
        source = as_source(X)
        if source.n_features != self.d:
            raise ValueError(f"X has {source.n_features} features; this mixture has d = {self.d}")
        return source

    def _scores(self, source: Source) -> Iterator[tuple[int, FloatArray]]:
        """Log-densities ``[n, K]`` of each chunk under each component; one buffer serves all chunks."""
        buffer = np.empty((min(_CHUNK, source.n_samples), self.K))
        for start, block in source.chunks(_CHUNK):
            require_finite(block, start)
            if not isinstance(self.components, GaussianComponents):
                cast("ProductComponents", self.components).check(block, start)
            out = buffer[: block.shape[0]]
            yield start, cast("FloatArray", self.components.log_prob(block, out=out))

    def _assigned(self, start: int, scores: FloatArray, **options: Any) -> tuple[Any, FloatArray]:
        """Responsibilities and log-densities of a chunk; so far out that every density underflows there are none."""
        assigned, evidence = soft_assign(scores, logit_bias=self._log_weights, **options)
        lost = np.isneginf(evidence)
        if lost.any():
            raise ValueError(
                f"row {start + int(lost.argmax())} of X is so far from every component that it has no density in "
                "float64; remove such samples, or give X in the units that the mixture was fitted in"
            )
        return assigned, evidence

    def sample(self, n: int, rng: np.random.Generator | int | None = None, *, return_labels: bool = False) -> Any:
        """Draw samples.

        Parameters
        ----------
        n
            How many.
        rng
            Generator, or seed of one.
        return_labels
            Also give the component each sample came from.

        Returns
        -------
        ndarray ``[n, d]``, or a pair of it and the labels ``[n]``
        """
        random = generator(rng)
        labels = random.choice(self.K, size=n, p=self.weights)
        drawn = self.components.sample(labels, random)
        return (drawn, labels) if return_labels else drawn

    # -------------------------------------------------------------------------------------------------- criteria
    def bic(self, X: Any) -> float:
        """Bayesian information criterion of the mixture on ``X``: lower is better."""
        return self._criteria(X)[0]

    def icl(self, X: Any) -> float:
        """Integrated completed likelihood, BIC plus twice the entropy of the assignments: lower is better.

        References
        ----------
        Biernacki, Celeux & Govaert (2000), Assessing a mixture model for clustering with the integrated completed
        likelihood.
        """
        return self._criteria(X)[1]

    def _criteria(self, X: Any) -> tuple[float, float]:
        source = self._source(X)
        log_likelihood = entropy = 0.0
        for start, scores in self._scores(source):
            R, evidence = self._assigned(start, scores, out=scores)
            log_likelihood += float(evidence.sum())
            entropy -= float(np.sum(R * np.log(R, where=R > 0, out=np.zeros_like(R))))
        n_parameters = self.components.n_parameters + self.K - 1
        bic = n_parameters * float(np.log(source.n_samples)) - 2.0 * log_likelihood
        return bic, bic + 2.0 * entropy

    def usage(self, X: Any) -> MixtureUsage:
        """How much of the mixture ``X`` uses: shares, their entropy, effective number of components, dead ones."""
        source = self._source(X)
        counts = np.zeros(self.K)
        for start, scores in self._scores(source):
            counts += self._assigned(start, scores, out=scores)[0].sum(axis=0)
        stats = load_stats(counts)
        entropy = float(stats.entropy) * float(np.log(self.K)) if self.K > 1 else 0.0
        return MixtureUsage(counts / counts.sum(), entropy, float(np.exp(entropy)), np.flatnonzero(counts < 1.0))

    # ---------------------------------------------------------------------------------------------------- storage
    def to_dict(self) -> dict[str, Any]:
        """Arrays, strings and numbers that determine the mixture, in a nested dict that h5ad can hold."""
        parameters = self.components.parameters()
        out: dict[str, Any] = {
            "format": _FORMAT,
            "family": self.family,
            "weights": self.weights,
            "names": np.array(self.names, dtype=str),
            "parameters": parameters,
        }
        if self.report is not None:
            out["report"] = self.report.to_dict()
        if self.feature_names is not None:
            out["feature_names"] = np.array(self.feature_names, dtype=str)
        return out

    @classmethod
    @archive.rebuilding("this stored mixture")
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_dict` gave, also after a round trip through h5ad or JSON.

        Raises
        ------
        ValueError
            If the format version or the family is unknown, or an entry is missing or malformed.
        """
        version = stored.get("format")
        if str(version) != str(_FORMAT):
            raise ValueError(f"this mixture is stored in format {version}; this version of omt reads format {_FORMAT}")
        missing = [key for key in ("family", "weights", "names", "parameters") if key not in stored]
        if missing:
            raise ValueError(f"this stored mixture has no {missing[0]}")
        components = components_of(str(stored["family"]), stored["parameters"])
        names = tuple(str(name) for name in np.asarray(stored["names"]).tolist())
        features = stored.get("feature_names")
        if len(names) != components.K:
            raise ValueError(f"this stored mixture has {len(names)} names and {components.K} components")
        return cls(
            np.asarray(stored["weights"], dtype=np.float64),
            components,
            names=names,
            report=report_of(stored.get("report")),
            feature_names=None if features is None else tuple(str(name) for name in np.asarray(features).tolist()),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the mixture into the folder ``path``: ``mixture.npz`` and ``meta.json``.

        Each file is written under a temporary name and renamed, so an interrupted run leaves the old mixture or the
        new one.

        Parameters
        ----------
        path
            Folder; it is made if its parent exists.
        """
        archive.save(path, "mixture", self.to_dict())

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
        return cls.from_dict(archive.load(path, "mixture", _FORMAT))


def check_features(P: Mixture, Q: Mixture) -> None:
    """Raise ``ValueError`` naming the first feature in which a source and a target mixture differ.

    Mixtures whose features have no names are compared by their number only.

    Examples
    --------
    >>> P = Mixture.from_params("poisson", [1.0], rates=[[1.0, 2.0]], feature_names=["A", "B"])
    >>> Q = Mixture.from_params("poisson", [1.0], rates=[[1.0, 2.0]], feature_names=["A", "C"])
    >>> check_features(P, Q)
    Traceback (most recent call last):
        ...
    ValueError: feature 1 is 'B' in the source and 'C' in the target; fit both on the same features in the same order
    """
    if P.d != Q.d:
        raise ValueError(f"source has d={P.d} features and target d={Q.d}; fit both on the same features")
    if P.feature_names is not None and Q.feature_names is not None:
        require_same(P.feature_names, Q.feature_names, "the source", "the target")
