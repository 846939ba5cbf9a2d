"""Fitting: against scikit-learn, known mixtures and itself (other chunks, other storage, a killed run)."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import tracemalloc

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture

from omt.families import Gaussian
from omt.families.gaussian import COVARIANCE_TYPES
from omt.fitting.em import em_step, fit_mixture
from omt.fitting.sweeps import Model
from omt.mixture import Mixture

SKLEARN_TYPES = ["full", "tied", "diag", "spherical"]


@pytest.fixture
def separated(random_mixture):
    """A mixture of four components far apart, 2000 samples of it and their labels."""
    mixture = random_mixture(0, 4, 5, spread=6.0)
    return mixture, *mixture.sample(2000, 1, return_labels=True)


@pytest.fixture
def overlapping(random_mixture):
    mixture = random_mixture(3, 5, 3, spread=1.0)
    return mixture.sample(1500, 2)


def parameters(mixture):
    g = mixture.components
    return [mixture.weights, g.means, g.covariance_matrices()]


def assert_same(a, b, *, atol):
    for x, y in zip(parameters(a), parameters(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=0)


# --------------------------------------------------------------------------------------------------- what EM must be
@pytest.mark.parametrize("kind", SKLEARN_TYPES)
def test_each_of_ten_iterations_gives_the_parameters_of_sklearn(overlapping, kind):
    X = overlapping
    start = GaussianMixture(4, covariance_type=kind, random_state=0, max_iter=1, reg_covar=0.0)
    with pytest.warns(ConvergenceWarning):
        start.fit(X)
    ours, family = Mixture.from_sklearn(start), Gaussian(kind, shrinkage=0, floor=0)
    peer = GaussianMixture(4, covariance_type=kind, max_iter=1, reg_covar=0.0, warm_start=True)
    peer.weights_, peer.means_ = start.weights_, start.means_
    for name in ("covariances_", "precisions_cholesky_", "precisions_"):
        setattr(peer, name, getattr(start, name))
    peer.converged_, peer.lower_bound_ = True, -np.inf
    for _ in range(10):
        ours = em_step(X, ours, family=family)
        _, log_resp = peer._e_step(X)
        peer._m_step(X, log_resp)
        assert_same(ours, Mixture.from_sklearn(peer), atol=1e-6)


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_log_likelihood_never_falls_without_a_prior(overlapping, kind):
    family = Gaussian(kind, rank=1 if kind == "lowrank" else None, shrinkage=0)
    mixture = fit_mixture(overlapping, 4, covariance=kind, n_init=1, tol=1e-2)
    values = []
    for _ in range(40):
        mixture = em_step(overlapping, mixture, family=family)
        values.append(mixture.report.log_likelihood)
    assert np.diff(values)[1:].min() >= -1e-10


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_objective_with_the_prior_never_falls(overlapping, kind):
    report = fit_mixture(overlapping, 6, covariance=kind, n_init=1, tol=1e-7, max_iter=2000).report
    assert len(report.history) > 5
    assert np.diff(report.history).min() >= -1e-10


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_a_separated_mixture_is_recovered(separated, kind):
    truth, X, labels = separated
    fitted = fit_mixture(X, 4, covariance=kind)
    assert adjusted_rand_score(labels, fitted.responsibilities(X).argmax(axis=1)) >= 0.98
    for k in range(4):
        nearest = np.linalg.norm(truth.components.means - fitted.components.means[k], axis=1).argmin()
        error = np.sqrt(np.diag(truth.components.covariances[nearest]) / (truth.weights[nearest] * 2000))
        z = (fitted.components.means[k] - truth.components.means[nearest]) / error
        # Three standard errors for one number; the largest of twenty is allowed four.
        assert np.abs(z).max() < 4


def test_stepwise_em_recovers_a_separated_mixture(random_mixture):
    truth = random_mixture(0, 4, 5, spread=6.0)
    X, labels = truth.sample(60_000, 1, return_labels=True)
    X, labels = X[np.argsort(labels, kind="stable")], np.sort(labels)  # sorted by group: file order would mislead it
    fitted = fit_mixture(X, 4)
    assert fitted.report.method == "stepwise"
    assert adjusted_rand_score(labels, fitted.responsibilities(X).argmax(axis=1)) >= 0.98
    assert fitted.log_prob(X).mean() > truth.log_prob(X).mean() - 1e-3


def test_stepwise_em_ends_near_the_optimum_of_batch_em(random_mixture):
    X = random_mixture(3, 4, 3, spread=2.0).sample(55_000, 2)
    fitted = fit_mixture(X, 4)
    further = fitted
    for _ in range(30):
        further = em_step(X, further)
    assert further.log_prob(X).mean() - fitted.log_prob(X).mean() < 2e-3


def test_held_out_likelihood_is_that_of_sklearn_or_better(random_mixture):
    truth = random_mixture(5, 12, 4, spread=2.0)
    X, held_out = truth.sample(6000, 1), truth.sample(6000, 2)
    peer = GaussianMixture(12, n_init=3, random_state=0).fit(X)
    assert fit_mixture(X, 12).log_prob(held_out).mean() >= peer.score(held_out) - 0.05


def test_split_and_merge_leaves_the_optimum_in_which_two_groups_share_a_component():
    from omt.chunks import as_source
    from omt.fitting.iterate import State, batch
    from omt.fitting.progress import Progress
    from omt.fitting.splitmerge import improve
    from omt.fitting.supervision import Supervision
    from omt.fitting.sweeps import Data, start

    rng = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2], 300)
    X = rng.normal(size=(900, 2)) + np.array([[0.0, 0.0], [0.0, 8.0], [40.0, 0.0]])[truth]
    # One component for the two near groups, two for the far one.
    groups = np.where(truth < 2, 0, 1 + (X[:, 0] > 40))
    data = Data(as_source(X), 4096, np.dtype(float))
    fixed = Data(data.source, 4096, data.dtype, None, Supervision(groups, np.arange(3)))
    state = State.of(*start(fixed, Gaussian(), 3))
    batch(data, Gaussian(), state, 50, 0.0, None, Progress(False))
    better = improve(data, Gaussian(), state, 0, Progress(False))
    found = Mixture(better.model.weights, better.model.components)
    assert better.log_likelihood > state.log_likelihood + 0.1
    assert adjusted_rand_score(truth, found.responsibilities(X).argmax(axis=1)) == 1.0


# --------------------------------------------------------------------------------------------------------- invariance
def test_the_same_seed_gives_the_same_bits(overlapping):
    assert_same(fit_mixture(overlapping, 4, random_state=3), fit_mixture(overlapping, 4, random_state=3), atol=0)


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_chunk_size_changes_nothing_above_1e_8(separated, kind):
    _, X, _ = separated
    assert_same(
        fit_mixture(X, 4, covariance=kind, batch_size=4096),
        fit_mixture(X, 4, covariance=kind, batch_size=97),
        atol=1e-8,
    )


@pytest.mark.parametrize("kind", ["diag", "spherical"])
def test_csr_gives_what_dense_gives(separated, kind):
    X = np.maximum(separated[1], 0.0)
    assert_same(fit_mixture(X, 4, covariance=kind), fit_mixture(sparse.csr_matrix(X), 4, covariance=kind), atol=1e-8)


def test_a_file_gives_what_memory_gives(separated, tmp_path):
    X = separated[1]
    memory = fit_mixture(X, 4)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        assert_same(memory, fit_mixture(file.create_dataset("X", data=X), 4), atol=1e-8)
    ad.AnnData(X).write_h5ad(tmp_path / "x.h5ad")
    content = (tmp_path / "x.h5ad").read_bytes()
    backed = ad.read_h5ad(tmp_path / "x.h5ad", backed="r")
    assert_same(memory, fit_mixture(backed.X, 4), atol=1e-8)
    backed.file.close()
    assert (tmp_path / "x.h5ad").read_bytes() == content
    assert_same(memory, fit_mixture(lambda: (X[i : i + 300] for i in range(0, 2000, 300)), 4), atol=1e-8)


def test_units_of_the_data_do_not_matter(separated):
    X = separated[1]
    a, b = fit_mixture(X, 4), fit_mixture(X * 1e-4 + 7.0, 4)
    np.testing.assert_allclose(b.components.means, a.components.means * 1e-4 + 7.0, rtol=1e-6)


def test_float32_fits_like_float64(separated):
    X = separated[1]
    a, b = fit_mixture(X, 4), fit_mixture(X, 4, dtype="float32")
    assert_same(a, b, atol=1e-3)


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_responsibilities_in_float32_are_off_by_1e_4_at_most(overlapping, kind):
    X = overlapping.astype(np.float32)
    fitted = fit_mixture(X, 5, covariance=kind)
    single = fitted.components.log_prob(X, dtype="float32") + np.log(fitted.weights).astype(np.float32)
    assert single.dtype == np.float32
    R = np.exp(single - np.logaddexp.reduce(single, axis=1, keepdims=True))
    np.testing.assert_allclose(R, fitted.responsibilities(X), atol=1e-4)


def test_a_weight_of_two_counts_like_two_samples(separated):
    X = separated[1][:300]
    labels = separated[2][:300]
    weights = np.where(np.arange(300) % 3 == 0, 2.0, 1.0)
    family = Gaussian("full", shrinkage=0)
    twice = np.concatenate([X, X[::3]]), np.concatenate([labels, labels[::3]])
    assert_same(
        fit_mixture(X, labels=labels, sample_weight=weights, family=family),
        fit_mixture(twice[0], labels=twice[1], family=family),
        atol=1e-10,
    )


def test_memory_of_a_fit_from_a_file_does_not_hold_the_data(tmp_path):
    rng = np.random.default_rng(0)
    centres = 5 * rng.normal(size=(5, 50))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("X", (200_000, 50), dtype="float32")
        for i in range(0, 200_000, 20_000):
            data[i : i + 20_000] = rng.normal(size=(20_000, 50)) + centres[rng.integers(5, size=20_000)]
        tracemalloc.start()
        fit_mixture(data, 5, n_init=1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # The data are 38 MiB as they are and 76 as float64; the subsample of 20 000 rows is 8.
    assert peak < 32 * 2**20


# ------------------------------------------------------------------------------------------------------------- labels
def test_labels_give_one_component_each_with_its_mean_and_share(separated):
    _, X, labels = separated
    names = np.array(["d", "b", "a", "c"])[labels]
    fitted = fit_mixture(X, labels=names)
    assert fitted.names == ("a", "b", "c", "d")
    assert fitted.report.method == "labels"
    for k, name in enumerate(fitted.names):
        np.testing.assert_allclose(fitted.components.means[k], X[names == name].mean(axis=0), rtol=1e-10)
        assert fitted.weights[k] == pytest.approx(np.mean(names == name))


def test_order_of_a_categorical_is_kept_and_unused_categories_are_dropped(separated):
    _, X, labels = separated
    series = pd.Series(pd.Categorical.from_codes(labels, ["d", "b", "a", "c", "unused"]))
    assert fit_mixture(X, labels=series).names == ("d", "b", "a", "c")


def test_unlabelled_samples_are_shared_out_by_bayes_rule(separated):
    _, X, labels = separated
    partly = pd.Series(labels).astype(object)
    partly[::2] = None
    fitted = fit_mixture(X, labels=partly)
    assert fitted.names == ("0", "1", "2", "3")
    assert_same(fitted, fit_mixture(X, labels=labels), atol=1e-3)


def test_numeric_labels_with_nan_keep_whole_names(separated):
    _, X, labels = separated
    partly = labels.astype(float)
    partly[5] = np.nan
    assert fit_mixture(X, labels=partly).names == ("0", "1", "2", "3")


def test_several_components_a_label_stay_within_their_label():
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    part = rng.integers(4, size=1000)
    X = centres[part] + rng.normal(size=(1000, 2))
    fitted = fit_mixture(X, labels=np.where(part < 2, "low", "high"), n_per_label=2)
    assert fitted.names == ("high/0", "high/1", "low/0", "low/1")
    assert adjusted_rand_score(part, fitted.responsibilities(X).argmax(axis=1)) > 0.99
    assert (fitted.components.means[:2, 1] > 9).all()
    assert (fitted.components.means[2:, 1] < 1).all()


def test_soft_labels_give_weighted_means(separated):
    _, X, _ = separated
    R = np.random.default_rng(0).dirichlet(np.ones(3), size=2000)
    fitted = fit_mixture(X, responsibilities=pd.DataFrame(R, columns=["x", "y", "z"]))
    assert fitted.names == ("x", "y", "z")
    np.testing.assert_allclose(fitted.components.means, R.T @ X / R.sum(axis=0)[:, None], rtol=1e-10)
    np.testing.assert_allclose(fitted.weights, R.mean(axis=0), rtol=1e-10)


def test_unknown_rows_of_soft_labels_are_filled_by_bayes_rule(separated):
    _, X, labels = separated
    R = np.eye(4)[labels]
    R[::2] = np.nan
    assert_same(fit_mixture(X, responsibilities=R), fit_mixture(X, labels=labels), atol=1e-3)


def test_objective_with_partial_soft_labels_never_falls(overlapping):
    R = np.random.default_rng(0).dirichlet(np.ones(3), size=1500)
    R[::2] = np.nan
    history = fit_mixture(overlapping, responsibilities=R, tol=1e-6, max_iter=1000).report.history
    assert len(history) > 3
    assert np.diff(history).min() >= -1e-10


def test_a_component_that_lost_its_samples_gets_none_without_a_warning():
    with np.errstate(divide="raise"):
        logs = Model(np.array([0.25, 0.75, 0.0]), Gaussian()).log_weights
    assert np.exp(logs).tolist() == pytest.approx([0.25, 0.75, 0.0])


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_a_label_with_one_sample_gets_a_finite_component(separated, kind):
    _, X, labels = separated
    names = labels.astype(str).astype(object)
    names[7] = "rare"
    with pytest.warns(UserWarning, match="labels with one sample: rare; what one .* is taken from all samples"):
        fitted = fit_mixture(X, labels=names, covariance=kind)
    k = fitted.names.index("rare")
    np.testing.assert_allclose(fitted.components.means[k], X[7])
    assert np.isfinite(fitted.components.log_prob(X)).all()
    assert np.isfinite(fitted.components.kl(fitted.components)).all()


# ------------------------------------------------------------------------------------------------------ hard inputs
@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_duplicates_and_a_constant_feature_are_fine(kind):
    X = np.repeat(np.random.default_rng(0).normal(size=(10, 3)), 20, axis=0)
    X[:, 1] = 5.0
    fitted = fit_mixture(X, 3, covariance=kind)
    assert np.isfinite(fitted.log_prob(X)).all()


def test_identical_samples_give_a_mixture():
    fitted = fit_mixture(np.ones((20, 2)), 2)
    np.testing.assert_allclose(fitted.mean(), [1.0, 1.0])
    assert np.isfinite(fitted.log_prob(np.ones((1, 2)))).all()


def test_as_many_components_as_samples_are_fine():
    X = np.random.default_rng(0).normal(size=(6, 2))
    assert np.isfinite(fit_mixture(X, 6).log_prob(X)).all()


def test_fewer_samples_than_features_are_fine():
    X = np.random.default_rng(0).normal(size=(30, 60))
    assert np.isfinite(fit_mixture(X, 2).log_prob(X)).all()


def test_two_hundred_features_fit(random_mixture):
    X, labels = random_mixture(0, 3, 200, spread=1.0).sample(1500, 0, return_labels=True)
    assert adjusted_rand_score(labels, fit_mixture(X, 3).responsibilities(X).argmax(axis=1)) >= 0.98


def test_an_empty_component_is_placed_anew_and_then_given_up():
    from omt.families.base import Statistics
    from omt.fitting.sweeps import Sweep, refill

    family = Gaussian("full", shrinkage=0)
    second = np.array([[[100.0]], [[0.0]]])
    sums = {"weight": np.array([100.0, 0.0]), "first": np.zeros((2, 1)), "second": second}
    statistics = Statistics(sums, np.zeros((2, 1)))
    found = Sweep(statistics, 0.0, [(-50.0, np.array([9.0]))])
    prior = family.prior(statistics)
    attempts = np.zeros(2, dtype=np.int64)
    for _ in range(2):
        statistics.sums["weight"][1] = 0.0
        keep, placed = refill(
            family, Sweep(statistics, 0.0, [(-50.0, np.array([9.0]))]), prior, attempts, supervised=False
        )
        assert keep.all()
        assert placed == 1
        assert family.m_step(statistics, prior).means[1, 0] == pytest.approx(9.0)
    statistics.sums["weight"][1] = 0.0
    keep, placed = refill(family, found, prior, attempts, supervised=False)
    assert keep.tolist() == [True, False]


def test_giving_up_a_component_warns():
    from omt.families import GaussianComponents
    from omt.fitting.iterate import State
    from omt.fitting.sweeps import Model

    g = GaussianComponents(np.zeros((2, 1)), "spherical", variances=np.ones(2))
    state = State.of(Model(np.full(2, 0.5), g), {})
    with pytest.warns(UserWarning, match=r"1 component\(s\) had no samples left and were removed; 1 remain"):
        state.drop(np.array([True, False]))
    assert state.removed == 1


def test_an_unconverged_fit_warns(overlapping):
    with pytest.warns(ConvergenceWarning, match="after max_iter=1 iterations"):
        report = fit_mixture(overlapping, 5, max_iter=1, tol=0.0).report
    assert not report.converged


# ------------------------------------------------------------------------------------------- interruption and progress
class Interrupted:
    """Blocks of X; raises ``error`` in the middle of a pass, the ``passes``-th after the checkpoint is there."""

    def __init__(self, X, checkpoint, passes, act):
        self.X, self.checkpoint, self.left, self.act = X, checkpoint, passes, act

    def __call__(self):
        self.left -= self.checkpoint.exists()
        for i in range(0, len(self.X), 5000):
            if self.left < 0 and i >= 10_000:
                self.act()
            yield self.X[i : i + 5000]


@pytest.mark.parametrize(("size", "passes"), [(60_000, 1), (20_000, 2)], ids=["stepwise", "batch"])
def test_after_ctrl_c_the_same_call_goes_on_to_the_same_result(random_mixture, tmp_path, size, passes):
    X = random_mixture(3, 5, 3, spread=1.0).sample(size, 2)
    arguments = {"n_init": 1, "tol": 1e-5, "max_iter": 500}

    def stop():
        raise KeyboardInterrupt

    file = tmp_path / "state.npz"
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit_mixture(Interrupted(X, file, passes, stop), 5, checkpoint=file, **arguments)
    assert "the same call goes on from there" in stopped.value.__notes__[0]
    whole = fit_mixture(lambda: [X], 5, **arguments)
    assert file.exists()
    resumed = fit_mixture(lambda: [X], 5, checkpoint=file, **arguments)
    assert_same(resumed, whole, atol=1e-9)
    assert resumed.report.n_iter == whole.report.n_iter
    assert not file.exists()


def test_a_killed_fit_resumes_to_the_bits_of_an_uninterrupted_one(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(52_000, 2)) + 3.0 * rng.integers(3, size=(52_000, 1))
    np.save(tmp_path / "x.npy", X)
    script = """
        import os, signal, sys
        from pathlib import Path
        import numpy as np
        from omt.fitting.em import fit_mixture

        X, checkpoint, left = np.load(sys.argv[1] + "/x.npy"), Path(sys.argv[1]) / "state.npz", 1

        def blocks():
            global left
            left -= checkpoint.exists()
            for i in range(0, len(X), 5000):
                if left < 0 and i > 20_000:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield X[i : i + 5000]

        fit_mixture(blocks, 3, n_init=1, checkpoint=checkpoint)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    file = tmp_path / "state.npz"
    assert file.exists()

    def blocks():
        return (X[i : i + 5000] for i in range(0, len(X), 5000))

    resumed = fit_mixture(blocks, 3, n_init=1, checkpoint=file)
    assert_same(resumed, fit_mixture(blocks, 3, n_init=1), atol=0)
    assert not file.exists()


def test_a_checkpoint_of_another_fit_is_refused(overlapping, tmp_path):
    file = tmp_path / "state.npz"

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    with pytest.raises(Stop):
        fit_mixture(Interrupted(np.tile(overlapping, (10, 1)), file, 0, stop), 5, checkpoint=file)
    with pytest.raises(ValueError, match="another fit: its n_samples is 15000, here it is 1500; delete"):
        fit_mixture(overlapping, 5, checkpoint=file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="truncated or damaged"):
        fit_mixture(overlapping, 5, checkpoint=file)


def test_progress_goes_to_stderr_with_the_log_likelihood(overlapping, capsys, monkeypatch):
    monkeypatch.setattr("omt.fitting.progress._PATIENCE", 0.0)
    fit_mixture(overlapping, 3, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "log-likelihood" in captured.err


def test_a_short_fit_shows_nothing(overlapping, capsys):
    fit_mixture(overlapping[:100], 2, progress=True)
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------------------------------------- bad input
def nan_at(row, column):
    X = np.zeros((5000, 2))
    X[row, column] = np.nan
    return X


GOOD = np.random.default_rng(0).normal(size=(10, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"X": nan_at(4321, 1)}, "X has nan in row 4321, column 1; remove or fill"),
        ({"X": GOOD, "n_components": 11}, "n_components is 11 and X has 10 samples"),
        ({"X": GOOD[:1], "n_components": 1}, "X has one sample; a mixture needs at least two"),
        ({"X": GOOD, "n_components": 0}, "n_components is 0; it must be an integer ≥ 1"),
        ({"X": GOOD, "n_init": 1.5}, "n_init is 1.5; it must be an integer ≥ 1"),
        ({"X": GOOD, "tol": -1.0}, "tol is -1.0; it must be a finite number ≥ 0"),
        ({"X": GOOD, "dtype": "float16"}, "dtype is 'float16'; it must be 'float64' or 'float32'"),
        ({"X": GOOD, "family": "cauchy"}, "family is 'cauchy'; it must be one of gaussian, .*or a family object"),
        ({"X": GOOD, "covariance": "round"}, "covariance is 'round'; it must be one of full"),
        (
            {"X": GOOD, "n_components": 2, "family": Gaussian("lowrank", rank=3)},
            "rank is 3; it must be at most",
        ),
        (
            {"X": sparse.csr_matrix(GOOD), "n_components": 2},
            r"X is sparse, .*give a dense representation .*use_rep='X_pca'",
        ),
        ({"X": GOOD, "n_components": 2, "random_state": -1}, "random_state is -1; it must be an integer ≥ 0"),
        ({"X": GOOD, "n_components": 2, "tol": "small"}, "tol is 'small'; it must be a finite number ≥ 0"),
        ({"X": np.ma.masked_less(GOOD, 0.0)}, "X is a masked array with masked entries"),
        ({"X": GOOD * 1e160}, r"row 0, column 0; squares of numbers beyond 1e\+150 overflow"),
        ({"X": GOOD * 1e20, "dtype": "float32"}, r"squares of numbers beyond 1e\+17 overflow"),
        ({"X": GOOD * 1e-160}, r"X varies by \S+e-160 only; squares of such numbers underflow"),
        ({"X": GOOD, "sample_weight": [1.0] * 9 + [1e-30]}, r"sample_weight\[9\] is 1e-30 of the largest weight"),
        ({"X": GOOD, "labels": [["a"]] * 10}, "labels has 2 dimensions; it must be a list of one label a sample"),
        ({"X": GOOD, "labels": ["a"] * 9}, "labels has 9 entries; X has 10 samples"),
        ({"X": GOOD, "labels": [None] * 10}, "labels are all missing"),
        ({"X": GOOD, "labels": ["a"] * 10, "n_per_label": 0}, "n_per_label is 0; it must be an integer ≥ 1"),
        (
            {"X": GOOD, "labels": ["a"] * 10, "responsibilities": np.ones((10, 1))},
            "labels or responsibilities, not both",
        ),
        (
            {"X": GOOD, "responsibilities": np.ones((9, 1))},
            r"shape \(9, 1\); it must be \[10, components\]",
        ),
        ({"X": GOOD, "responsibilities": np.full((10, 2), 0.4)}, r"responsibilities\[0\] sums to 0.8"),
        (
            {"X": GOOD, "responsibilities": np.tile([1.5, -0.5], (10, 1))},
            "smallest entry -0.5",
        ),
        (
            {"X": GOOD, "responsibilities": np.tile([1.0, 0.0], (10, 1))},
            "no sample for component 1; leave out",
        ),
        ({"X": GOOD, "sample_weight": np.ones(9)}, r"sample_weight has shape \(9,\); X has 10 samples"),
        ({"X": GOOD, "sample_weight": np.zeros(10)}, r"sample_weight\[0\] is 0; every weight must be positive"),
    ],
)
def test_bad_input_is_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_mixture(**arguments)


def test_a_checkpoint_in_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint: the folder .*nowhere does not exist"):
        fit_mixture(GOOD, 2, checkpoint=tmp_path / "nowhere" / "state.npz")


def test_a_checkpoint_that_is_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"checkpoint: .* is a folder; give the name of a file"):
        fit_mixture(GOOD, 2, checkpoint=tmp_path)


def test_a_family_must_be_one():
    with pytest.raises(TypeError, match=r"it must be one of gaussian, .*or a family object"):
        fit_mixture(GOOD, 2, family=3)
