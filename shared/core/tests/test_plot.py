"""What the load picture shows."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

from shared_core.plot import expert_load  # noqa: E402


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def test_bars_are_loads_relative_to_the_mean():
    ax = expert_load([6, 2, 4, 4])
    assert [bar.get_height() for bar in ax.patches] == [1.5, 0.5, 1, 1]


def test_the_mean_is_a_line_at_one():
    ax = expert_load([6, 2, 4, 4])
    assert list(ax.lines[0].get_ydata()) == [1, 1]


def test_title_of_one_layer_gives_its_max_violation():
    assert expert_load([6, 2, 4, 4]).get_title() == "Load of 4 experts, MaxVio 0.50"


def test_title_of_several_layers_gives_mean_and_worst_max_violation():
    title = expert_load([[6, 2, 4, 4], [4, 4, 4, 4], [0, 0, 0, 0]]).get_title()
    assert title == "Load of 4 experts in 3 layers\nMaxVio mean 0.25, worst 0.50"


def test_heat_map_holds_loads_relative_to_the_mean_of_each_layer():
    ax = expert_load([[6, 2, 4, 4], [10, 30, 20, 20]])
    np.testing.assert_allclose(ax.images[0].get_array(), [[1.5, 0.5, 1, 1], [0.5, 1.5, 1, 1]])


def test_a_layer_without_assignments_is_drawn_empty():
    ax = expert_load([[6, 2], [0, 0]])
    np.testing.assert_allclose(ax.images[0].get_array()[1], [0, 0])


def test_draws_on_the_axes_that_are_given():
    _, ax = plt.subplots()
    assert expert_load([1, 2], ax=ax) is ax


@pytest.mark.parametrize("layers", [1, 24])
@pytest.mark.parametrize("experts", [8, 128])
def test_no_text_lies_outside_the_picture_or_over_another(experts, layers):
    ax = expert_load(np.random.default_rng(0).integers(0, 99, (layers, experts)).squeeze())
    ax.figure.canvas.draw()
    renderer = ax.figure.canvas.get_renderer()
    texts = [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
    ticks = [label for label in ax.get_xticklabels() if label.get_visible()]
    boxes = [text.get_window_extent(renderer) for text in texts + ticks]
    frame = ax.figure.bbox
    assert all(frame.x0 <= b.x0 and b.x1 <= frame.x1 and frame.y0 <= b.y0 and b.y1 <= frame.y1 for b in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_without_matplotlib_the_extra_is_named():
    code = "import sys; sys.modules['matplotlib'] = None\nimport shared_core.plot as p\np.expert_load([1, 2])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    expected = "ImportError: shared_core.plot needs matplotlib: pip install 'shared-core[plot]'"
    assert result.stderr.strip().endswith(expected)


def test_no_layers_cannot_be_drawn():
    with pytest.raises(ValueError, match="has no layers to draw"):
        expert_load(np.zeros((0, 4)))
