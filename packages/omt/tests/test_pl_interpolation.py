"""The panels between two groups show the cells that the verb makes, and the ends as they were measured."""

from __future__ import annotations

import numpy as np
import pytest

import omt

plt = pytest.importorskip("matplotlib.pyplot")
plt.switch_backend("agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def course():
    adata, _ = omt.datasets.branching_process(150)
    omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state", progress=False)
    omt.tl.transport(adata, source=0, target=2)
    return adata


def principal_plane(adata):
    """The two directions in which the cells of both ends vary most, up to their signs."""
    X = adata.obsm["X_state"]
    ends = X[adata.obs["time"].isin([0, 2]).to_numpy()]
    values, vectors = np.linalg.eigh(np.cov(ends, rowvar=False))
    return ends.mean(axis=0), vectors[:, np.argsort(values)[::-1][:2]]


def test_a_panel_between_shows_the_interpolated_cells(course):
    panels = omt.pl.interpolation(course, 0, 2, (0.0, 0.25, 1.0), n=80, random_state=3)
    assert [ax.get_title() for ax in panels] == ["time 0", "time 0.5", "time 2"]
    cells = omt.tl.interpolate(course, source=0, target=2, t=0.25, n=80, random_state=3)
    center, axes = principal_plane(course)
    drawn = np.asarray(panels[1].collections[1].get_offsets())
    np.testing.assert_allclose(np.abs(drawn), np.abs((cells.obsm["X_state"] - center) @ axes), atol=1e-9)


def test_the_ends_show_the_measured_cells(course):
    panels = omt.pl.interpolation(course, 0, 2, (0.0, 1.0))
    for ax, time in zip(panels, (0, 2), strict=True):
        assert len(ax.collections[1].get_offsets()) == (course.obs["time"] == time).sum()


def test_cells_measured_in_between_are_rings_unless_not_wanted(course):
    middle = omt.pl.interpolation(course, 0, 2, (0.5,))[0]
    assert len(middle.collections[-1].get_offsets()) == (course.obs["time"] == 1).sum()
    assert len(omt.pl.interpolation(course, 0, 2, (0.5,), measured=False)[0].collections) == 2
    assert len(omt.pl.interpolation(course, 0, 2, (0.3,))[0].collections) == 2  # nothing was measured then


def test_on_an_embedding_a_cell_stands_among_its_nearest_measured_cells(course):
    panels = omt.pl.interpolation(course, 0, 2, (0.5,), basis="tree", n=20, measured=False)
    cells = omt.tl.interpolate(course, source=0, target=2, t=0.5, n=20)
    distance = ((cells.obsm["X_state"][:, None] - course.obsm["X_state"][None]) ** 2).sum(axis=2)
    expected = course.obsm["X_tree"][np.argsort(distance, axis=1)[:, :5]].mean(axis=1)
    np.testing.assert_allclose(np.asarray(panels[0].collections[1].get_offsets()), expected, atol=1e-9)


def test_ends_carry_the_colours_of_the_labels(course):
    from matplotlib.colors import to_hex

    adata = course.copy()
    names = list(adata.obs["cell_type"].cat.categories)
    adata.uns["cell_type_colors"] = [f"#0000{16 * i + 15:02x}" for i in range(len(names))]
    ax = omt.pl.interpolation(adata, 0, 2, (0.0,))[0]
    shown = {to_hex(color) for color in ax.collections[1].get_facecolors()}
    assert shown <= set(adata.uns["cell_type_colors"])


def test_the_picture_is_saved(course, tmp_path):
    omt.pl.interpolation(course, 0, 2, (0.0, 0.5), save=tmp_path / "way.png", title="a way")
    assert (tmp_path / "way.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_steps_are_refused(course):
    with pytest.raises(ValueError, match="t is empty; give at least one number from 0 to 1"):
        omt.pl.interpolation(course, 0, 2, ())
    with pytest.raises(ValueError, match=r"1\.5"):
        omt.pl.interpolation(course, 0, 2, (1.5,))


def test_groups_outside_of_the_chain_are_refused(course):
    with pytest.raises(ValueError, match="target=4 is not in the chain"):
        omt.pl.interpolation(course, 0, 4)
