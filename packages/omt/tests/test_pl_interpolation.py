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


@pytest.fixture(scope="module")
def thirty():
    """Two groups of thirty components with the long names that real annotations have."""
    import pandas as pd
    from anndata import AnnData

    rng = np.random.default_rng(0)
    kind = np.arange(1200) % 30
    names = [f"Neuroblast_ASG_AWA lineage {k}" for k in range(30)]
    X = rng.normal(scale=6, size=(30, 2))[kind] + rng.normal(size=(1200, 2))
    obs = pd.DataFrame(
        {"time": np.repeat([0.0, 1.0], 600), "type": pd.Categorical.from_codes(kind, names)},
        index=[str(i) for i in range(1200)],
    )
    adata = AnnData(obs=obs, obsm={"X_plane": X})
    omt.tl.fit_mixtures(adata, "time", labels="type", use_rep="X_plane", progress=False)
    omt.tl.transport(adata, time_key="time", reg=0.1)
    return adata


def boxes_of(figure):
    """Texts that are drawn, with their boxes in pixels."""
    from matplotlib.text import Text

    figure.canvas.draw()
    return [
        (text.get_text(), Text.get_window_extent(text))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    ]


@pytest.mark.parametrize("t", [(0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)])
def test_texts_do_not_overlap_at_thirty_long_names(thirty, t):
    figure = omt.pl.interpolation(thirty, 0, 1, t, title="Thirty lineages")[0].figure
    found = boxes_of(figure)
    assert not [
        (a, b)
        for i, (a, first) in enumerate(found)
        for b, second in found[i + 1 :]
        if min(first.x1, second.x1) - max(first.x0, second.x0) > 0.5
        and min(first.y1, second.y1) - max(first.y0, second.y0) > 0.5
    ]
    outside = [
        text for text, box in found if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
    ]
    assert not outside


def legend_of(panels):
    """The picture's one legend."""
    (legend,) = [ax.get_legend() for ax in panels if ax.get_legend() is not None]
    return legend


def test_the_legend_names_what_is_drawn(course):
    def named(t):
        return [text.get_text() for text in legend_of(omt.pl.interpolation(course, 0, 2, t)).get_texts()]

    def types(time):
        return set(course.obs["cell_type"][course.obs["time"] == time].astype(str))

    assert set(named((0.0,))) == types(0) | {"measured at both ends"}
    assert set(named((0.0, 1.0))) == types(0) | types(2) | {"measured at both ends"}
    assert set(named((0.0, 0.5))) == types(0) | {"measured at both ends", "measured at this time"}


def test_numbers_in_the_panels_are_those_of_the_legend(thirty):
    panels = omt.pl.interpolation(thirty, 0, 1, (0.0,))
    number = dict(
        text.get_text().split("  ")[::-1] for text in legend_of(panels).get_texts() if "lineage" in text.get_text()
    )
    assert len(number) == 30
    xy, kind = thirty.obsm["X_plane"], thirty.obs["type"].astype(str).to_numpy()
    first = (thirty.obs["time"] == 0.0).to_numpy()
    ends = xy - xy.mean(axis=0)
    axes = np.linalg.svd(ends, full_matrices=False)[2][:2].T
    notes = {note.get_text(): np.asarray(note.xy) for note in panels[0].texts}
    for name, text in number.items():
        center = (ends[first & (kind == name)] @ axes).mean(axis=0)
        np.testing.assert_allclose(np.abs(notes[text]), np.abs(center), atol=1e-6)


def test_rings_lie_below_the_ellipses(course):
    panel = omt.pl.interpolation(course, 0, 2, (0.5,))[0]
    assert panel.collections[-1].get_zorder() < min(patch.get_zorder() for patch in panel.patches)
