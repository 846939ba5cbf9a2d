"""The mixture: its densities and moments against scipy and scikit-learn, its files, and what it refuses."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pytest
from scipy import integrate, special, stats
from sklearn.mixture import GaussianMixture

from omt.families import GaussianComponents
from omt.fitting.em import fit_mixture
from omt.mixture import Mixture


@pytest.fixture
def mixture(random_mixture):
    return random_mixture(0, 4, 3)


@pytest.fixture
def joint(mixture):
    """Log of weight times density, by scipy."""

    def of(X):
        laws = zip(mixture.components.means, mixture.components.covariance_matrices(), strict=True)
        return np.stack([stats.multivariate_normal(m, C).logpdf(X) for m, C in laws], axis=1) + np.log(mixture.weights)

    return of


def test_log_prob_is_the_log_sum_of_weighted_densities(mixture, joint):
    X = mixture.sample(5000, 1)
    np.testing.assert_allclose(mixture.log_prob(X), special.logsumexp(joint(X), axis=1), rtol=1e-10)


def test_density_integrates_to_one():
    m = Mixture.from_gaussians([0.3, 0.7], [[-1.0], [2.0]], [[[0.5]], [[2.0]]])
    total = integrate.quad(lambda x: np.exp(m.log_prob(np.array([[x]]))[0]), -20, 25, points=[-1, 2])[0]
    assert total == pytest.approx(1.0, abs=1e-9)


def test_responsibilities_follow_bayes_rule(mixture, joint):
    X = mixture.sample(5000, 1)
    np.testing.assert_allclose(mixture.responsibilities(X), special.softmax(joint(X), axis=1), atol=1e-12)


def test_top_k_responsibilities_are_the_largest_of_the_dense_ones(mixture):
    X = mixture.sample(5000, 1)
    trace, dense = mixture.responsibilities(X, top_k=2), mixture.responsibilities(X)
    assert np.array_equal(trace.indices[:, 0], dense.argmax(axis=1))
    np.testing.assert_allclose(trace.weights.sum(axis=1), np.sort(dense, axis=1)[:, -2:].sum(axis=1), atol=1e-6)


def test_mean_and_covariance_are_those_of_many_samples(mixture):
    n = 100_000
    X = mixture.sample(n, 3)
    assert (np.abs(X.mean(axis=0) - mixture.mean()) < 5 * np.sqrt(np.diag(mixture.cov()) / n)).all()
    np.testing.assert_allclose(np.cov(X.T), mixture.cov(), atol=0.03 * np.trace(mixture.cov()))


def test_sampled_labels_have_the_weights(mixture):
    _, labels = mixture.sample(100_000, np.random.default_rng(0), return_labels=True)
    assert stats.chisquare(np.bincount(labels, minlength=4), 100_000 * mixture.weights).pvalue > 1e-3


def test_the_same_seed_draws_the_same_samples(mixture):
    assert np.array_equal(mixture.sample(10, 5), mixture.sample(10, np.random.default_rng(5)))


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_sklearn_mixtures_come_and_go_unchanged(mixture, kind):
    X = mixture.sample(500, 0)
    model = GaussianMixture(3, covariance_type=kind, random_state=0).fit(X)
    ours = Mixture.from_sklearn(model)
    np.testing.assert_allclose(ours.log_prob(X), model.score_samples(X), rtol=1e-9)
    back = ours.to_sklearn()
    np.testing.assert_allclose(back.score_samples(X), model.score_samples(X), rtol=1e-9)
    np.testing.assert_allclose(back.precisions_, model.precisions_, rtol=1e-6, atol=1e-9)


def test_low_rank_mixture_goes_to_sklearn_as_full():
    rng = np.random.default_rng(0)
    g = GaussianComponents(
        rng.normal(size=(2, 4)), "lowrank", factors=rng.normal(size=(2, 4, 1)), noise=np.ones((2, 4))
    )
    m = Mixture(np.full(2, 0.5), g)
    X = m.sample(50, 0)
    np.testing.assert_allclose(m.to_sklearn().score_samples(X), m.log_prob(X), rtol=1e-10)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_bic_is_that_of_sklearn(mixture, kind):
    X = mixture.sample(500, 0)
    model = GaussianMixture(3, covariance_type=kind, random_state=0).fit(X)
    assert Mixture.from_sklearn(model).bic(X) == pytest.approx(model.bic(X), rel=1e-10)


def test_icl_adds_twice_the_entropy_of_the_assignments(mixture):
    X = mixture.sample(500, 0)
    entropy = special.entr(mixture.responsibilities(X)).sum()
    assert mixture.icl(X) == pytest.approx(mixture.bic(X) + 2 * entropy, rel=1e-12)


def test_usage_reports_shares_and_dead_components():
    m = Mixture.from_gaussians([0.25, 0.25, 0.5], [[0.0], [10.0], [1e3]], np.ones((3, 1, 1)))
    usage = m.usage(np.array([[0.0], [0.1], [10.0], [10.1]]))
    np.testing.assert_allclose(usage.weights, [0.5, 0.5, 0.0], atol=1e-9)
    assert usage.entropy == pytest.approx(np.log(2))
    assert usage.effective_number == pytest.approx(2.0)
    assert usage.dead.tolist() == [2]


def test_a_mixture_is_frozen(mixture):
    with pytest.raises(AttributeError):
        mixture.weights = np.ones(4)
    with pytest.raises(ValueError, match="read-only"):
        mixture.weights[0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        mixture.components.means[0] = 1.0


# ---------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "lowrank"])
def test_a_saved_mixture_loads_as_it_was(tmp_path, mixture, kind):
    X = mixture.sample(300, 0)
    before = fit_mixture(X, labels=["b"] * 100 + ["a"] * 200, covariance=kind)
    before.save(tmp_path / "m")
    after = Mixture.load(tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["meta.json", "mixture.npz"]
    assert after.names == ("a", "b")
    assert after.report == before.report or after.report.to_dict() == before.report.to_dict()
    assert np.array_equal(after.log_prob(X), before.log_prob(X))


def test_a_mixture_survives_h5ad(tmp_path, mixture):
    fitted = fit_mixture(mixture.sample(300, 0), 2)
    data = ad.AnnData(np.zeros((2, 1)))
    data.uns["omt"] = fitted.to_dict()
    data.write_h5ad(tmp_path / "x.h5ad")
    again = Mixture.from_dict(ad.read_h5ad(tmp_path / "x.h5ad").uns["omt"])
    assert again.names == fitted.names
    assert np.array_equal(again.components.covariance_matrices(), fitted.components.covariance_matrices())
    assert again.report.to_dict() == fitted.report.to_dict()


def test_saving_over_a_mixture_replaces_it(tmp_path, random_mixture):
    random_mixture(0, 4, 3).save(tmp_path / "m")
    random_mixture(1, 2, 2).save(tmp_path / "m")
    assert Mixture.load(tmp_path / "m").K == 2


def test_a_failed_write_leaves_the_old_mixture(tmp_path, random_mixture, monkeypatch):
    random_mixture(0, 4, 3).save(tmp_path / "m")

    def broken(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        random_mixture(1, 2, 2).save(tmp_path / "m")
    assert Mixture.load(tmp_path / "m").K == 4
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["meta.json", "mixture.npz"]


def test_an_unknown_format_version_is_refused_by_number(tmp_path, mixture):
    stored = {**mixture.to_dict(), "format": 7}
    with pytest.raises(ValueError, match="stored in format 7; this version of omt reads format 1"):
        Mixture.from_dict(stored)
    mixture.save(tmp_path / "m")
    file = tmp_path / "m" / "mixture.npz"
    with np.load(file) as found:
        arrays = dict(found)
    meta = json.loads(str(arrays["meta"]))
    arrays["meta"] = np.array(json.dumps({**meta, "format": 7}))
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match="stored in format 7; this version of omt reads format 1"):
        Mixture.load(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_a_sentence(tmp_path, mixture, keep):
    mixture.save(tmp_path / "m")
    file = tmp_path / "m" / "mixture.npz"
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ValueError, match=r"mixture.npz is not a readable npz file \(truncated or damaged\)"):
        Mixture.load(tmp_path / "m")


def test_a_pickle_is_never_opened(tmp_path, mixture):
    mixture.save(tmp_path / "m")
    np.savez(tmp_path / "m" / "mixture.npz", meta=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="holds Python objects, which are never unpickled"):
        Mixture.load(tmp_path / "m")


def test_a_foreign_npz_is_refused(tmp_path, mixture):
    mixture.save(tmp_path / "m")
    np.savez(tmp_path / "m" / "mixture.npz", other=np.ones(3))
    with pytest.raises(ValueError, match="was not written by omt"):
        Mixture.load(tmp_path / "m")


def test_an_array_that_is_neither_number_nor_text_is_refused(tmp_path, mixture):
    mixture.save(tmp_path / "m")
    np.savez(tmp_path / "m" / "mixture.npz", meta=np.array(["2020-01-01"], dtype="datetime64[D]"))
    with pytest.raises(ValueError, match=r"array meta.npy has dtype datetime64\[D\]; omt stores numbers and text"):
        Mixture.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": np.array(["a"])}, "this stored mixture has 1 names and 4 components"),
        ({"parameters": None}, r"this stored mixture was not written by omt, or is damaged \(AttributeError"),
    ],
)
def test_a_stored_mixture_that_was_changed_is_refused(mixture, change, message):
    with pytest.raises(ValueError, match=message):
        Mixture.from_dict(mixture.to_dict() | change)


def test_a_sample_without_density_is_refused_by_row():
    mixture = Mixture.from_gaussians([0.5, 0.5], [[0.0], [1.0]], np.full((2, 1, 1), 1e-20))
    X = np.array([[0.0], [1e149], [1.0]])
    with pytest.raises(ValueError, match="row 1 of X is so far from every component that it has no density"):
        mixture.responsibilities(X)


def test_a_missing_folder_is_named(tmp_path, mixture):
    with pytest.raises(FileNotFoundError, match="holds no mixture"):
        Mixture.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist"):
        mixture.save(tmp_path / "nowhere" / "m")


def test_an_unknown_family_is_refused(mixture):
    with pytest.raises(ValueError, match="of family 'cauchy'; this version of omt knows gaussian"):
        Mixture.from_dict({**mixture.to_dict(), "family": "cauchy"})


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("weights", "names", "message"),
    [
        ([0.5, 0.5], ["a", "b", "c"], r"weights has shape \(2,\); there are 3 components"),
        ([0.5, 0.5, 0.0], ["a", "b", "c"], r"weights\[2\] \(component 'c'\) is 0; every weight must be > 0"),
        ([0.5, -0.5, 1.0], ["a", "b", "c"], r"weights\[1\] \(component 'b'\) is -0.5"),
        ([0.5, 0.5, 0.5], ["a", "b", "c"], "weights sum to 1.5; they must sum to 1"),
        ([0.2, 0.2, 0.6], ["a", "b"], "names has 2 entries; there are 3 components"),
        ([0.2, 0.2, 0.6], ["a", "b", "a"], "names has 'a' twice"),
    ],
)
def test_malformed_mixtures_are_refused_with_the_reason(weights, names, message):
    with pytest.raises(ValueError, match=message):
        Mixture.from_gaussians(weights, np.zeros((3, 1)), np.ones((3, 1, 1)), names=names)


def test_samples_of_another_width_are_refused(mixture):
    with pytest.raises(ValueError, match="X has 2 features; this mixture has d = 3"):
        mixture.log_prob(np.zeros((4, 2)))


def test_an_unfitted_sklearn_model_is_refused():
    with pytest.raises(TypeError, match="GaussianMixture is not a fitted"):
        Mixture.from_sklearn(GaussianMixture(2))
