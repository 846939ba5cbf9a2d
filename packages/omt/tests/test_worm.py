"""Real time course with known lineages: sensory neurons of the C. elegans embryo (Packer et al. 2019).

Truth: a type descends from itself; ADL from ADL_parent; ASG and AWA from Neuroblast_ASG_AWA. Stages are bins of embryo
time.
"""

from __future__ import annotations

import json

import anndata
import numpy as np
import pytest
from typer.testing import CliRunner

import omt
from omt.cli import app
from omt.experiments import consistency
from omt.io import read_h5ad, read_uns
from omt.prepare import bin_times, prepare

pytestmark = pytest.mark.data

BINS = "210,270,330,390,450,510,580,650"
DESCENDANTS = {"ADL_parent": {"ADL_parent", "ADL"}, "Neuroblast_ASG_AWA": {"Neuroblast_ASG_AWA", "ASG", "AWA"}}


@pytest.fixture(scope="module")
def embryo(shared_data):
    """Labelled cells in seven stages with 20 principal components."""
    file = shared_data / "omt" / "worm_embryo.h5ad"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    adata = read_h5ad(file)
    adata.obs["cell_type"] = adata.obs["cell_type"].astype(object).replace("AWC_ON", "AWC")
    adata = adata[adata.obs["cell_type"].notna()].copy()
    adata.obsm["X_pca"], _ = prepare(adata, n_pcs=20)
    bin_times(adata, "embryo_time", BINS)
    adata.obs["stage"] = adata.obs["embryo_time_stage"]
    adata.obs["cell_type"] = adata.obs["cell_type"].astype("category")
    return adata


def steps(adata, **options):
    omt.tl.fit_mixtures(adata, groupby="stage", labels="cell_type", use_rep="X_pca")
    omt.tl.transport(adata, time_key="stage", **options)
    return [consistency(plan, DESCENDANTS) for plan in read_uns(adata).transports]


@pytest.mark.filterwarnings("ignore:labels with one sample")
def test_a_balanced_chain_reaches_the_consistency_that_compositions_admit(embryo):
    found = steps(embryo.copy())
    assert len(found) == 6
    ratio = sum(step.share for step in found) / sum(step.bound for step in found)
    assert ratio >= 0.96


@pytest.mark.filterwarnings("ignore:labels with one sample")
def test_an_unbalanced_chain_sends_mass_to_true_descendants(embryo):
    found = steps(embryo.copy(), tau=0.9)
    assert np.mean([step.share for step in found]) >= 0.98


@pytest.mark.filterwarnings("ignore:labels with one sample")
def test_ancestors_of_late_awa_neurons_are_their_neuroblast(embryo):
    adata = embryo.copy()
    steps(adata, tau=0.9)
    omt.tl.pull(adata, source=240, target=420, data="cell_type", subset="AWA", key_added="AWA_origin")
    early = adata.obs[adata.obs["stage"] == 240]
    origin = early.groupby("cell_type", observed=True)["AWA_origin"].sum()
    assert origin["Neuroblast_ASG_AWA"] + origin.get("AWA", 0.0) >= 0.95


@pytest.mark.filterwarnings("ignore:labels with one sample")
def test_the_commands_run_from_raw_counts_to_scores_and_pictures(shared_data, tmp_path, monkeypatch):
    file = shared_data / "omt" / "worm_embryo.h5ad"
    if not file.is_file():
        pytest.skip(f"{file} is absent")

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    run(
        "fit",
        file,
        "--groupby",
        "embryo_time",
        "--bins",
        BINS,
        "--prepare",
        "--labels",
        "cell_type",
        "-o",
        "model",
        "--quiet",
    )
    run("transport", "model", "--tau", 0.9, "--reg", 0.01, "-o", "chain", "--quiet")
    options = ("--source", 240, "--target", 420)
    table = json.loads(run("transitions", "chain", *options, "--csv", "t.csv", "--plot", "t.png", "--json"))
    assert np.allclose(np.sum(table["table"], axis=1), 1.0)
    run("push", file, "chain", *options, "--obs", "cell_type=AWA", "--backward", "-o", "scored.h5ad", "--quiet")
    scored = anndata.read_h5ad(tmp_path / "scored.h5ad")
    early = scored.obs[scored.obs["embryo_time_stage"] == 240]
    assert early["omt_pull"].sum() == pytest.approx(1.0)
    assert early.groupby("cell_type", observed=True)["omt_pull"].sum()["Neuroblast_ASG_AWA"] >= 0.9
    run("map", "chain", *options, "--input", file, "-o", "mapped.h5ad", "--quiet")
    mapped = anndata.read_h5ad(tmp_path / "mapped.h5ad")
    assert mapped.obsm["X_omt_map"].shape == (1805, 20)
    assert {"t.csv", "t.png"} <= {path.name for path in tmp_path.iterdir()}
