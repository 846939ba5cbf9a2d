"""Mixtures of counts and positive numbers through costs, transport and maps."""

from __future__ import annotations

import re

import numpy as np
import ot
import pytest
from scipy import sparse, stats

import omt
from omt.mixture import Mixture
from omt.pairs.comonotone import count_mean
from omt.pairs.cost import component_cost, inner_epsilon
from omt.pairs.countlaws import CountLaws
from omt.pairs.maps import barycentric_map, mode_map, sample_map

FAMILIES = ["poisson", "negative_binomial", "bernoulli", "gamma", "exponential", "lognormal"]
COUNTS = ["poisson", "negative_binomial", "bernoulli"]


def mixture(family: str, seed: int, K: int = 3, d: int = 4, *, scale: float = 1.0, **more) -> Mixture:
    rng = np.random.default_rng([seed, K, d])
    level = scale * np.exp(rng.normal(0.3, 0.8, size=(K, d)))
    arrays = {
        "poisson": {"rates": level},
        "negative_binomial": {"means": level, "dispersion": np.linspace(0.2, 1.0, d)},
        "bernoulli": {"probs": level / (1.0 + level)},
        "multinomial": {"probs": level / level.sum(axis=1, keepdims=True), "total": 50.0},
        "gamma": {"shapes": rng.uniform(0.5, 4.0, (K, d)), "rates": 1.0 / level},
        "exponential": {"rates": 1.0 / level},
        "lognormal": {"means": np.log(level), "variances": rng.uniform(0.1, 0.4, (K, d))},
        "gaussian": {"means": level, "variances": rng.uniform(0.1, 0.4, (K, d))},
    }[family]
    return Mixture.from_params(family, rng.dirichlet(np.full(K, 5.0)), **{**arrays, **more})


def laws(family: str, P: Mixture, k: int) -> list:
    """The features' laws of one component in SciPy."""
    c = P.components
    if family == "poisson":
        return [stats.poisson(m) for m in c.rates[k]]
    if family == "negative_binomial":
        return [stats.nbinom(1 / f, 1 / (1 + f * m)) for m, f in zip(c.means[k], c.dispersion, strict=True)]
    return [stats.bernoulli(m) for m in c.probs[k]]


# ------------------------------------------------------------------------------------------------------------ cost
@pytest.mark.parametrize("family", COUNTS)
def test_w2_is_the_sum_of_the_features_costs_of_pot(family):
    P, Q = mixture(family, 0), mixture(family, 1, 2)
    C = component_cost(P, Q)
    x = np.arange(200)
    for k in range(P.K):
        for l in range(Q.K):
            pairs = zip(laws(family, P, k), laws(family, Q, l), strict=True)
            expected = sum(ot.wasserstein_1d(x, x, p.pmf(x), q.pmf(x), p=2) for p, q in pairs)
            assert C[k, l] == pytest.approx(expected, rel=1e-8)


def test_genes_with_equal_rates_cost_what_they_cost_alone():
    rates = np.array([[0.2, 0.2, 3.0, 0.2], [0.5, 0.5, 3.0, 0.5]])
    P = Mixture.from_params("poisson", [0.5, 0.5], rates=rates)
    Q = Mixture.from_params("poisson", [0.5, 0.5], rates=rates[::-1])
    alone = component_cost(
        Mixture.from_params("poisson", [0.5, 0.5], rates=rates[:, :1]),
        Mixture.from_params("poisson", [0.5, 0.5], rates=rates[::-1, :1]),
    )
    np.testing.assert_allclose(component_cost(P, Q), 3.0 * alone, rtol=1e-12)


def test_many_genes_are_summed_over_blocks(monkeypatch):
    P, Q = mixture("poisson", 0, 3, 50), mixture("poisson", 1, 4, 50)
    whole = component_cost(P, Q)
    monkeypatch.setattr("omt.pairs.product._BLOCK_PAIRS", 100)
    np.testing.assert_allclose(component_cost(P, Q), whole, rtol=1e-12)


def test_bernoulli_cost_is_the_distance_of_the_probabilities():
    P, Q = mixture("bernoulli", 0), mixture("bernoulli", 1)
    expected = np.abs(P.components.probs[:, None] - Q.components.probs[None]).sum(axis=2)
    np.testing.assert_allclose(component_cost(P, Q), expected, rtol=1e-12)


def test_exponential_cost_is_closed():
    P, Q = mixture("exponential", 0), mixture("exponential", 1)
    expected = 2.0 * ((1 / P.components.rates[:, None] - 1 / Q.components.rates[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(component_cost(P, Q), expected, rtol=1e-12)


def test_lognormal_cost_is_that_of_the_logarithms():
    P, Q = mixture("lognormal", 0), mixture("lognormal", 1)
    g, h = P.components.gaussian, Q.components.gaussian
    expected = ((g.means[:, None] - h.means) ** 2).sum(-1)
    expected = expected + ((np.sqrt(g.variances)[:, None] - np.sqrt(h.variances)) ** 2).sum(-1)
    np.testing.assert_allclose(component_cost(P, Q), expected, rtol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_exchanging_the_sides_transposes_the_cost(family):
    P, Q = mixture(family, 0), mixture(family, 1, 2)
    np.testing.assert_allclose(component_cost(P, Q), component_cost(Q, P).T, rtol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_component_costs_nothing_to_itself(family):
    P = mixture(family, 0)
    C = component_cost(P, P)
    np.testing.assert_allclose(np.diag(C), 0.0, atol=1e-9 * C.max())


@pytest.mark.parametrize("family", ["poisson", "negative_binomial", "bernoulli"])
def test_kl_and_hellinger_equal_sums_over_exact_probabilities(family):
    P, Q = mixture(family, 0), mixture(family, 1, 2)
    kl, hellinger = component_cost(P, Q, cost="kl"), component_cost(P, Q, cost="hellinger")
    jeffreys = component_cost(P, Q, cost="jeffreys")
    x = np.arange(2 if family == "bernoulli" else 300)
    for k in range(P.K):
        for l in range(Q.K):
            forward = backward = overlap = 0.0
            for p, q in zip(laws(family, P, k), laws(family, Q, l), strict=True):
                a, b = p.logpmf(x), q.logpmf(x)
                seen = np.isfinite(a) & np.isfinite(b)
                forward += np.sum(np.exp(a[seen]) * (a - b)[seen])
                backward += np.sum(np.exp(b[seen]) * (b - a)[seen])
                overlap += np.log(np.sum(np.exp(0.5 * (a + b)[seen])))
            assert kl[k, l] == pytest.approx(forward, rel=1e-9)
            assert jeffreys[k, l] == pytest.approx(forward + backward, rel=1e-9)
            assert hellinger[k, l] == pytest.approx(1.0 - np.exp(overlap), rel=1e-9)


@pytest.mark.parametrize("family", ["gamma", "exponential", "lognormal", "multinomial"])
def test_hellinger_lies_between_zero_and_one_and_is_zero_on_the_diagonal(family):
    P, Q = mixture(family, 0), mixture(family, 1)
    H = component_cost(P, Q, cost="hellinger")
    assert ((H > 0.0) & (H < 1.0)).all()
    np.testing.assert_allclose(np.diag(component_cost(P, P, cost="hellinger")), 0.0, atol=1e-12)


def test_lognormal_hellinger_is_that_of_the_logarithms():
    P, Q = mixture("lognormal", 0), mixture("lognormal", 1)
    p, q = (
        Mixture.from_params("gaussian", m.weights, means=g.means, variances=g.variances)
        for m, g in ((P, P.components.gaussian), (Q, Q.components.gaussian))
    )
    np.testing.assert_allclose(
        component_cost(P, Q, cost="hellinger"), component_cost(p, q, cost="hellinger"), rtol=1e-12
    )


# ----------------------------------------------------------------------------------------------- sizes and checks
def test_different_references_are_brought_to_one_size():
    P = mixture("poisson", 0, reference=100.0)
    Q = Mixture.from_params("poisson", P.weights, rates=4.0 * P.components.rates, reference=400.0)
    C = component_cost(P, Q)
    np.testing.assert_allclose(np.diag(C), 0.0, atol=1e-9)
    np.testing.assert_allclose(np.diag(component_cost(P, Q, cost="kl")), 0.0, atol=1e-9)


REFUSED = [
    (("poisson", {}), ("gamma", {}), {}, "source is a mixture of family 'poisson' and target of 'gamma'"),
    (("poisson", {}), ("poisson", {"d": 5}), {}, "source has d=4 features and target d=5"),
    (
        ("poisson", {"feature_names": list("abcd")}),
        ("poisson", {"feature_names": list("abdc")}),
        {},
        "feature 2 is 'c' in the source and 'd' in the target",
    ),
    (("poisson", {"reference": 9.0}), ("poisson", {}), {}, "the source was fitted with size factors and the target"),
    (("multinomial", {}), ("multinomial", {}), {}, "use cost='kl', 'jeffreys' or 'hellinger'"),
    (("poisson", {}), ("poisson", {}), {"cost": "entropic", "epsilon": 0.1}, "no closed entropic plan"),
    (("gamma", {}), ("gamma", {}), {"cost": "entropic"}, "no closed entropic plan"),
]


@pytest.mark.parametrize(("first", "second", "keywords", "message"), REFUSED)
def test_what_cannot_be_compared_is_refused_by_a_sentence(first, second, keywords, message):
    P, Q = mixture(first[0], 0, **first[1]), mixture(second[0], 1, **second[1])
    with pytest.raises(ValueError, match=re.escape(message)):
        component_cost(P, Q, **keywords)


def test_negative_binomials_of_different_dispersion_have_no_divergence():
    P = mixture("negative_binomial", 0)
    Q = mixture("negative_binomial", 1, dispersion=np.full(4, 0.7))
    for cost in ("kl", "jeffreys", "hellinger"):
        with pytest.raises(ValueError, match=r"dispersion of feature 0 is 0\.2 on one side and 0\.7 on the other"):
            component_cost(P, Q, cost=cost)
    assert np.isfinite(component_cost(P, Q)).all()


@pytest.mark.parametrize("keywords", [{"inner_reg": 0.01}, {"epsilon": 0.1}])
def test_an_inner_temperature_is_refused_for_product_families(keywords):
    P, Q = mixture("poisson", 0), mixture("poisson", 1)
    for call in (omt.transport, inner_epsilon):
        with pytest.raises(ValueError, match="'poisson' has no closed entropic plan inside a pair"):
            call(P, Q, **keywords)


def test_a_plan_between_cells_is_refused_with_the_resolution_that_works():
    P, Q = mixture("poisson", 0), mixture("poisson", 1)
    plan = omt.transport(P, Q)
    X, Y = P.sample(20, 0), Q.sample(30, 1)
    with pytest.raises(ValueError, match="use resolution='component'"):
        plan.plan(X, Y, resolution="cell")
    assert plan.plan(X, Y).marginal_error() == pytest.approx((0.0, 0.0), abs=1e-12)


# ------------------------------------------------------------------------------------------------------------ maps
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_images_of_the_source_are_distributed_like_the_target(family):
    P, Q = mixture(family, 0), mixture(family, 1, 2)
    plan = omt.transport(P, Q)
    n = 20_000
    X, Y = P.sample(n, 0), Q.sample(n, 1)
    mapped = plan.map(X, kind="sample", rng=2)
    for g in range(P.d):
        if family in COUNTS:
            top = int(max(mapped[:, g].max(), Y[:, g].max())) + 1
            table = np.stack([np.bincount(Z[:, g].astype(int), minlength=top) for Z in (mapped, Y)])
            assert stats.chi2_contingency(table[:, table.sum(axis=0) > 20]).pvalue > 1e-4
        else:
            assert stats.ks_2samp(mapped[:, g], Y[:, g]).pvalue > 1e-4


@pytest.mark.parametrize("family", ["poisson", "negative_binomial", "gamma", "exponential"])
def test_barycentric_images_of_the_source_have_the_mean_of_the_target(family):
    P, Q = mixture(family, 0), mixture(family, 1, 2)
    X = P.sample(40_000, 0)
    mapped = omt.transport(P, Q).map(X)
    error = np.abs(mapped.mean(axis=0) - Q.mean()) / (mapped.std(axis=0) / np.sqrt(len(X)))
    assert (error < 5.0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_mapping_a_mixture_of_far_components_to_itself_is_the_identity(family):
    rng = np.random.default_rng(0)
    names = {"poisson": "rates", "negative_binomial": "means"}
    if family in names:
        level = np.array([[2.0, 90.0, 5.0], [90.0, 2.0, 5.0]])
        more = {"dispersion": 0.1} if family == "negative_binomial" else {}
        P = Mixture.from_params(family, [0.4, 0.6], **{names[family]: level}, **more)
    else:
        P = mixture(family, 0, 1, 3)
    X = P.sample(200, rng)
    np.testing.assert_allclose(omt.transport(P, P, reg=1e-4).map(X), X, rtol=1e-6, atol=1e-6)


def test_lognormal_map_is_the_gaussian_map_of_the_logarithms():
    P, Q = mixture("lognormal", 0), mixture("lognormal", 1)
    p, q = (
        Mixture.from_params("gaussian", m.weights, means=g.means, variances=g.variances)
        for m, g in ((P, P.components.gaussian), (Q, Q.components.gaussian))
    )
    X = P.sample(50, 0)
    for kind in ("barycentric", "mode"):
        expected = np.exp(omt.transport(p, q).map(np.log(X), kind))
        np.testing.assert_allclose(omt.transport(P, Q).map(X, kind), expected, rtol=1e-10)


@pytest.mark.parametrize("family", COUNTS)
@pytest.mark.parametrize("kind", ["barycentric", "mode", "sample"])
def test_sparse_samples_have_the_images_of_dense_ones(family, kind):
    P, Q = mixture(family, 0), mixture(family, 1)
    plan = omt.transport(P, Q)
    X = P.sample(300, 0)
    dense, thin = (plan.map(Z, kind, rng=3) for Z in (X, sparse.csr_array(X)))
    np.testing.assert_allclose(thin, dense, rtol=1e-12)


def test_sparse_samples_are_read_in_blocks_and_never_whole(monkeypatch):
    P, Q = mixture("poisson", 0, 2, 40, scale=0.05), mixture("poisson", 1, 2, 40, scale=0.05)
    X = sparse.csr_array(P.sample(1000, 0))
    largest = []
    dense = sparse.csr_array.toarray

    def watched(self, *args, **kwargs):
        largest.append(self.shape[0])
        return dense(self, *args, **kwargs)

    plan = omt.transport(P, Q)
    expected = plan.map(X, kind="sample", rng=0).mean(axis=0)
    monkeypatch.setattr("omt.pairs.maps._BLOCK_ENTRIES", 4000)
    monkeypatch.setattr(sparse.csr_array, "toarray", watched)
    mapped = plan.map(X, kind="sample", rng=0)
    assert max(largest) <= 100
    np.testing.assert_allclose(mapped.mean(axis=0), expected, atol=0.1)
    largest.clear()
    plan.map(X)
    assert not largest


def test_a_barycentric_image_is_the_average_over_components():
    P, Q = mixture("poisson", 0), mixture("poisson", 1, 2)
    W = np.random.default_rng(0).dirichlet(np.ones(6)).reshape(3, 2)
    X = P.sample(5, 0)
    membership = P.responsibilities(X) * W.sum(axis=1) / P.weights
    membership /= membership.sum(axis=1, keepdims=True)
    expected = np.zeros_like(X)
    for k in range(3):
        for l in range(2):
            source, target = (CountLaws(c.rates[i], np.zeros(4)) for c, i in ((P.components, k), (Q.components, l)))
            image = np.stack([count_mean(x, source, target) for x in X])
            expected += membership[:, k, None] * W[k, l] / W[k].sum() * image
    np.testing.assert_allclose(barycentric_map(X, P, Q, W), expected, rtol=1e-10)


@pytest.mark.parametrize("family", ["poisson", "negative_binomial"])
def test_a_cell_of_any_size_moves_between_the_laws_of_its_size(family):
    P, Q = mixture(family, 0, 1), mixture(family, 1, 1)
    name = "rates" if family == "poisson" else "means"
    x = P.sample(1, 5) * 3.0 + 1.0
    total = float(x.sum())
    scaled = []
    for m in (P, Q):
        level = getattr(m.components, name)
        more = {"dispersion": m.components.dispersion} if family == "negative_binomial" else {}
        scaled.append(
            (
                Mixture.from_params(family, [1.0], **{name: level}, **more, reference=10.0),
                Mixture.from_params(family, [1.0], **{name: level * total / 10.0}, **more),
            )
        )
    with_sizes = omt.transport(scaled[0][0], scaled[1][0]).map(x)
    np.testing.assert_allclose(with_sizes, omt.transport(scaled[0][1], scaled[1][1]).map(x), rtol=1e-10)


@pytest.mark.parametrize("kind", ["barycentric", "sample", "mode"])
def test_a_cell_without_counts_stays_without(kind):
    P, Q = mixture("poisson", 0, reference=9.0), mixture("poisson", 1, reference=9.0)
    assert not omt.transport(P, Q).map(np.zeros((2, 4)), kind, rng=0).any()


@pytest.mark.parametrize(
    ("family", "X", "message"),
    [
        ("poisson", np.array([[1.0, 0.5, 0.0, 0.0]]), "X has 0.5 in row 0, column 1"),
        ("negative_binomial", np.array([[0.0, 0.0, 0.0, -1.0]]), "X has -1 in row 0, column 3"),
        ("bernoulli", np.array([[0.0, 2.0, 0.0, 0.0]]), "X has 2 in row 0, column 1"),
        ("gamma", np.array([[1.0, 1.0, 0.0, 1.0]]), "X has 0 in row 0, column 2"),
        ("poisson", np.zeros((3, 5)), r"X has shape (3, 5); the source mixture has d=4 features"),
    ],
)
def test_samples_outside_of_the_support_are_refused_by_row_and_column(family, X, message):
    P, Q = mixture(family, 0), mixture(family, 1)
    W = np.full((3, 3), 1 / 9)
    for move in (barycentric_map, mode_map, lambda *a: sample_map(*a, 0.0, np.random.default_rng(0))):
        with pytest.raises(ValueError, match=re.escape(message)):
            move(X, P, Q, W)
