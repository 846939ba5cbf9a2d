"""Pictures: what they show, and that no text covers another, measured on the rendered picture."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

mpl.use("Agg")

import itertools

from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

import omt
from omt.pl._embedding import blobs_of, draw_blobs, draw_cells, frame, label_blobs
from omt.pl._labels import place_labels, spread
from omt.pl._style import category_colors
from omt.pl.sankey import Column, Flow, draw_sankey
from omt.pl.transitions import axes_for_table, draw_transitions


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def texts_of(figure):
    """All texts that are visible on the drawn figure, with their boxes in pixels."""
    figure.canvas.draw()
    return [
        (artist.get_text(), mpl.text.Text.get_window_extent(artist))
        for artist in figure.findobj(mpl.text.Text)
        if artist.get_visible() and artist.get_text().strip()
    ]


def overlaps(figure):
    boxes = texts_of(figure)
    return [
        (a, b)
        for i, (a, box_a) in enumerate(boxes)
        for b, box_b in boxes[i + 1 :]
        # half a pixel of slack: boxes that only touch do not cover each other
        if min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0) > 0.5
        and min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0) > 0.5
    ]


def two_groups(n_components, *, seed=0, n=900):
    """An AnnData of two fitted and transported groups with `n_components` labelled components on a plane."""
    import pandas as pd
    from anndata import AnnData

    rng = np.random.default_rng(seed)
    centers = rng.normal(scale=6, size=(n_components, 2))
    kind = np.arange(2 * n) % n_components
    X = centers[kind] + rng.normal(size=(2 * n, 2))
    obs = pd.DataFrame(
        {"time": np.repeat([0.0, 1.0], n), "type": pd.Categorical([f"CD{k} type number {k}" for k in kind])},
        index=[str(i) for i in range(2 * n)],
    )
    adata = AnnData(obs=obs, obsm={"X_plane": X})
    omt.tl.fit_mixtures(adata, "time", labels="type", use_rep="X_plane")
    omt.tl.transport(adata, time_key="time", reg=0.1)
    return adata


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=30),
    st.floats(0.1, 3.0),
)
def test_spread_keeps_intervals_apart_in_order_and_inside(positions, size):
    n = len(positions)
    low, high = -100.0, 100.0
    placed = spread(positions, np.full(n, size), low, high)
    ordered = placed[np.argsort(positions, kind="stable")]
    assert np.all(np.diff(ordered) >= size - 1e-9)
    assert ordered[0] >= low + size / 2 - 1e-9
    assert ordered[-1] <= high - size / 2 + 1e-9


def test_spread_moves_as_little_as_a_quadratic_programme():
    from scipy.optimize import minimize

    rng = np.random.default_rng(0)
    positions, sizes = np.sort(rng.uniform(0, 4, 8)), rng.uniform(0.3, 0.9, 8)
    gaps = [{"type": "ineq", "fun": lambda y, i=i: y[i + 1] - y[i] - (sizes[i] + sizes[i + 1]) / 2} for i in range(7)]
    best = minimize(lambda y: np.sum((y - positions) ** 2), positions + np.arange(8), constraints=gaps, tol=1e-12)
    assert np.allclose(spread(positions, sizes, -100, 100), best.x, atol=1e-4)


def test_labels_of_thirty_points_in_one_spot_do_not_overlap():
    figure, ax = plt.subplots()
    ax.set_xlim(-1, 1)
    ax.set_ylim(-1, 1)
    ax.set_xticks([])
    ax.set_yticks([])
    place_labels(ax, np.zeros((30, 2)), [f"component {k}" for k in range(30)])
    assert not overlaps(figure)


def test_a_label_with_room_stays_at_its_point():
    figure, ax = plt.subplots()
    (note,) = place_labels(ax, [[0.5, 0.5]], ["alone"])
    box = note.get_window_extent(figure.canvas.get_renderer())
    x, y = ax.transData.transform((0.5, 0.5))
    assert abs((box.x0 + box.x1) / 2 - x) < 2
    assert abs((box.y0 + box.y1) / 2 - y) < 4


@pytest.mark.parametrize("n_components", [5, 30])
def test_sankey_labels_do_not_overlap(n_components):
    ax = omt.pl.sankey(two_groups(n_components))
    assert not overlaps(ax.figure)


def test_sankey_labels_of_middle_columns_do_not_overlap():
    rng = np.random.default_rng(0)
    columns = [Column(str(t), [f"{t}:{k}" for k in range(30)], rng.dirichlet(np.ones(30))) for t in range(4)]
    flows = [Flow(np.outer(a.masses, b.masses), np.outer(a.masses, b.masses)) for a, b in itertools.pairwise(columns)]
    figure, ax = plt.subplots(figsize=(9, 7))
    draw_sankey(ax, columns, flows, category_colors([name for column in columns for name in column.names]))
    shown = {text for text, _ in texts_of(figure)}
    assert {f"{t}:{k}" for t in range(4) for k in range(30)} <= shown
    assert not overlaps(figure)


@pytest.mark.parametrize("n_components", [5, 30])
def test_names_of_the_transition_table_do_not_overlap(n_components):
    ax = omt.pl.transitions(two_groups(n_components), 0, 1)
    assert len(ax.get_xticklabels()) == n_components
    assert not overlaps(ax.figure)


def test_names_of_a_transition_table_on_small_axes_do_not_overlap():
    figure, ax = plt.subplots(figsize=(3, 3))
    draw_transitions(ax, np.eye(30), [f"row {k}" for k in range(30)], [f"column {k}" for k in range(30)])
    assert not overlaps(figure)


@pytest.mark.parametrize("n_components", [5, 30])
def test_labels_of_the_flow_do_not_overlap(n_components):
    ax = omt.pl.flow(two_groups(n_components), basis="plane")
    assert sum("type number" in text for text, _ in texts_of(ax.figure)) == n_components
    assert not overlaps(ax.figure)


@pytest.mark.parametrize("n_components", [5, 30])
def test_labels_of_the_mixture_do_not_overlap(n_components):
    ax = omt.pl.mixture(two_groups(n_components), 1, basis="plane")
    assert not overlaps(ax.figure)


def test_labels_of_crowded_components_do_not_overlap():
    rng = np.random.default_rng(0)
    xy = rng.normal(size=(600, 2))
    R = np.eye(30)[rng.integers(0, 30, 600)]
    blobs = blobs_of(xy, R, [f"a long name of type {k}" for k in range(30)], ["C0"] * 30)
    figure, ax = plt.subplots()
    draw_cells(ax, xy, "0.7")
    draw_blobs(ax, blobs)
    frame(ax, "umap")
    ax.autoscale_view()
    label_blobs(ax, blobs)
    assert not overlaps(figure)


def test_ribbons_of_a_sankey_have_the_heights_of_their_masses():
    W = np.array([[0.5, 0.1], [0.0, 0.4]])
    _, ax = plt.subplots()
    draw_sankey(
        ax,
        [Column("a", ["A", "B"], np.array([0.6, 0.4])), Column("b", ["A", "B"], np.array([0.5, 0.5]))],
        [Flow(W, W)],
        {"A": "#ff0000", "B": "#0000ff"},
    )
    ribbons = [patch for patch in ax.patches if isinstance(patch, mpl.patches.PathPatch)]
    heights = sorted(p.get_path().vertices[0, 1] - p.get_path().vertices[-1, 1] + 0 for p in ribbons)
    assert len(heights) == 3
    drawn = sorted(
        abs(p.get_path().vertices[0, 1] - p.get_path().vertices[7, 1]) for p in ribbons
    )  # left edge: first point and the last but one
    assert np.allclose(np.array(drawn) / drawn[0], np.array([0.1, 0.4, 0.5]) / 0.1)


def test_colours_come_from_uns():
    adata = two_groups(5)
    adata.uns["type_colors"] = ["#112233", "#223344", "#334455", "#445566", "#556677"]
    ax = omt.pl.sankey(adata)
    nodes = {to_hex(p.get_facecolor()) for p in ax.patches if isinstance(p, mpl.patches.Rectangle)}
    assert nodes == set(adata.uns["type_colors"])


def test_thirty_colours_are_thirty_different_ones():
    assert len(set(category_colors([str(k) for k in range(30)]).values())) == 30


def test_a_picture_is_drawn_on_the_axes_given():
    _, ax = plt.subplots()
    assert omt.pl.sankey(two_groups(3), ax=ax) is ax


def test_save_writes_the_file_named(tmp_path):
    file = tmp_path / "picture.png"
    omt.pl.transitions(two_groups(3), 0, 1, save=file)
    assert plt.imread(file).ndim == 3
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


def test_save_into_a_missing_folder_is_refused_and_creates_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*/sub does not exist"):
        omt.pl.transitions(two_groups(3), 0, 1, save=tmp_path / "sub" / "picture.png")
    assert not list(tmp_path.iterdir())


def test_save_with_a_suffix_writes_into_figures_as_scanpy_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    omt.pl.sankey(two_groups(3), save=".pdf")
    assert (tmp_path / "figures" / "omt_sankey.pdf").read_bytes().startswith(b"%PDF")


def test_transitions_show_the_table_of_the_verb():
    adata = two_groups(4)
    ax = omt.pl.transitions(adata, 0, 1, direction="backward")
    table = omt.tl.transition_matrix(adata, 0, 1, direction="backward")
    assert np.array_equal(ax.images[0].get_array(), table.to_numpy())


def test_a_missing_basis_lists_those_that_exist():
    with pytest.raises(KeyError, match=r"basis='umap': adata\.obsm has neither 'X_umap' nor 'umap'; it has: X_plane"):
        omt.pl.flow(two_groups(3))


def test_flow_with_only_one_group_says_what_is_missing():
    with pytest.raises(ValueError, match="give both source= and target="):
        omt.pl.flow(two_groups(3), source=0, basis="plane")


def test_a_figure_for_a_table_grows_with_its_rows():
    few, many = (axes_for_table([str(k) for k in range(n)], ["a"]).figure.get_figheight() for n in (5, 30))
    assert many > 2 * few
