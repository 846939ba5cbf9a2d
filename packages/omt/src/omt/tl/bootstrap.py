"""Bayesian bootstrap of every transition of a chain."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from omt.archive import rebuilding
from omt.grouped import group_label
from omt.io import read_uns
from omt.scalars import checked_seed
from omt.tl._assign import cells, is_missing
from omt.tl._cells import cells_of, model_features, obs_column, responsibilities_of, soft_labels, start_copy
from omt.tl._growth import cell_rates, step_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anndata import AnnData
    from numpy.typing import NDArray

    from omt.grouped import GroupedMixtures
    from omt.stability.resample import Sample

__all__ = ["bootstrap", "pair_key", "stored_pair"]

_PARTS = ("mean", "sd", "lower", "upper")
_PATIENCE = 2.0  # seconds of work before progress is shown


def bootstrap(
    adata: AnnData,
    n_boot: int = 200,
    unit: str = "cell",
    *,
    level: float = 0.9,
    refit: bool = False,
    random_state: int = 0,
    progress: bool | None = None,
    copy: bool = False,
) -> AnnData | None:
    """How sure is each transition? Estimate components and plans again under random weights of cells or donors.

    Each replicate gives every unit a random weight (Dirichlet), estimates the components anew from weighted sufficient
    statistics, and solves all plans again. Fitting with `labels` makes the responsibilities certain; components that
    were found overlap, and for them `refit=True` is the honest choice.

    Parameters
    ----------
    adata
        After `omt.tl.transport`.
    n_boot
        Replicates.
    unit
        `"cell"`, or the column of `obs` with the units that would be drawn anew if the study were repeated: donors,
        embryos, mice. Cells of one donor are alike, so intervals over cells alone are too narrow for statements about
        other donors. Each group needs at least three units; one that occurs in several groups has one weight.
    level
        Of the intervals.
    refit
        Let EM run from the fitted mixtures in every replicate.
    random_state
        Seed.
    progress
        Progress bar on stderr.
    copy
        Return a copy instead of writing into `adata`.

    Returns
    -------
    AnnData or None
        Writes `uns["omt"]["bootstrap"]`: `level`, `n_boot`, `unit`, `refit`, and for each pair of groups of the chain
        `pairs["<source>-><target>"]` with `mean`, `sd`, `lower` and `upper` of `forward` `[K, L]`, `backward` `[L, K]`,
        `coupling` `[K, L]` and `lift` `[K, L]` (the transition over its value under independence), and
        `sign_stability`, the share of replicates on the plan's own side of independence. `omt.pl.transitions` with
        `show_ci=True` draws them.

    Raises
    ------
    KeyError
        No plans, or `unit` is not a column of `obs`.
    ValueError
        A group has fewer than three units, a cell has none, or a number is out of range.

    Examples
    --------
    >>> import omt
    >>> adata, _ = omt.datasets.branching_process(100, n_times=2)
    >>> omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state")
    >>> omt.tl.transport(adata, time_key="time")
    >>> omt.tl.bootstrap(adata, n_boot=50)
    >>> adata.uns["omt"]["bootstrap"]["pairs"]["0->1"]["forward"]["sd"].shape
    (3, 6)
    """
    from omt.stability.bootstrap import bootstrap_chain, unit_codes

    model, seed = read_uns(adata, need="transport"), checked_seed(random_state)
    rows = [cells_of(adata, model, i) for i in model.order]
    units: list[NDArray[np.int64] | None] = [None] * len(rows)
    if unit != "cell":
        column = obs_column(adata, unit, "unit").astype(object).to_numpy()
        names = [f"{model.groupby} {group_label(model.groups[i])} (unit={unit!r})" for i in model.order]
        units = list(unit_codes([column[r] for r in rows], names))
    samples = [
        _sample(adata, model, place, rows[place], units[place], refit=refit) for place in range(len(model.order))
    ]
    steps = len(model.transports) + refit * len(samples)
    with _bar(steps * n_boot, progress) as advance:
        found = bootstrap_chain(
            model.transports,
            samples,
            n_boot=n_boot,
            level=level,
            refit=refit,
            cost=str(model.settings.get("cost", "w2")),
            rng=np.random.default_rng(seed),
            done=advance,
        )
    pairs = {}
    for (i, j), one in found.items():
        stored = one.to_dict()
        for shared in ("level", "n_boot"):
            del stored[shared]
        pairs[pair_key(model, model.order[i], model.order[j])] = stored
    result = start_copy(adata, copy)
    result.uns["omt"]["bootstrap"] = {
        "level": float(level),
        "n_boot": int(n_boot),
        "unit": unit,
        "refit": int(refit),
        "random_state": seed,
        "pairs": pairs,
    }
    return result if copy else None


def pair_key(model: GroupedMixtures, source: int, target: int) -> str:
    """Key of a pair of groups, given by their positions; h5ad allows no slash in it."""
    return f"{group_label(model.groups[source])}->{group_label(model.groups[target])}".replace("/", "|")


def stored_pair(adata: AnnData, model: GroupedMixtures, source: int, target: int) -> dict[str, Any]:
    """What the bootstrap wrote about two groups, given by their positions; also after a round trip through a file.

    Raises
    ------
    KeyError
        There is no bootstrap.
    ValueError
        The target is not after the source.
    """
    stored = adata.uns["omt"].get("bootstrap")
    if stored is None:
        raise KeyError("adata.uns['omt'] has no 'bootstrap'; run omt.tl.bootstrap first")
    model.path(source, target)
    with rebuilding("adata.uns['omt']['bootstrap']"):
        pair: dict[str, Any] = dict(stored["pairs"][pair_key(model, source, target)])
        pair["verdict"] = np.asarray(pair["verdict"], dtype=np.int64)
        K, L = len(model.names(source)), len(model.names(target))
        shapes = {"forward": (K, L), "backward": (L, K), "coupling": (K, L), "lift": (K, L)}
        tables = [(f"{name}/{part}", pair[name][part], shapes[name]) for name in shapes for part in _PARTS]
        tables += [(name, pair[name], (K, L)) for name in ("sign_stability", "verdict")]
    for name, table, shape in tables:
        if np.shape(table) != shape:
            raise ValueError(
                f"{name} of adata.uns['omt']['bootstrap'] has shape {np.shape(table)}; the plan needs {shape}: "
                "run omt.tl.bootstrap again"
            )
    return pair


@contextmanager
def _bar(total: int, enabled: bool | None) -> Iterator[Callable[[], None]]:
    """Progress on stderr, once the work has taken two seconds; gives a function to call after each step."""
    from rich import progress
    from rich.console import Console

    begin = time.monotonic()
    shown = sys.stderr.isatty() if enabled is None else enabled
    bar = progress.Progress(*progress.Progress.get_default_columns(), console=Console(stderr=True))
    task = bar.add_task("bootstrap", total=total)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if shown and time.monotonic() - begin > _PATIENCE:
            bar.start()
            bar.update(task, completed=done)

    try:
        yield advance
    finally:
        if bar.live.is_started:  # stopping a bar that was never shown prints an empty line
            bar.stop()


def _sample(
    adata: AnnData,
    model: GroupedMixtures,
    place: int,
    rows: NDArray[np.int64],
    unit: NDArray[np.int64] | None,
    *,
    refit: bool,
) -> Sample:
    """Cells of one group of the chain, with what is known about them."""
    from omt.stability.resample import Sample

    position = model.order[place]
    X: Any = model_features(adata, model)
    if X.shape[1] != model.mixtures[position].d:
        raise ValueError(
            f"{model.use_rep!r} has {X.shape[1]} features here and had {model.mixtures[position].d} when the mixtures "
            "were fitted; run omt.tl.fit_mixtures again"
        )
    weight_key, growth_key = str(model.settings.get("sample_weight", "")), str(model.settings.get("growth_key", ""))
    growth = None
    if growth_key and place < len(model.transports) and not int(model.settings.get("growth_iters", 1)) > 1:
        growth = cell_rates(adata, growth_key, rows) ** step_length(model, position, model.order[place + 1])
    known = _known(adata, model, rows) if refit else None
    return Sample(
        cells(X, rows),
        responsibilities_of(adata, model, position, rows),
        unit=unit,
        weight=obs_column(adata, weight_key, "sample_weight").to_numpy(dtype=np.float64)[rows] if weight_key else None,
        growth=growth,
        known=known,
    )


def _known(adata: AnnData, model: GroupedMixtures, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which cells have a label or a soft label, so that their responsibilities are given."""
    soft = str(model.settings.get("responsibilities", ""))
    if soft:
        return np.asarray(np.isfinite(soft_labels(adata, soft).to_numpy(dtype=np.float64)[rows]).all(axis=1))
    if model.labels is None or model.labels not in adata.obs:
        return np.zeros(len(rows), dtype=bool)
    return np.array([not is_missing(value) for value in adata.obs[model.labels].astype(object).iloc[rows]])
