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
    assert texts == ["0 → 1.5", "1.5 → 2"]


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
