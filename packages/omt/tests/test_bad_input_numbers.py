"""Numbers, samples and genes that cannot be meant: each is refused in one sentence that names the argument."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from anndata import AnnData

import omt
from omt.growth import birth_death_rate

P = omt.Mixture.from_gaussians([0.5, 0.5], [[0.0, 0.0], [6.0, 1.0]], np.repeat(np.eye(2)[None], 2, axis=0))
Q = omt.Mixture.from_gaussians([0.3, 0.7], [[1.0, 0.0], [7.0, 1.0]], np.repeat(np.eye(2)[None], 2, axis=0))
X = np.array([[0.0, 0.0], [6.0, 1.0], [5.0, 0.0]])


@pytest.mark.parametrize("value", ["x", None, [1, 2, 3], np.nan, -1.0], ids=str)
@pytest.mark.parametrize("name", ["reg", "inner_reg", "tol", "max_iter", "tau"])
def test_what_is_no_number_in_range_is_refused_by_the_arguments_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(repr(value))}; it must be "):
        omt.transport(P, Q, **{name: value})


@pytest.mark.parametrize("name", ["lam", "epsilon"])
@pytest.mark.parametrize("value", ["x", [1.0, 2.0], np.nan, np.inf, -1.0], ids=str)
def test_temperatures_in_units_of_cost_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(repr(value))}; it must be a finite number ≥ 0"):
        omt.transport(P, Q, **{name: value})


@pytest.mark.parametrize("value", [2.5, np.inf])
def test_steps_of_the_solver_are_whole_numbers(value: float) -> None:
    with pytest.raises(ValueError, match=rf"max_iter is {value}; it must be a whole number of at least 1"):
        omt.transport(P, Q, max_iter=value)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reg": 1e-30}, "reg is 1e-30; below 1e-09 float64 cannot tell the plan from rounding"),
        ({"reg": "x"}, "reg is 'x'; it must be a finite number > 0"),
        ({"n_points": 10**9}, "n_points is 1000000000; a table of the square of more than 30000 points does not fit"),
        ({"tol": "x"}, "tol is 'x' and max_iter 500; they must be > 0 and ≥ 1"),
    ],
)
def test_refine_refuses_what_would_give_nan_or_fill_the_memory(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        omt.transport(P, Q).refine(**options)


def test_text_is_no_sample() -> None:
    with pytest.raises(ValueError, match=r"X has dtype <U\d+; it must hold real numbers"):
        omt.transport(P, Q).interpolate_samples(X.astype(str), 0.5)


def test_names_with_an_arrow_stay_apart_half_way() -> None:
    left = omt.Mixture(P.weights, P.components, names=("a→b", "a"))
    right = omt.Mixture(Q.weights, Q.components, names=("c", "b→c"))
    middle = omt.transport(left, right, reg=1.0).interpolate(0.5)
    assert middle.names == ("(a→b)→(c)", "(a→b)→(b→c)", "(a)→(c)", "(a)→(b→c)")


def test_ends_of_an_interpolation_are_the_mixtures_in_every_family() -> None:
    left = omt.Mixture.from_params("poisson", [0.5, 0.5], rates=[[1.0, 2.0], [3.0, 4.0]])
    right = omt.Mixture.from_params("poisson", [0.2, 0.8], rates=[[2.0, 2.0], [3.0, 5.0]])
    plan = omt.transport(left, right)
    assert plan.interpolate(0.0) is left
    assert plan.interpolate(1.0) is right


def test_a_chain_refuses_mass_that_is_not_finite() -> None:
    chain = omt.TransportChain.between([P, Q], [0, 1])
    with pytest.raises(ValueError, match="mass of component '1' of time 0 is not finite"):
        chain.push([0.5, np.nan], 0, 1)


def test_a_chain_refuses_an_infinite_time() -> None:
    with pytest.raises(ValueError, match=r"times is \[0, inf\]; every time must be finite"):
        omt.TransportChain.between([P, Q], [0, np.inf])


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical", "tied", "lowrank"])
def test_copies_of_one_sample_give_a_mixture_around_it(covariance: Any) -> None:
    sample = np.array([0.1, 1.0 / 3.0, -7.7, 1e3 / 7.0, 2.0**0.5])
    X = np.repeat(sample[None], 30, axis=0)
    mixture = omt.fit_mixture(X, 2, covariance=covariance, progress=False)
    np.testing.assert_allclose(mixture.mean(), sample, rtol=1e-12)
    assert np.isfinite(mixture.log_prob(X)).all()
    smallest = np.linalg.eigvalsh(np.asarray(mixture.components.cov()))[:, 0]
    np.testing.assert_array_less(9e-7, smallest)


def cells() -> AnnData:
    rng = np.random.default_rng(0)
    adata = AnnData(rng.poisson(3.0, (60, 4)).astype(float))
    adata.obs["time"] = np.repeat([0.0, 1.0], 30)
    adata.obs["word"] = "x"
    adata.obsm["X_pca"] = rng.normal(size=(60, 2))
    return adata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_weight": "word"}, "adata.obs['word'] does not hold numbers: could not convert string to float: 'x'"),
        ({"family": "poisson", "size_factors": "word"}, "adata.obs['word'] does not hold numbers: could not convert"),
    ],
)
def test_a_column_of_words_is_no_weight(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        omt.tl.fit_mixtures(cells(), "time", n_components=2, progress=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "generate", "time": 0.5, "n": 2.5}, "n is 2.5; it must be a whole number of at least 1"),
        ({"kind": "generate", "time": 0.5, "n": "x"}, "n is 'x'; it must be a whole number of at least 1"),
        ({"source": 0.0, "target": 1.0, "t": "x"}, "t is 'x'; it must be between 0 (the source) and 1 (the target)"),
        ({"source": 0.0, "target": 1.0, "t": np.nan}, "t is nan; it must be between 0 (the source) and 1 (the target)"),
    ],
)
def test_interpolated_cells_need_a_number_and_a_time(options: dict[str, Any], message: str) -> None:
    adata = cells()
    omt.tl.fit_mixtures(adata, "time", n_components=2, progress=False)
    omt.tl.transport(adata, time_key="time")
    with pytest.raises(ValueError, match=re.escape(message)):
        omt.tl.interpolate(adata, **options)


def test_an_empty_set_of_genes_has_no_score() -> None:
    with pytest.raises(ValueError, match="proliferation names no genes; give at least one"):
        omt.tl.score_growth(cells(), [], ["1"])


def test_a_gene_that_occurs_twice_has_no_score() -> None:
    adata = cells()
    adata.var_names = ["g", "g", "h", "i"]
    with pytest.raises(ValueError, match=r"adata.var_names are not unique; call adata.var_names_make_unique\(\) first"):
        omt.tl.score_growth(adata, ["g"], ["h"])


def test_a_rate_of_birth_that_is_nan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^beta_min is nan; it must be a finite number"):
        birth_death_rate([0.0], [0.0], beta_min=np.nan)


@pytest.mark.parametrize("name", ["beta_min", "beta_width", "delta_max", "delta_center"])
def test_a_growth_curve_is_refused_by_the_name_that_the_caller_gave(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is nan; it must be a finite number"):
        omt.tl.score_growth(cells(), ["0", "1"], ["2", "3"], **{name: np.nan})


def test_an_infinite_tolerance_is_refused() -> None:
    with pytest.raises(ValueError, match="tol is inf; it must be a finite number > 0"):
        omt.transport(P, Q, tol=np.inf)
    with pytest.raises(ValueError, match="tol is inf and max_iter 500; they must be"):
        omt.transport(P, Q).refine(tol=np.inf)


@pytest.mark.parametrize("value", [-1, "x", 1.5, True, [1, 2]], ids=str)
@pytest.mark.parametrize("where", ["fit", "sample", "map", "refine", "samples", "cells", "map_to", "bootstrap", "data"])
def test_what_is_no_seed_is_refused_by_name(where: str, value: Any) -> None:
    plan, adata = omt.transport(P, Q), cells()
    omt.tl.fit_mixtures(adata, "time", n_components=2, progress=False)
    omt.tl.transport(adata, time_key="time")
    calls: dict[str, Any] = {
        "fit": lambda: omt.fit_mixture(X, 2, random_state=value),
        "sample": lambda: P.sample(3, value),
        "map": lambda: plan.map(X, kind="sample", rng=value),
        "refine": lambda: plan.refine(n_points=20, seed=value),
        "samples": lambda: plan.interpolate_samples(X, 0.5, rng=value),
        "cells": lambda: omt.tl.interpolate(adata, time=0.5, n=3, random_state=value),
        "map_to": lambda: omt.tl.map_to(adata, 0, 1, kind="sample", random_state=value),
        "bootstrap": lambda: omt.tl.bootstrap(adata, 3, random_state=value),
        "data": lambda: omt.datasets.branching_process(10, random_state=value),
    }
    with pytest.raises(
        ValueError, match=rf"(random_state|rng|seed) is {re.escape(repr(value))}; it must be an integer"
    ):
        calls[where]()


def test_one_component_sends_all_its_mass_by_the_weights_of_the_target() -> None:
    one = omt.Mixture.from_gaussians([1.0], [[0.0, 0.0]], np.eye(2)[None])
    np.testing.assert_allclose(omt.transport(one, Q).coupling, Q.weights[None], atol=1e-12)


def test_mixtures_of_two_families_have_no_plan() -> None:
    counts = omt.Mixture.from_params("poisson", [1.0], rates=[[1.0, 2.0]])
    with pytest.raises(ValueError, match="source is a mixture of family 'gaussian' and target of 'poisson'"):
        omt.transport(P, counts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["pairs"].clear(), r"adata.uns\['omt'\]\['bootstrap'\] was not written by omt, or is damaged"),
        (lambda b: b["pairs"]["0->1"].pop("verdict"), "was not written by omt, or is damaged .KeyError: 'verdict'"),
        (
            lambda b: b["pairs"]["0->1"]["forward"].update(lower=np.zeros((1, 1))),
            r"forward/lower of adata.uns\['omt'\]\['bootstrap'\] has shape \(1, 1\); the plan needs \(2, 2\)",
        ),
    ],
)
def test_an_edited_bootstrap_is_refused(change: Any, message: str) -> None:
    adata = cells()
    omt.tl.fit_mixtures(adata, "time", n_components=2, progress=False)
    omt.tl.transport(adata, time_key="time")
    omt.tl.bootstrap(adata, 3, progress=False)
    change(adata.uns["omt"]["bootstrap"])
    with pytest.raises(ValueError, match=message):
        omt.pl.transitions(adata, 0, 1, show_ci=True, show=False)


def test_a_bootstrap_on_other_features_is_refused() -> None:
    adata = cells()
    omt.tl.fit_mixtures(adata, "time", n_components=2, progress=False)
    omt.tl.transport(adata, time_key="time")
    adata.obsm["X_pca"] = adata.obsm["X_pca"][:, :1]
    with pytest.raises(ValueError, match="'X_pca' has 1 features here and had 2 when the mixtures were fitted"):
        omt.tl.bootstrap(adata, 3, progress=False)


def test_names_with_underscores_are_no_numbers() -> None:
    adata = cells()
    adata.obs["name"] = ["1_0" if i % 2 else "10" for i in range(60)]
    omt.tl.fit_mixtures(adata, "time", n_components=2, progress=False)
    omt.tl.transport(adata, time_key="time")
    omt.tl.push(adata, 0, 1, data="name", subset="10")
    assert (adata.obs.loc[(adata.obs["time"] == 0) & (adata.obs["name"] == "1_0"), "omt_push"] == 0.0).all()
