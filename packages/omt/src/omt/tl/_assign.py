"""Responsibilities of cells under fitted mixtures, written where the other verbs read them.

Letters: `n` cells of a group, `K` its components.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omt.grouped import group_label
from omt.tl._cells import COMPONENT_KEY, RESPONSIBILITIES_KEY, group_cells, obs_column, soft_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures

__all__ = ["CHUNK", "assign", "cells", "is_missing"]

CHUNK = 8192  # cells read at once from a matrix on disk


def assign(adata: AnnData, model: GroupedMixtures, X: Any) -> None:
    """Write `obs["omt_component"]` and `obsm["X_omt_responsibilities"]` for the cells of all groups that the model
    knows.

    A known label or soft label is taken as it is; the other cells get their responsibilities by Bayes' rule.
    """
    import pandas as pd

    groups = group_cells(adata, model.groupby)
    names = list(dict.fromkeys(name for mixture in model.mixtures for name in mixture.names))
    labels = (
        None if model.labels is None or model.labels not in adata.obs else obs_column(adata, model.labels, "labels")
    )
    key = str(model.settings.get("responsibilities", ""))
    soft = soft_labels(adata, key) if key and key in adata.obsm else None
    R = np.zeros((adata.n_obs, max(mixture.K for mixture in model.mixtures)), dtype=np.float32)
    component = np.full(adata.n_obs, -1)
    for value, mixture in zip(model.groups, model.mixtures, strict=True):
        if value not in groups.values:
            continue
        rows = np.flatnonzero(groups.codes == groups.values.index(value))
        part = np.asarray(mixture.responsibilities(cells(X, rows)))
        if soft is not None:
            given = soft[list(mixture.names)].to_numpy(dtype=np.float64)[rows]
            known = np.isfinite(given).all(axis=1)
            part[known] = given[known]
        if labels is not None:
            position = {name: k for k, name in enumerate(mixture.names)}
            for i, label in enumerate(labels.iloc[rows].astype(object)):
                if is_missing(label):
                    continue
                if str(label) not in position:
                    raise ValueError(
                        f"adata.obs[{model.labels!r}] is {label!r} in cell {adata.obs_names[rows[i]]!r}, "
                        f"which {model.groupby} {group_label(value)} had not when its mixture "
                        f"was fitted; it had: {', '.join(position)}"
                    )
                part[i] = 0.0
                part[i, position[str(label)]] = 1.0
        R[rows, : mixture.K] = part / part.sum(axis=1, keepdims=True)
        component[rows] = np.array([names.index(name) for name in mixture.names])[part.argmax(axis=1)]
    adata.obs[COMPONENT_KEY] = pd.Categorical.from_codes(component, categories=pd.Index(names))
    adata.obsm[RESPONSIBILITIES_KEY] = R


def cells(X: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of a matrix: taken at once in memory, as a function that yields chunks where it is on disk."""
    if isinstance(X, np.ndarray) or hasattr(X, "tocsr"):
        return X[rows]
    return _reader(X, rows)


def _reader(X: Any, rows: NDArray[np.int64]) -> Callable[[], Iterator[Any]]:
    def chunks() -> Iterator[Any]:
        for start in range(0, len(rows), CHUNK):
            yield X[rows[start : start + CHUNK]]

    return chunks


def is_missing(value: object) -> bool:
    """Whether a label is None, NaN or NaT."""
    return value is None or value != value  # noqa: PLR0124 - NaN and NaT differ from themselves
