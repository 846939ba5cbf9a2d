"""Raw counts through the verbs and the command line: genes by name, layers, size factors, files on disk."""

from __future__ import annotations

import hashlib
import json
import re

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from typer.testing import CliRunner

import omt
from omt.cli import app
from omt.io import read_uns

COUNT_FAMILIES = ["poisson", "negative_binomial", "multinomial"]


@pytest.fixture
def counts():
    """Control and treated cells with raw counts in `X`."""
    return omt.datasets.perturbed_counts(120, n_genes=40, n_types=3, n_responding=5, random_state=1)[0]


@pytest.fixture
def solved(counts):
    """The same after a fit by labels and a plan."""
    fit(counts)
    omt.tl.transport(counts, source="control", target="treated")
    return counts


def fit(adata, family="poisson", **options):
    options = {"labels": "cell_type", "size_factors": "total", "progress": False, **options}
    omt.tl.fit_mixtures(adata, "condition", family=family, **options)


# ------------------------------------------------------------------------------------------------------------- fit
def test_poisson_rates_are_the_label_means_of_cells_of_size_one(counts):
    fit(counts, size_factors=None)
    mixture = read_uns(counts).mixtures[0]
    for k, name in enumerate(mixture.names):
        cells = ((counts.obs["condition"] == "control") & (counts.obs["cell_type"] == name)).to_numpy()
        means = np.asarray(counts.X[cells].mean(axis=0)).ravel()
        np.testing.assert_allclose(mixture.components.rates[k], means, rtol=0.02, atol=0.02)


def test_all_groups_share_one_reference(counts):
    fit(counts)
    first, second = (mixture.components.reference for mixture in read_uns(counts).mixtures)
    assert first == second == pytest.approx(float(counts.X.sum(axis=1).mean()))


def test_a_column_and_an_array_of_size_factors_give_the_same_mixtures(counts):
    other = counts.copy()
    fit(counts, size_factors="size")
    fit(other, size_factors=other.obs["size"].to_numpy())
    rates = [read_uns(adata).mixtures[0].components.rates for adata in (counts, other)]
    assert np.array_equal(*rates)


@pytest.mark.parametrize("family", COUNT_FAMILIES)
def test_a_layer_gives_the_mixtures_of_x(counts, family):
    other = counts.copy()
    other.layers["counts"] = other.X.copy()
    other.X = other.X * 0.5
    options = {"size_factors": None}
    fit(counts, family, **options)
    fit(other, family, layer="counts", **options)
    np.testing.assert_array_equal(*(read_uns(adata).mixtures[1].components.mean() for adata in (counts, other)))
    np.testing.assert_array_equal(*(adata.obsm["X_omt_responsibilities"] for adata in (counts, other)))


def test_genes_without_counts_are_left_out_and_counted(counts):
    X = counts.X.tolil()
    X[:, [3, 7]] = 0
    counts.X = X.tocsr()
    with pytest.warns(UserWarning, match="2 of 40 genes have no count in any group; they are left out"):
        fit(counts)
    names = read_uns(counts).mixtures[0].feature_names
    assert len(names) == 38
    assert not {"gene3", "gene7"} & set(names)
    omt.tl.transport(counts, source="control", target="treated")
    omt.tl.map_to(counts, "control", "treated")
    assert list(counts.obsm["X_omt_map"].columns) == list(names)


def test_a_count_file_opened_backed_is_fitted_mapped_and_not_written(counts, tmp_path):
    X = counts.X.tolil()
    X[:, 3] = 0
    counts.X = X.tocsr()
    file = tmp_path / "counts.h5ad"
    counts.write_h5ad(file)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    backed = anndata.read_h5ad(file, backed="r")
    for adata in (backed, counts):
        with pytest.warns(UserWarning, match="1 of 40 genes"):
            fit(adata, n_components=2)
        omt.tl.transport(adata, source="control", target="treated")
        omt.tl.map_to(adata, "control", "treated")
    np.testing.assert_allclose(backed.obsm["X_omt_map"], counts.obsm["X_omt_map"], rtol=1e-8)
    backed.file.close()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before


def test_a_type_of_one_cell_is_a_component_and_warned_of(counts):
    control = np.flatnonzero((counts.obs["condition"] == "control").to_numpy())
    labels = counts.obs["cell_type"].astype(str).to_numpy().copy()
    labels[control[0]] = "rare"
    counts.obs["cell_type"] = labels
    with pytest.warns(UserWarning, match="rare"):
        fit(counts)
    omt.tl.transport(counts, source="control", target="treated")
    assert "rare" in read_uns(counts).names(0)


# ----------------------------------------------------------------------------------------------------- later verbs
def test_push_pull_and_transitions_carry_all_mass(solved):
    omt.tl.push(solved, "control", "treated", data="cell_type", subset="type 0")
    omt.tl.pull(solved, "control", "treated")
    omt.tl.transition_matrix(solved, source="control", target="treated")
    treated = (solved.obs["condition"] == "treated").to_numpy()
    assert solved.obs.loc[treated, "omt_push"].sum() == pytest.approx(1.0)
    assert solved.obs.loc[~treated, "omt_pull"].sum() == pytest.approx(1.0)


def test_fates_on_counts_are_probabilities(counts):
    counts.obs["time"] = np.where(counts.obs["condition"] == "control", 0.0, 1.0)
    omt.tl.fit_mixtures(counts, "time", family="poisson", labels="cell_type", progress=False)
    omt.tl.transport(counts, time_key="time")
    omt.tl.fates(counts)
    fates = np.asarray(counts.obsm[next(key for key in counts.obsm if "fate" in key)], dtype=float)
    known = np.isfinite(fates).all(axis=1)
    assert known.any()
    np.testing.assert_allclose(fates[known].sum(axis=1), 1.0, rtol=1e-6)


def test_the_map_raises_responding_genes_and_leaves_the_other_cells_empty(solved):
    omt.tl.map_to(solved, "control", "treated", kind="sample")
    table = solved.obsm["X_omt_map"]
    _, truth = omt.datasets.perturbed_counts(120, n_genes=40, n_types=3, n_responding=5, random_state=1)
    control = (solved.obs["condition"] == "control").to_numpy()
    assert table[~control].isna().all().all()
    for gene in truth.responding:
        assert table.loc[control, gene].mean() > 2.0 * solved[control, gene].X.mean()


def test_results_survive_a_file_and_genes_in_another_order(solved, tmp_path):
    omt.tl.map_to(solved, "control", "treated")
    solved.write_h5ad(tmp_path / "done.h5ad")
    again = anndata.read_h5ad(tmp_path / "done.h5ad")[:, ::-1].copy()
    omt.tl.map_to(again, "control", "treated", key_added="again")
    np.testing.assert_allclose(again.obsm["again"], solved.obsm["X_omt_map"], rtol=1e-12)


# ------------------------------------------------------------------------------------------------------ bad inputs
def _negative(adata):
    adata.X = adata.X.toarray()
    adata.X[3, 2] = -1.0


def _logarithmic(adata):
    adata.layers["raw"] = adata.X.copy()
    adata.X = adata.X.log1p()


def _nothing(adata):
    adata.X = sparse.csr_matrix(adata.shape, dtype=np.float32)


def _single(adata):
    adata.obs["condition"] = ["alone", *adata.obs["condition"].astype(str).to_numpy()[1:]]


BAD = [
    (_negative, {}, ValueError, "adata.X has -1 in cell 'cell3', gene 'gene2'; family='poisson' needs counts"),
    (_logarithmic, {}, ValueError, "name the raw counts by layer= (layers are: raw)"),
    (_nothing, {}, ValueError, "no cell of any group has a count"),
    (None, {"layer": "counts"}, KeyError, "layer='counts': adata.layers has no such key; it has: (none)"),
    (None, {"layer": "counts", "use_rep": "X_pca"}, ValueError, "both say what to fit on"),
    (None, {"family": "gaussian", "use_rep": "X", "size_factors": None}, TypeError, "give use_rep='X_pca'"),
    (
        None,
        {"family": "gaussian", "size_factors": None},
        KeyError,
        "use_rep='X_pca': adata.obsm has no such key; it has",
    ),
    (None, {"family": "multinomial"}, ValueError, "size_factors are for families poisson and negative_binomial"),
    (None, {"size_factors": "depth"}, KeyError, "size_factors='depth': adata.obs has no such column"),
    (None, {"size_factors": np.ones(3)}, ValueError, "size_factors has shape (3,)"),
    (None, {"size_factors": np.zeros(240)}, ValueError, "is 0 in cell 'cell0'; size factors must be positive"),
    (_single, {"labels": None}, ValueError, "condition alone has 1 cell; a mixture needs at least 2"),
    (None, {"labels": None, "n_components": 500}, ValueError, "fewer than n_components=500"),
    (None, {"labels": None, "budget": 4}, ValueError, "budget=4 needs n_components='bic' or 'icl'"),
    (None, {"family": "weibull", "size_factors": None}, ValueError, "family is 'weibull'"),
]


@pytest.mark.filterwarnings("ignore::anndata.ImplicitModificationWarning")
@pytest.mark.parametrize(("spoil", "options", "error", "message"), BAD)
def test_bad_input_is_refused_by_a_sentence_before_anything_is_written(counts, spoil, options, error, message):
    if spoil is not None:
        spoil(counts)
    with pytest.raises(error, match=re.escape(message)):
        fit(counts, **options)
    assert "omt" not in counts.uns


def test_groups_without_an_order_make_no_chain(counts):
    fit(counts)
    with pytest.raises(ValueError, match="'condition' is neither numeric nor an ordered categorical"):
        omt.tl.transport(counts, time_key="condition")


def test_a_missing_gene_is_refused_by_name(solved):
    fewer = solved[:, [g for g in solved.var_names if g != "gene4"]].copy()
    with pytest.raises(ValueError, match=r"adata lacks 1 of the 40 genes .* the first is 'gene4'"):
        omt.tl.map_to(fewer, "control", "treated")


def test_absurdly_many_images_are_refused(solved, monkeypatch):
    monkeypatch.setattr("omt.grouped._MOST_WRITTEN", 100)
    with pytest.raises(ValueError, match=r"images of 240 cells with 40 features are .* fit on fewer genes"):
        omt.tl.map_to(solved, "control", "treated")


# ---------------------------------------------------------------------------------------------------- command line
def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("family", ["poisson", "negative_binomial"])
def test_raw_counts_go_from_a_file_to_mapped_cells_on_the_command_line(counts, tmp_path, family):
    counts.layers["counts"] = counts.X.copy()
    counts.X = counts.X.log1p()
    data, model, chain = tmp_path / "c.h5ad", tmp_path / "model", tmp_path / "chain"
    counts.write_h5ad(data)
    run("fit", data, "--groupby", "condition", "--family", family, "--layer", "counts", "--size-factors", "total",
        "--labels", "cell_type", "-o", model, "--quiet")  # fmt: skip
    run("transport", model, "--source", "control", "--target", "treated", "-o", chain, "--quiet")
    table = json.loads(run("transitions", chain, "--source", "control", "--target", "treated", "--json"))
    np.testing.assert_allclose(np.sum(table["table"], axis=1), 1.0)
    run("push", data, chain, "--source", "control", "--target", "treated", "-o", tmp_path / "p.h5ad", "--quiet")
    pushed = anndata.read_h5ad(tmp_path / "p.h5ad")
    assert pushed.obs.loc[pushed.obs["condition"] == "treated", "omt_push"].sum() == pytest.approx(1.0)
    run("map", model, "--source", "control", "--target", "treated", "--input", data, "--kind", "sample",
        "-o", tmp_path / "m.h5ad", "--quiet")  # fmt: skip
    mapped = anndata.read_h5ad(tmp_path / "m.h5ad").obsm["X_omt_map"]
    assert isinstance(mapped, pd.DataFrame)
    values = mapped[(counts.obs["condition"] == "control").to_numpy()].to_numpy()
    assert (values == np.round(values)).all()


def test_the_command_line_says_in_one_sentence_that_x_holds_no_counts(counts, tmp_path):
    counts.layers["counts"] = counts.X.copy()
    counts.X = counts.X.log1p()
    counts.write_h5ad(tmp_path / "c.h5ad")
    result = CliRunner().invoke(
        app,
        ["fit", str(tmp_path / "c.h5ad"), "--groupby", "condition", "--family", "poisson", "-o", str(tmp_path / "m")],
    )
    assert result.exit_code == 2
    assert "name the raw counts by layer= (layers are: counts)" in result.output
    assert not (tmp_path / "m").exists()
