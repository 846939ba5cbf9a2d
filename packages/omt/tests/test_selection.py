"""How many components: against known mixtures, brute force and the formula of the criterion."""

from __future__ import annotations

import itertools

import anndata as ad
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture

import omt
from omt.fitting.em import fit_mixture
from omt.fitting.selection import allocate, choose_components
from omt.io import read_uns
from omt.mixture import Mixture
from omt.report import ComponentCurve


@pytest.fixture
def groups_of(random_mixture):
    """Maker of 300 samples of ``K`` separated groups in three dimensions."""

    def make(K: int, seed: int = 0, n: int = 300) -> np.ndarray:
        return random_mixture(seed, K, 3, spread=8.0).sample(n, seed + 1)

    return make


# ------------------------------------------------------------------------------------------------------ the criterion
@pytest.mark.parametrize("criterion", ["bic", "icl"])
@pytest.mark.parametrize("K", [1, 3, 6])
def test_the_true_number_of_separated_components_is_found(groups_of, criterion, K):
    assert fit_mixture(groups_of(K), criterion, component_range=(1, 9)).K == K


@pytest.mark.parametrize("covariance", ["full", "tied", "diag", "spherical", "lowrank"])
def test_every_shape_of_covariance_can_be_searched(covariance):
    X = np.concatenate([np.random.default_rng(c).normal(9.0 * c, 1.0, size=(150, 3)) for c in range(4)])
    assert fit_mixture(X, "bic", covariance=covariance, component_range=(2, 6)).K == 4


def test_counts_can_be_searched():
    rng = np.random.default_rng(0)
    rates = rng.gamma(1.0, 10.0, size=(3, 20))
    X = rng.poisson(rates[rng.integers(3, size=600)])
    assert fit_mixture(X, "bic", family="poisson", component_range=(1, 6)).K == 3


def test_the_curve_is_the_criterion_of_the_mixture(groups_of):
    X = groups_of(3)
    for criterion in ("bic", "icl"):
        fitted = fit_mixture(X, criterion, component_range=(1, 5), tol=1e-8, max_iter=1000)
        curve = fitted.report.curve
        assert curve.criterion == criterion
        assert curve.n_components == (1, 2, 3, 4, 5)
        assert getattr(fitted, criterion)(X) == pytest.approx(min(curve.scores), abs=0.05)


def test_one_component_has_the_bic_of_sklearn(groups_of):
    X = groups_of(2)
    curve = fit_mixture(X, "bic", component_range=(1, 1), family=omt.families.Gaussian(shrinkage=0)).report.curve
    assert curve.scores[0] == pytest.approx(GaussianMixture(1, reg_covar=0.0).fit(X).bic(X), rel=1e-9)


def test_growing_step_by_step_is_as_good_as_starting_anew(random_mixture):
    X = random_mixture(4, 8, 4, spread=2.0).sample(1500, 0)
    curve = fit_mixture(X, "bic", component_range=(2, 10), n_init=1).report.curve
    for K in (4, 7, 10):
        anew = fit_mixture(X, K, n_init=1).bic(X)
        assert curve.scores[curve.n_components.index(K)] <= anew + 0.002 * abs(anew)


def test_a_large_sample_is_searched_on_a_part_of_it(random_mixture):
    X = random_mixture(0, 4, 2, spread=10.0).sample(55_000, 1)
    fitted = fit_mixture(X, "bic", component_range=(2, 6), n_init=1)
    assert fitted.report.method == "stepwise"
    assert fitted.K == 4
    assert min(fitted.report.curve.scores) == pytest.approx(fitted.bic(X), rel=0.01)


def test_three_points_are_three_components_and_the_curve_ends_soon_after():
    X = np.repeat(np.arange(3.0)[:, None], 10, axis=0)
    fitted = fit_mixture(X, "bic", component_range=(1, 8))
    assert fitted.K == 3
    assert max(fitted.report.curve.n_components) < 8


def test_the_same_seed_gives_the_same_curve(groups_of):
    X = groups_of(4)
    first, second = (fit_mixture(X, "bic", component_range=(2, 6), random_state=5).report.curve for _ in range(2))
    assert first == second


def test_the_curve_survives_saving(groups_of, tmp_path):
    fitted = fit_mixture(groups_of(2), "bic", component_range=(1, 3))
    fitted.save(tmp_path / "model")
    assert Mixture.load(tmp_path / "model").report.curve == fitted.report.curve


# --------------------------------------------------------------------------------------------------------- the budget
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_budget_is_spent_as_brute_force_would(data):
    n_groups = data.draw(st.integers(1, 4))
    curves = []
    for _ in range(n_groups):
        numbers = tuple(range(data.draw(st.integers(1, 3)), data.draw(st.integers(3, 6)) + 1))
        scores = tuple(data.draw(st.floats(-1e4, 1e4)) for _ in numbers)
        curves.append(ComponentCurve("bic", numbers, scores))
    least = sum(curve.n_components[0] for curve in curves)
    budget = data.draw(st.integers(least, least + 12))
    options = itertools.product(*(range(len(curve.scores)) for curve in curves))
    best = min(
        sum(curve.scores[i] for curve, i in zip(curves, choice, strict=True))
        for choice in options
        if sum(curve.n_components[i] for curve, i in zip(curves, choice, strict=True)) <= budget
    )
    chosen = allocate(curves, budget)
    assert sum(chosen) <= budget
    value = sum(curve.scores[curve.n_components.index(k)] for curve, k in zip(curves, chosen, strict=True))
    assert value == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_without_a_budget_every_group_takes_its_best(groups_of):
    choice = choose_components({"a": groups_of(2), "b": groups_of(5)}, component_range=(1, 7))
    assert choice.names == ("a", "b")
    assert choice.n_components == (2, 5)
    assert choice.total == 7


def test_a_tight_budget_goes_to_the_groups_that_gain_most(groups_of):
    choice = choose_components([groups_of(5), groups_of(2, n=60)], budget=4, component_range=(1, 7))
    many, few = (np.array(curve.scores) for curve in choice.curves)
    assert many[1] - many[2] > few[0] - few[1]  # a third component here gains more than a second one there
    assert choice.n_components == (3, 1)


def test_a_budget_is_shared_among_labels(groups_of):
    X = np.concatenate([groups_of(4), groups_of(1, seed=7)])
    labels = ["mixed"] * 300 + ["plain"] * 300
    free = fit_mixture(X, labels=labels, n_per_label="bic", component_range=(1, 6))
    assert free.names == ("mixed/0", "mixed/1", "mixed/2", "mixed/3", "plain/0")
    tight = fit_mixture(X, labels=labels, n_per_label="bic", component_range=(1, 6), budget=3)
    assert tight.names == ("mixed/0", "mixed/1", "plain/0")


def test_components_of_a_label_explain_its_samples_only(random_mixture):
    X, part = random_mixture(0, 4, 3, spread=8.0).sample(800, 1, return_labels=True)
    fitted = fit_mixture(X, labels=np.where(part < 2, "low", "high"), n_per_label="bic", component_range=(1, 4))
    assert adjusted_rand_score(part, fitted.responsibilities(X).argmax(axis=1)) > 0.99


def test_a_rare_label_keeps_its_one_component(groups_of):
    X = np.concatenate([groups_of(2), groups_of(1)[:1] + 50.0])
    with pytest.warns(UserWarning, match="labels with one sample: rare/0"):
        fitted = fit_mixture(X, labels=["common"] * 300 + ["rare"], n_per_label="bic", component_range=(1, 4))
    assert fitted.names == ("common/0", "common/1", "rare/0")


def test_groups_of_cells_share_a_budget(groups_of):
    X = np.concatenate([groups_of(5), groups_of(2)])
    adata = ad.AnnData(obsm={"X_pca": X}, obs={"time": np.repeat([0.0, 1.0], 300)}, shape=(600, 0))
    omt.tl.fit_mixtures(adata, "time", n_components="bic", component_range=(1, 6), budget=6)
    numbers = [mixture.K for mixture in read_uns(adata).mixtures]
    assert sum(numbers) <= 6
    assert numbers == list(choose_components([X[:300], X[300:]], 6, component_range=(1, 6)).n_components)


# ---------------------------------------------------------------------------------------------------------- bad input
GOOD = np.random.default_rng(0).normal(size=(10, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_components": "aic"}, "n_components is 'aic'; it must be 'bic' or 'icl'"),
        ({"n_components": "bic", "component_range": (5, 2)}, r"component_range is \(5, 2\); it must be two integers"),
        ({"n_components": "bic", "component_range": 5}, "component_range is 5; it must be two integers"),
        ({"n_components": "bic", "component_range": (0, 2)}, r"the least number of components \(≥ 1\)"),
        ({"n_components": "bic", "component_range": (11, 12)}, "component_range begins at 11 and X has 10 samples"),
        ({"n_components": "bic", "budget": 5}, "budget is shared among labels; give labels and n_per_label='bic'"),
        ({"labels": ["a"] * 10, "n_per_label": "many"}, "n_per_label is 'many'; it must be 'bic' or 'icl'"),
        ({"labels": list("ababababab"), "n_per_label": "bic", "budget": 1}, "budget is 1; the 2 groups need 2"),
        ({"labels": ["a"] * 10, "n_per_label": "bic", "budget": 0}, "budget is 0; it must be an integer ≥ 1"),
    ],
)
def test_a_bad_choice_is_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_mixture(GOOD, **arguments)


def test_a_group_that_is_too_small_is_named():
    with pytest.raises(ValueError, match="group 'late' has 10 samples; component_range begins at 11"):
        choose_components({"late": GOOD}, component_range=(11, 12))
