"""What is known beforehand about which component each sample belongs to: nothing, labels, or soft labels.

Letters: ``N`` samples, ``n`` rows of a block, ``K`` components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omt.families.base import FloatArray
from shared_core import soft_assign

Rows: TypeAlias = slice | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Supervision:
    """Constraints on responsibilities; the plain ``Supervision()`` constrains nothing.

    Attributes
    ----------
    codes, owner
        Label of each sample, ``[N]`` (−1: unknown), and label that each component belongs to, ``[K]``. A labelled
        sample is shared among its label's components only.
    soft
        Given responsibilities, ``[N, K]``; a row of NaN is unknown.
    """

    codes: NDArray[np.int64] | None = None
    owner: NDArray[np.int64] | None = None
    soft: FloatArray | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything is known."""
        return self.codes is not None or self.soft is not None

    @property
    def is_complete(self) -> bool:
        """Whether every responsibility is fixed, so that one M-step is the whole fit."""
        if self.codes is not None and self.owner is not None:
            return bool((self.codes >= 0).all()) and np.unique(self.owner).size == self.owner.size
        return self.soft is not None and not bool(np.isnan(self.soft[:, 0]).any())

    @property
    def K(self) -> int:  # noqa: N802  # the formulas' letter
        """Number of components that are named."""
        if self.owner is not None:
            return int(self.owner.size)
        return 0 if self.soft is None else int(self.soft.shape[1])

    def given(self, rows: Rows, K: int) -> FloatArray:
        """Responsibilities known without a model, ``[n, K]``: zero rows where nothing is known.

        Components that share a label share its samples evenly.
        """
        if self.codes is not None and self.owner is not None:
            match = self.codes[rows][:, None] == self.owner[None, :]
            shares: FloatArray = match / np.maximum(match.sum(axis=1, keepdims=True), 1)
            return shares
        assert self.soft is not None  # noqa: S101  # only called when something is given
        return np.nan_to_num(self.soft[rows], nan=0.0)

    def assign(self, scores: NDArray[Any], log_weights: FloatArray, rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
        """E-step of a block under these constraints.

        Parameters
        ----------
        scores
            Log-densities, ``[n, K]``; they become the responsibilities.
        log_weights
            ``[K]``.
        rows
            Which samples the block holds.

        Returns
        -------
        responsibilities
            ``[n, K]``.
        evidence
            ``[n]``: log-likelihood of each sample, among the components it may belong to. For given soft labels r it is
            their lower bound ``Σ_k r_k (log a_k p_k(x) − log r_k)``, so that EM raises the sum in every step.
        """
        if self.codes is not None and self.owner is not None:
            codes = self.codes[rows][:, None]
            scores[(codes >= 0) & (codes != self.owner[None, :])] = -np.inf
        if self.soft is None:
            return soft_assign(scores, logit_bias=log_weights, out=scores)
        given = self.soft[rows]
        known = ~np.isnan(given[:, 0])
        r = given[known]
        joint = scores[known] + log_weights
        R, evidence = soft_assign(scores, logit_bias=log_weights, out=scores)
        R[known] = r
        evidence[known] = np.sum(r * (joint - np.log(r, where=r > 0, out=np.zeros_like(r))), axis=1)
        return R, evidence

    def select(self, components: NDArray[Any]) -> Self:
        """The constraints after only ``components`` are left."""
        soft = self.soft
        if soft is not None:
            soft = soft[:, components]
            soft = soft / np.maximum(soft.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        return type(self)(self.codes, None if self.owner is None else self.owner[components], soft)

    def take(self, rows: Rows) -> Self:
        """The constraints of some samples."""
        codes = None if self.codes is None else self.codes[rows]
        return type(self)(codes, self.owner, None if self.soft is None else self.soft[rows])


def from_labels(labels: Any, n_samples: int, n_per_label: int | Sequence[int]) -> tuple[Supervision, tuple[str, ...]]:
    """Constraints and component names from one label a sample.

    Parameters
    ----------
    labels
        ``[N]``: strings, numbers or a pandas categorical, whose order is kept; missing values are unknown.
    n_samples
        ``N``.
    n_per_label
        Components a label, the same for all or one number for each; a label with fewer samples gets as many as it has.

    Returns
    -------
    supervision, names
        Names are the labels, or ``label/0``, ``label/1``, … for several components a label.

    Raises
    ------
    ValueError
        If labels are not a list, their number is not N, or all are missing.
    """
    import pandas as pd  # heavy, and only needed here

    if np.ndim(labels) != 1:
        raise ValueError(f"labels has {np.ndim(labels)} dimensions; it must be a list of one label a sample")
    if len(labels) != n_samples:
        raise ValueError(f"labels has {len(labels)} entries; X has {n_samples} samples")
    values = labels.to_numpy() if hasattr(labels, "to_numpy") and not _is_categorical(labels, pd) else labels
    categories = pd.Categorical(values).remove_unused_categories()
    codes = np.asarray(categories.codes, dtype=np.int64)
    if not (codes >= 0).any():
        raise ValueError("labels are all missing; at least one sample must have a label")
    counts = np.bincount(codes[codes >= 0], minlength=len(categories.categories))
    # Whole numbers become floats beside a missing value; their names should not.
    whole = categories.categories.dtype.kind == "f" and bool((categories.categories % 1 == 0).all())
    wanted = [n_per_label] * counts.size if isinstance(n_per_label, int) else list(n_per_label)
    single = all(parts == 1 for parts in wanted)
    owner, names = [], []
    for code, label in enumerate(categories.categories):
        parts = min(int(wanted[code]), int(counts[code]))
        owner += [code] * parts
        name = str(int(label) if whole else label)
        names += [name] if single else [f"{name}/{part}" for part in range(parts)]
    return Supervision(codes, np.array(owner, dtype=np.int64)), tuple(names)


def _is_categorical(labels: Any, pd: Any) -> bool:
    return isinstance(getattr(labels, "dtype", None), pd.CategoricalDtype)


def from_responsibilities(responsibilities: Any, n_samples: int) -> tuple[Supervision, tuple[str, ...] | None]:
    """Constraints and component names (from a table's columns) from soft labels, one row a sample.

    Raises
    ------
    ValueError
        If the shape does not fit, a row is negative or does not sum to 1, or a component has no sample at all.
    """
    names = tuple(str(c) for c in responsibilities.columns) if hasattr(responsibilities, "columns") else None
    soft = np.array(responsibilities, dtype=np.float64)
    if soft.ndim != 2 or soft.shape[0] != n_samples or soft.shape[1] == 0:
        raise ValueError(f"responsibilities has shape {soft.shape}; it must be [{n_samples}, components]")
    unknown = np.isnan(soft).any(axis=1)
    soft[unknown] = np.nan
    total = soft.sum(axis=1)
    bad = ~unknown & ~((np.abs(total - 1.0) <= 1e-3) & (soft >= 0).all(axis=1))
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"responsibilities[{row}] sums to {total[row]:.6g} with smallest entry {soft[row].min():.3g}; every row "
            "must be ≥ 0 and sum to 1, or be NaN where nothing is known"
        )
    soft /= total[:, None]
    empty = ~(np.nan_to_num(soft) > 0).any(axis=0)
    if empty.any():
        k = int(empty.argmax())
        raise ValueError(f"responsibilities has no sample for component {k}; leave out its column")
    return Supervision(soft=soft), names
