"""What every picture verb promises: axes come back, colours are the user's, and matplotlib is left as it was."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

import omt

plt.switch_backend("agg")

LABELS = ["Neuroblast_ASG_AWA", "ASG_AWA", "ADL_parent"]
COLORS = ["#102030", "#a0b0c0", "#d07010"]
VERBS = {
    "flow": lambda adata, **more: omt.pl.flow(adata, basis="plane", **more),
    "interpolation": lambda adata, **more: omt.pl.interpolation(adata, 0, 1, **more),
    "mixture": lambda adata, **more: omt.pl.mixture(adata, 0, basis="plane", **more),
    "sankey": omt.pl.sankey,
    "solver": omt.pl.solver,
    "stability": lambda adata, **more: omt.pl.stability(adata, 0, 1, **more),
    "transitions": lambda adata, **more: omt.pl.transitions(adata, 0, 1, show_ci=True, **more),
}
ONE_AXES = [name for name in VERBS if name != "interpolation"]
WITH_GROUPS = ["flow", "interpolation", "mixture", "sankey"]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def adata():
    import pandas as pd
    from anndata import AnnData

    rng = np.random.default_rng(0)
    kind = np.arange(360) % 3
    X = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])[kind] + rng.normal(size=(360, 2))
    obs = pd.DataFrame(
        {"time": np.repeat([0.0, 1.0], 180), "type": pd.Categorical.from_codes(kind, LABELS)},
        index=[str(i) for i in range(360)],
    )
    made = AnnData(obs=obs, obsm={"X_plane": X})
    made.uns["type_colors"] = COLORS
    omt.tl.fit_mixtures(made, "time", labels="type", use_rep="X_plane", progress=False)
    omt.tl.transport(made, time_key="time", reg=0.1)
    omt.tl.bootstrap(made, 5, progress=False)
    return made


def test_every_verb_is_checked_here():
    assert set(omt.pl.__all__) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_picture_changes_no_setting_of_matplotlib(adata, verb):
    before = dict(plt.rcParams)
    VERBS[verb](adata)
    assert dict(plt.rcParams) == before


@pytest.mark.parametrize("verb", ONE_AXES)
def test_a_picture_on_given_axes_makes_no_figure_and_keeps_the_size(adata, verb):
    figure, (ax, other) = plt.subplots(1, 2, figsize=(12, 5))
    figures, size = plt.get_fignums(), figure.get_size_inches().tolist()
    assert VERBS[verb](adata, ax=ax, show=False) is ax
    assert plt.get_fignums() == figures
    assert figure.get_size_inches().tolist() == size
    assert not other.has_data()


@pytest.mark.parametrize("verb", VERBS)
def test_a_picture_saved_and_not_shown_leaves_no_figure_open(adata, verb, tmp_path):
    before = plt.get_fignums()
    VERBS[verb](adata, show=False, save=tmp_path / "picture.png")
    assert plt.get_fignums() == before
    assert plt.imread(tmp_path / "picture.png").ndim == 3


@pytest.mark.parametrize("verb", ONE_AXES)
def test_the_users_own_figure_stays_open(adata, verb, tmp_path):
    figure, ax = plt.subplots()
    VERBS[verb](adata, ax=ax, show=False, save=tmp_path / "picture.png")
    assert plt.fignum_exists(figure.number)


@pytest.mark.parametrize("verb", VERBS)
def test_show_opens_a_window_only_when_asked(adata, verb, monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda *_, **__: shown.append(verb))
    VERBS[verb](adata)
    VERBS[verb](adata, show=False)
    assert not shown
    VERBS[verb](adata, show=True)
    assert shown == [verb]


def colours_of(figure):
    """Colours of everything in a figure that is filled: patches and points."""
    patches = [patch.get_facecolor() for ax in figure.axes for patch in ax.patches]
    points = [color for ax in figure.axes for found in ax.collections for color in found.get_facecolors()]
    return {to_hex(color) for color in itertools.chain(patches, points) if color[3] > 0}


@pytest.mark.parametrize("verb", WITH_GROUPS)
def test_groups_have_the_colours_of_uns_and_no_others(adata, verb):
    found = VERBS[verb](adata)
    figure = np.ravel(np.asarray(found, dtype=object))[0].figure
    greys = {color for color in colours_of(figure) if color[1:3] == color[3:5] == color[5:7]}
    assert colours_of(figure) - greys == set(COLORS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_picture_warns_of_nothing(adata, verb):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VERBS[verb](adata)
        plt.gcf().canvas.draw()
