"""Counts in every kind of storage: the same fit from all, no zero ever stored, memory that does not grow, files."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.metrics import adjusted_rand_score

from omt.families import Gamma, LogNormal, NegativeBinomial, Poisson
from omt.fitting.em import fit_mixture
from omt.mixture import Mixture, check_features

COUNTS = {
    "poisson": {"family": "poisson"},
    "poisson/total": {"family": "poisson", "size_factors": "total"},
    "nb": {"family": "negative_binomial"},
    "nb/total": {"family": "negative_binomial", "size_factors": "total"},
    "multinomial": {"family": "multinomial"},
    "bernoulli": {"family": "bernoulli"},
}
POSITIVE = {
    "gamma": {"family": Gamma()},
    "exponential": {"family": "exponential"},
    "lognormal": {"family": LogNormal()},
}
EVERY = {**COUNTS, **POSITIVE}


@pytest.fixture
def groups():
    """Three groups of overlapping Poisson counts in 50 features, as CSR, and their labels."""
    rng = np.random.default_rng(0)
    rates = rng.gamma(0.3, 1.5, (3, 50)) + 0.02
    labels = rng.choice(3, size=900, p=[0.2, 0.3, 0.5])
    return sparse.csr_matrix(rng.poisson(rates[labels]).astype(float)), labels


def data_for(name, groups):
    X, _ = groups
    if name == "bernoulli":
        return (X > 0).astype(float)
    return X.toarray() + 0.5 if name in POSITIVE else X


def assert_same_fit(a, b, *, rtol=1e-8):
    np.testing.assert_allclose(a.weights, b.weights, rtol=rtol)
    for key, value in a.components.parameters().items():
        if not isinstance(value, str):
            np.testing.assert_allclose(b.components.parameters()[key], value, rtol=rtol, atol=1e-10, err_msg=key)


# -------------------------------------------------------------------------------------------------- kinds of storage
@pytest.mark.parametrize("name", COUNTS)
def test_dense_sparse_backed_and_streamed_counts_give_one_fit(tmp_path, groups, name):
    X = data_for(name, groups)
    ad.AnnData(X=X.astype(np.float32)).write_h5ad(tmp_path / "x.h5ad")
    backed = ad.read_h5ad(tmp_path / "x.h5ad", backed="r")
    kinds = {
        "dense": X.toarray(),
        "csr_array": sparse.csr_array(X),
        "csc": sparse.csc_matrix(X),
        "int32": X.astype(np.int32),
        "backed": backed.X,
        "stream": lambda: (X[i : i + 100] for i in range(0, 900, 100)),
    }
    options = {"n_init": 1, **COUNTS[name]}
    reference = fit_mixture(X, 3, **options)
    try:
        for kind, samples in kinds.items():
            fitted = fit_mixture(samples, 3, **options)
            assert_same_fit(reference, fitted)
            np.testing.assert_allclose(fitted.log_prob(samples), reference.log_prob(X), rtol=1e-8, err_msg=kind)
    finally:
        backed.file.close()


@pytest.mark.parametrize("name", COUNTS)
def test_chunk_size_does_not_matter(groups, name):
    X = data_for(name, groups)
    options = {"n_init": 1, **COUNTS[name]}
    assert_same_fit(fit_mixture(X, 3, **options), fit_mixture(X, 3, batch_size=100, **options))


@pytest.mark.parametrize("name", COUNTS)
def test_the_order_of_samples_does_not_matter_for_given_labels(groups, name):
    X, labels = data_for(name, groups), groups[1]
    order = np.random.default_rng(0).permutation(900)
    assert_same_fit(
        fit_mixture(X, labels=labels, **COUNTS[name]), fit_mixture(X[order], labels=labels[order], **COUNTS[name])
    )


def test_counts_stored_in_several_parts_are_added_before_they_are_used(groups):
    X, _ = groups
    twice = sparse.csr_matrix(
        (
            np.ones(int(X.data.sum())),
            np.repeat(X.indices, X.data.astype(int)),
            np.concatenate([[0], np.cumsum(np.asarray(X.sum(axis=1)).ravel())]).astype(int),
        ),
        shape=X.shape,
    )
    assert not twice.has_canonical_format
    stored = twice.nnz
    for name in ("poisson", "nb/total"):
        assert_same_fit(fit_mixture(X, 3, **COUNTS[name]), fit_mixture(twice, 3, **COUNTS[name]))
        streamed = fit_mixture(lambda: iter([twice]), 3, **COUNTS[name])
        assert_same_fit(fit_mixture(X, 3, **COUNTS[name]), streamed)
    assert twice.nnz == stored  # the user's own matrix is left as it was


@pytest.mark.parametrize("name", COUNTS)
def test_a_large_fit_from_file_finds_the_groups(tmp_path, groups, name, monkeypatch):
    monkeypatch.setattr("omt.fitting.em._BATCH_LIMIT", 300)
    X, labels = data_for(name, groups), groups[1]
    ad.AnnData(X=X).write_h5ad(tmp_path / "x.h5ad")
    backed = ad.read_h5ad(tmp_path / "x.h5ad", backed="r")
    mixture = fit_mixture(backed.X, 3, batch_size=100, **COUNTS[name])
    found = mixture.responsibilities(backed.X).argmax(axis=1)
    backed.file.close()
    assert mixture.report.method == "stepwise"
    assert adjusted_rand_score(labels, found) >= 0.9


# ------------------------------------------------------------------------------------------ what is known beforehand
@pytest.mark.parametrize("name", EVERY)
def test_labels_make_components_of_their_names(groups, name):
    X, labels = data_for(name, groups), groups[1]
    mixture = fit_mixture(X, labels=np.array(["b", "a", "c"])[labels], **EVERY[name])
    assert mixture.names == ("a", "b", "c")
    np.testing.assert_allclose(mixture.weights, np.bincount(labels)[[1, 0, 2]] / 900)
    dense = X.toarray() if sparse.issparse(X) else X
    if not name.endswith("/total") and name != "lognormal":
        expected = np.stack([dense[labels == k].mean(axis=0) for k in (1, 0, 2)])
        np.testing.assert_allclose(
            mixture.components.mean(), expected, rtol=0.01 if name != "multinomial" else 0.2, atol=1e-3
        )


@pytest.mark.parametrize("name", EVERY)
def test_one_hot_responsibilities_are_labels(groups, name):
    X, labels = data_for(name, groups), groups[1]
    soft = fit_mixture(X, responsibilities=np.eye(3)[labels], **EVERY[name])
    assert_same_fit(fit_mixture(X, labels=labels, **EVERY[name]), soft)


@pytest.mark.parametrize("name", EVERY)
def test_samples_without_a_label_are_shared_out(groups, name):
    X, labels = data_for(name, groups), groups[1]
    known = np.where(np.arange(900) % 3 == 0, labels.astype(float), np.nan)
    mixture = fit_mixture(X, labels=known, **EVERY[name])
    assert adjusted_rand_score(labels, mixture.responsibilities(X).argmax(axis=1)) >= 0.9


@pytest.mark.parametrize("name", EVERY)
def test_a_weight_of_two_is_a_sample_twice(groups, name):
    X, labels = data_for(name, groups), groups[1]
    double = np.arange(900) % 4 == 0
    weight = np.where(double, 2.0, 1.0)
    stack = sparse.vstack if sparse.issparse(X) else np.concatenate
    repeated = stack([X, X[double]])
    options = EVERY[name]
    if name == "gamma":  # the prior weighs less beside more samples
        options = {"family": Gamma(shrinkage=1e-9)}
    if name == "lognormal":
        options = {"family": LogNormal(shrinkage=0)}
    if "total" in name:  # otherwise the mean total, the unit of size, would differ
        family = Poisson if name.startswith("poisson") else NegativeBinomial
        options = {"family": family(size_factors="total", reference=40.0)}
    if name.startswith("nb"):  # the estimate knows how many samples there are
        options = {
            "family": NegativeBinomial(0.2, **({"size_factors": "total", "reference": 40.0} if "/" in name else {}))
        }
    once = fit_mixture(X, labels=labels, sample_weight=weight, **options)
    twice = fit_mixture(repeated, labels=np.concatenate([labels, labels[double]]), **options)
    # Priors weigh like samples, and weights have mean one.
    assert_same_fit(twice, once, rtol=2e-3)


@pytest.mark.parametrize("name", EVERY)
def test_several_components_a_label(groups, name):
    X, labels = data_for(name, groups), groups[1]
    mixture = fit_mixture(X, labels=(labels == 2), n_per_label=2, **EVERY[name])
    assert mixture.names == ("False/0", "False/1", "True/0", "True/1")
    found = mixture.responsibilities(X).argmax(axis=1) // 2
    assert adjusted_rand_score(labels == 2, found) >= 0.8


@pytest.mark.parametrize("name", EVERY)
def test_the_same_seed_gives_the_same_mixture_bit_by_bit(groups, name):
    X = data_for(name, groups)
    a, b = (fit_mixture(X, 4, n_init=2, random_state=3, **EVERY[name]) for _ in range(2))
    assert np.array_equal(a.weights, b.weights)
    assert np.array_equal(a.components.mean(), b.components.mean())


# ---------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("name", EVERY)
def test_a_saved_mixture_loads_as_it_was(tmp_path, groups, name):
    X = data_for(name, groups)
    genes = [f"gene{j}" for j in range(50)]
    before = fit_mixture(X, 3, feature_names=genes, **EVERY[name])
    before.save(tmp_path / "m")
    after = Mixture.load(tmp_path / "m")
    assert after.family == before.family
    assert after.feature_names == tuple(genes)
    assert after.report.to_dict() == before.report.to_dict()
    assert np.array_equal(after.log_prob(X), before.log_prob(X))


@pytest.mark.parametrize("name", EVERY)
def test_a_mixture_survives_h5ad(tmp_path, groups, name):
    X = data_for(name, groups)
    fitted = fit_mixture(X, 2, feature_names=[f"gene{j}" for j in range(50)], **EVERY[name])
    data = ad.AnnData(np.zeros((2, 1)))
    data.uns["omt"] = fitted.to_dict()
    data.write_h5ad(tmp_path / "x.h5ad")
    again = Mixture.from_dict(ad.read_h5ad(tmp_path / "x.h5ad").uns["omt"])
    assert again.feature_names == fitted.feature_names
    assert np.array_equal(again.log_prob(X), fitted.log_prob(X))


@pytest.mark.parametrize(
    ("name", "limit"),
    # By batch EM, and (where more than 300 samples are many) by stepwise EM for each kind of statistics.
    [
        *((name, 50_000) for name in EVERY),
        ("poisson/total", 300),
        ("nb/total", 300),
        ("gamma", 300),
        ("lognormal", 300),
    ],
)
def test_an_interrupted_fit_goes_on_to_the_same_end(tmp_path, groups, name, limit, monkeypatch):
    monkeypatch.setattr("omt.fitting.em._BATCH_LIMIT", limit)
    monkeypatch.setattr("omt.fitting.checkpoint._INTERVAL", 0.0)
    X = data_for(name, groups)
    options = {"batch_size": 100, "epochs": 3, "tol": 1e-5, "n_init": 1, **EVERY[name]}
    whole = fit_mixture(X, 4, **options)
    from omt.fitting.iterate import State

    keep, calls = State.save, []

    def interrupted(self, store, **kw):
        keep(self, store, **kw)
        if store.path is not None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(State, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_mixture(X, 4, checkpoint=tmp_path / "c.npz", **options)
    assert (tmp_path / "c.npz").exists()
    resumed = fit_mixture(X, 4, checkpoint=tmp_path / "c.npz", **options)
    assert not (tmp_path / "c.npz").exists()
    assert np.array_equal(resumed.weights, whole.weights)
    assert np.array_equal(resumed.components.mean(), whole.components.mean())


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path, groups, monkeypatch):
    from omt.fitting.iterate import State

    keep = State.save

    def interrupted(self, store, **kw):
        keep(self, store, **kw)
        raise KeyboardInterrupt

    monkeypatch.setattr(State, "save", interrupted)
    sizes = np.linspace(0.5, 2.0, 900)
    with pytest.raises(KeyboardInterrupt):
        fit_mixture(groups[0], 3, family="poisson", size_factors=sizes, checkpoint=tmp_path / "c.npz")
    with pytest.raises(ValueError, match="belongs to another fit"):
        fit_mixture(groups[0], 3, family="poisson", size_factors=sizes[::-1], checkpoint=tmp_path / "c.npz")


# --------------------------------------------------------------------------------------------------- feature names
def test_columns_of_a_table_name_the_features(groups):
    table = pd.DataFrame(groups[0].toarray(), columns=[f"g{j}" for j in range(50)])
    mixture = fit_mixture(table, 2, family="poisson")
    assert mixture.feature_names[:2] == ("g0", "g1")
    np.testing.assert_array_equal(mixture.log_prob(table), mixture.log_prob(table.to_numpy()))


def test_a_table_with_other_columns_is_refused_by_the_first_that_differs(groups):
    table = pd.DataFrame(groups[0].toarray(), columns=[f"g{j}" for j in range(50)])
    mixture = fit_mixture(table, 2, family="poisson")
    swapped = table[["g0", "g2", "g1", *table.columns[3:]]]
    with pytest.raises(ValueError, match="feature 1 is 'g2' in X and 'g1' in the mixture"):
        mixture.responsibilities(swapped)


def test_mixtures_of_different_genes_are_refused_by_the_first_that_differs():
    def poisson(*names):
        return Mixture.from_params("poisson", [1.0], rates=np.ones((1, len(names))), feature_names=names)

    with pytest.raises(ValueError, match="feature 1 is 'B' in the source and 'C' in the target"):
        check_features(poisson("A", "B"), poisson("A", "C"))
    with pytest.raises(ValueError, match="source has d=2 features and target d=3"):
        check_features(poisson("A", "B"), poisson("A", "B", "C"))
    check_features(poisson("A", "B"), poisson("A", "B"))
    check_features(poisson("A", "B"), Mixture.from_params("poisson", [1.0], rates=[[1.0, 1.0]]))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "feature_names has 1 entries; there are 2 features"),
        (["a", "a"], "feature_names has 'a' twice; every feature needs its own name"),
        ("ab", "feature_names is 'ab'; it must be a list of 2 names"),
    ],
)
def test_feature_names_that_do_not_fit_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        Mixture.from_params("poisson", [1.0], rates=[[1.0, 1.0]], feature_names=names)
    with pytest.raises(ValueError, match=message):
        fit_mixture(np.ones((5, 2)), 1, family="poisson", feature_names=names)


# ---------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("name", COUNTS)
def test_no_sample_is_ever_made_dense(groups, name, monkeypatch):
    """Wherever a fit or a fitted mixture would fill in zeros, scipy would be asked to."""
    X = data_for(name, groups)

    def refuse(self, *args, **kw):
        raise AssertionError("sparse samples were made dense")

    for cls in (sparse.csr_matrix, sparse.csr_array, sparse.csc_matrix, sparse.csc_array, sparse.coo_matrix):
        for method in ("toarray", "todense"):
            monkeypatch.setattr(cls, method, refuse)
    mixture = fit_mixture(X, 3, **COUNTS[name])
    mixture.responsibilities(X)
    mixture.bic(X)
    mixture.usage(X)


_FIT = """
import re, sys
import numpy as np
from scipy import sparse
import omt
import sklearn.cluster, sklearn.utils.extmath  # loaded by every fit

N, per, d, K = int(sys.argv[1]), int(sys.argv[2]), 20_000, 10
rng = np.random.default_rng(0)
labels = rng.integers(K, size=N).astype(np.int16)
step = 4000 // per
indices = np.empty((N, per), dtype=np.int32)
for k in range(K):
    rows = np.flatnonzero(labels == k)
    pool = np.sort(rng.choice(d, 4000, replace=False)).astype(np.int32)
    for part in np.array_split(rows, max(1, rows.size // 2000)):
        indices[part] = pool[rng.integers(step, size=(part.size, per)) + step * np.arange(per)]
counts = (1 + (rng.random(N * per, dtype=np.float32) < 0.3)).astype(np.float32)
X = sparse.csr_matrix((counts, indices.ravel(), np.arange(0, N * per + 1, per, dtype=np.int32)), shape=(N, d))

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

open("/proc/self/clear_refs", "w").write("5")
before = peak()
options = {} if sys.argv[3] == "none" else {"size_factors": sys.argv[3]}
mixture = omt.fit_mixture(X, K, family=sys.argv[4], n_init=1, **options)
found = mixture.responsibilities(X, top_k=1).indices[:, 0]
joint = np.zeros((K, K)); np.add.at(joint, (labels, found), 1)
print(peak() - before, peak(), joint.max(axis=1).sum() / N)
"""


def _measured_fit(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FIT), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    extra, total, agreement = (float(word) for word in done.stdout.split())
    return extra / 2**20, total / 2**20, agreement


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")


@linux
def test_twenty_thousand_by_twenty_thousand_fit_in_little_memory():
    """Dense they are 3.2 GB, and one chunk of them would be 0.65 GB."""
    extra, _, agreement = _measured_fit(20_000, 40, "none", "poisson")
    assert extra < 300
    assert agreement > 0.99


@linux
@pytest.mark.slow
@pytest.mark.parametrize("family", ["poisson", "negative_binomial"])
@pytest.mark.timeout(600)
def test_a_hundred_thousand_cells_by_twenty_thousand_genes_fit_in_two_gibibytes(family):
    extra, total, agreement = _measured_fit(100_000, 150, "total", family)
    assert extra < 500
    assert total < 2048
    assert agreement > 0.99
