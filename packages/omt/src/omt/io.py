"""Where fitted mixtures and plans live: in `adata.uns["omt"]`, and as a folder on disk. Files appear whole or not at
all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omt.archive import rebuilding
from omt.grouped import GroupedMixtures, group_label

if TYPE_CHECKING:
    import os

    from anndata import AnnData

__all__ = [
    "FORMAT",
    "from_dict",
    "load_model",
    "read_h5ad",
    "read_uns",
    "save_model",
    "to_dict",
    "write_h5ad",
    "write_uns",
]

FORMAT = 1
"""Version of the layout below; readers refuse any other by its number."""


def to_dict(model: GroupedMixtures) -> dict[str, Any]:
    """Turn mixtures and plans into nested dicts of arrays, strings and numbers, which h5ad can hold.

    Layout: `format`; `groupby`, `groups`, `use_rep`, `labels`, `settings`, `prepare`; `mixtures` with the positions of
    the groups as keys; `order`
    and `transports` with the places in the chain as keys (both empty before `transport`).
    """
    return {
        "format": FORMAT,
        "groupby": model.groupby,
        "groups": np.array(model.groups, dtype=np.float64 if _numeric(model.groups) else str),
        "use_rep": model.use_rep,
        "labels": model.labels or "",
        "settings": dict(model.settings),
        "prepare": dict(model.prepare),
        "mixtures": {str(i): mixture.to_dict() for i, mixture in enumerate(model.mixtures)},
        "order": np.array(model.order, dtype=np.int64),
        "transports": {str(i): transport.to_dict() for i, transport in enumerate(model.transports)},
    }


@rebuilding("what is stored of omt here")
def from_dict(stored: Mapping[str, Any]) -> GroupedMixtures:
    """Rebuild what `to_dict` gave, also after a round trip through a file.

    Raises
    ------
    ValueError
        Another format version (the message has its number), or parts are missing.
    """
    from omt.mixture import Mixture
    from omt.transport import Transport

    version = stored.get("format")
    if str(version) != str(FORMAT):
        raise ValueError(
            f"omt results are stored in format {version}; this version of omt reads format {FORMAT}: "
            "update omt, or fit again"
        )
    missing = [key for key in ("groupby", "groups", "use_rep", "mixtures") if key not in stored]
    if missing:
        raise ValueError(f"the stored omt results have no {missing[0]!r}; run omt.tl.fit_mixtures again")
    raw = np.asarray(stored["groups"])
    groups = tuple(float(v) if raw.dtype.kind == "f" else str(v) for v in raw.tolist())
    if len(set(groups)) < len(groups) or not all(np.isfinite(v) for v in groups if isinstance(v, float)):
        raise ValueError(
            f"the stored omt results have the groups {', '.join(map(group_label, groups))}; each must occur once"
        )
    mixtures = tuple(Mixture.from_dict(stored["mixtures"][str(i)]) for i in range(len(groups)))
    order = tuple(int(i) for i in np.atleast_1d(np.asarray(stored.get("order", []), dtype=np.int64)))
    if len(set(order)) < len(order) or not all(0 <= i < len(groups) for i in order):
        raise ValueError(f"the stored omt results have the order {order} of {len(groups)} groups; each may occur once")
    plans = stored.get("transports", {})
    transports = tuple(
        Transport.from_dict(plans[str(n)], source=mixtures[i], target=mixtures[j])
        for n, (i, j) in enumerate(itertools.pairwise(order))
    )
    return GroupedMixtures(
        groupby=str(stored["groupby"]),
        groups=groups,
        mixtures=mixtures,
        use_rep=str(stored["use_rep"]),
        labels=str(stored.get("labels", "")) or None,
        settings={
            key: value.item() if hasattr(value, "item") else value for key, value in stored.get("settings", {}).items()
        },
        order=order,
        transports=transports,
        prepare=dict(stored.get("prepare", {})),
    )


def write_uns(adata: AnnData, model: GroupedMixtures) -> None:
    """Write into `adata.uns["omt"]`; tables computed from earlier plans are dropped with them."""
    adata.uns["omt"] = to_dict(model)


def read_uns(adata: AnnData, *, need: str = "mixtures") -> GroupedMixtures:
    """Read `adata.uns["omt"]`.

    Parameters
    ----------
    adata
        Annotated data.
    need
        `"mixtures"` or `"transport"`: what must be there.

    Raises
    ------
    KeyError
        It is not there; the message says which verb to run first.
    ValueError
        Another format version.
    """
    stored = adata.uns.get("omt")
    if not isinstance(stored, Mapping):
        raise KeyError("adata.uns has no 'omt'; run omt.tl.fit_mixtures first")
    model = from_dict(stored)
    if need == "transport" and not model.transports:
        raise KeyError("adata.uns['omt'] has mixtures but no plans; run omt.tl.transport first")
    return model


def save_model(model: GroupedMixtures, path: str | os.PathLike[str]) -> None:
    """Write mixtures and plans into a folder: `model.npz` (arrays) and `meta.json`, each under a temporary name
    first.
    """
    from omt import archive

    archive.save(path, "model", to_dict(model))


def load_model(path: str | os.PathLike[str], *, need: str = "mixtures") -> GroupedMixtures:
    """Read what `save_model` wrote; nothing is unpickled.

    Raises
    ------
    FileNotFoundError
        No such folder, or it holds no model.
    ValueError
        A damaged file, another format version, or plans are needed and there are none.
    """
    from omt import archive

    model = from_dict(archive.load(path, "model", FORMAT))
    if need == "transport" and not model.transports:
        raise ValueError(f"{path} holds mixtures but no plans; run: omt transport {path} -o chain/")
    return model


def read_h5ad(path: str | os.PathLike[str], *, backed: bool = False) -> AnnData:
    """Read an h5ad file, or say in one sentence why that is impossible.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is empty or not an h5ad file, or holds no cells.
    """
    import anndata

    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; give the name of an h5ad file")
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty; it should be an h5ad file")
    try:
        adata = anndata.read_h5ad(file, backed="r" if backed else None)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{file} cannot be read as an h5ad file ({str(error).splitlines()[0]}); "
            "it may be truncated or of another kind"
        ) from error
    if adata.n_obs == 0:
        raise ValueError(f"{file} holds no cells")
    return adata


def write_h5ad(adata: AnnData, path: str | os.PathLike[str]) -> None:
    """Write an h5ad file under a temporary name beside `path` and rename it: an interrupted run leaves the old file
    or the new one.
    """
    from shared_core.files import atomic_write

    with atomic_write(path) as temporary:
        adata.write_h5ad(temporary)


def _numeric(groups: tuple[float | str, ...]) -> bool:
    return all(isinstance(value, float) for value in groups)
