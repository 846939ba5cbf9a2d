"""The picture of how plans were solved shows what the solver recorded."""

from __future__ import annotations

import numpy as np
import pytest

import omt
from omt.solver import solve

plt = pytest.importorskip("matplotlib.pyplot")
plt.switch_backend("agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def course():
    adata, _ = omt.datasets.branching_process(200)
    omt.tl.fit_mixtures(adata, groupby="time", labels="cell_type", use_rep="X_state", progress=False)
    omt.tl.transport(adata, time_key="time", reg=0.05)
    return adata


@pytest.mark.parametrize(("lam", "tau"), [(1.0, 1.0), (0.01, 1.0), (0.01, 0.9)])
def test_recorded_errors_end_at_the_tolerance_and_count_the_steps(lam, tau):
    rng = np.random.default_rng(0)
    C = rng.uniform(size=(30, 20))
    found = solve(C, rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(20)), lam=lam, tau=tau, tol=1e-9)
    assert found.errors[-1] <= 1e-9
    assert found.errors.min() < found.errors[0]
    assert found.newton.sum() <= found.n_newton
    assert (~found.newton[1:]).sum() <= found.n_sinkhorn
    if tau == 1.0 and lam == 0.01:  # neither cooled nor easy: after a start from the linear program nothing is left out
        assert found.newton.sum() == found.n_newton


def test_the_last_recorded_error_is_that_of_the_plan():
    rng = np.random.default_rng(1)
    a, b = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(9))
    found = solve(rng.uniform(size=(12, 9)), a, b, lam=0.02)
    measured = np.abs(found.coupling.sum(axis=1) - a).sum() + np.abs(found.coupling.sum(axis=0) - b).sum()
    assert found.errors[-1] == pytest.approx(measured, abs=1e-14)


def test_linear_programs_have_no_steps():
    assert solve(np.eye(3), np.full(3, 1 / 3), np.full(3, 1 / 3), lam=0.0).errors.size == 0


def test_each_plan_is_a_line_through_its_errors(course):
    ax = omt.pl.solver(course)
    plans = omt.io.read_uns(course).transports
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == ["0 → 1", "1 → 2", "2 → 3", "3 → 4"]
    for line, plan in zip(lines, plans, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.maximum(plan.solution.errors, 1e-17))
    assert ax.get_yscale() == "log"


def test_the_tolerance_is_a_line(course):
    heights = {line.get_ydata()[0] for line in omt.pl.solver(course).get_lines() if line.get_linestyle() == "--"}
    assert heights == {1e-9}


def test_steps_survive_a_file(course, tmp_path):
    import anndata

    course.write_h5ad(tmp_path / "course.h5ad")
    again = anndata.read_h5ad(tmp_path / "course.h5ad")
    for old, new in zip(omt.io.read_uns(course).transports, omt.io.read_uns(again).transports, strict=True):
        np.testing.assert_array_equal(old.solution.errors, new.solution.errors)
        np.testing.assert_array_equal(old.solution.newton, new.solution.newton)


def test_a_transport_and_a_chain_can_be_drawn_too():
    P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0], [3.0]], [[[1.0]], [[1.0]]])
    Q = omt.Mixture.from_gaussians([0.3, 0.7], [[1.0], [5.0]], [[[1.0]], [[1.0]]])
    assert omt.pl.solver(omt.transport(P, Q)).get_legend().get_texts()[0].get_text() == "plan"
    chain = omt.TransportChain.between([P, Q, P], [0, 1.5, 2])
    texts = [text.get_text() for text in omt.pl.solver(chain).get_legend().get_texts()]
    assert texts[:2] == ["0 → 1.5", "1.5 → 2"]


def test_plans_without_steps_are_refused_by_a_sentence():
    P = omt.Mixture.from_gaussians([1.0], [[0.0]], [[[1.0]]])
    plan = omt.transport(P, P, reg=0.0)
    with pytest.raises(ValueError, match=r"no plan has solver steps to show: linear programs \(reg=0\) have none"):
        omt.pl.solver(plan)
    stored = {key: value for key, value in omt.transport(P, P).to_dict().items() if key not in {"errors", "newton"}}
    old = omt.Transport.from_dict(stored, source=P, target=P)
    assert old.solution.errors is None
    with pytest.raises(ValueError, match="files of earlier versions did not keep them"):
        omt.pl.solver(old)


def test_what_has_no_plans_is_refused_by_type():
    with pytest.raises(TypeError, match="plans is of type int; it must be an AnnData, a Transport or a TransportChain"):
        omt.pl.solver(3)


def two_blocks(seed=0):
    """A problem of two blocks of six by six that share no mass, and its solution."""
    rng = np.random.default_rng(seed)
    C = rng.uniform(size=(12, 12))
    C[:6, 6:] = C[6:, :6] = np.inf
    a, b = (np.concatenate([rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))]) / 2 for _ in range(2))
    return C, a, b


def test_blocks_that_share_no_mass_are_recorded_apart():
    C, a, b = two_blocks()
    found = solve(C, a, b, lam=0.02)
    (end,) = np.flatnonzero(np.isnan(found.errors))
    for part, recorded in ((slice(0, 6), found.errors[:end]), (slice(6, 12), found.errors[end + 1 :])):
        alone = solve(C[part, part], a[part], b[part], lam=0.02)
        np.testing.assert_allclose(recorded, alone.errors, atol=1e-14)
        assert not np.isnan(alone.errors).any()


def test_each_block_of_a_forbidden_problem_has_its_own_line():
    rng = np.random.default_rng(3)
    _, a, b = two_blocks()
    P, Q = (omt.Mixture.from_gaussians(w, rng.normal(size=(12, 2)), np.stack([0.1 * np.eye(2)] * 12)) for w in (a, b))
    forbidden = np.kron([[False, True], [True, False]], np.ones((6, 6), dtype=bool))
    plan = omt.transport(P, Q, reg=0.002, forbidden=forbidden)
    ax = omt.pl.solver(plan)
    lines = [line for line in ax.get_lines() if line.get_label() == "plan"]
    assert len(lines) == 2
    for line in lines:
        assert line.get_xdata()[0] == 0
        assert np.isfinite(line.get_ydata()).all()
    assert sum(len(line.get_ydata()) for line in lines) == len(plan.solution.errors) - 1
    assert ax.get_legend().get_texts()[0].get_text() == "plan (2 blocks)"


def test_rejected_newton_steps_are_crosses(course):
    from dataclasses import replace

    import omt.io

    plan = omt.io.read_uns(course).transports[0]
    stuck = replace(
        plan.solution, errors=np.array([1e-1, 1e-2, 1e-2, 1e-3]), newton=np.array([False, True, True, False])
    )
    ax = omt.pl.solver(replace(plan, solution=stuck))
    drawn = [np.asarray(points.get_offsets()) for points in ax.collections]
    assert [list(points[:, 0]) for points in drawn] == [[0, 3], [1], [2]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "plan", "start, Sinkhorn sweep", "Newton step", "Newton step, rejected",
    ]  # fmt: skip


def test_thirty_plans_have_a_legend_inside_of_the_figure(random_mixture):
    chain = omt.TransportChain.between([random_mixture(k, 3, 2) for k in range(31)], list(range(31)), reg=0.05)
    figure = omt.pl.solver(chain).figure
    figure.canvas.draw()
    box = figure.axes[0].get_legend().get_window_extent()
    assert figure.bbox.x1 >= box.x1
    assert figure.bbox.y0 <= box.y0
