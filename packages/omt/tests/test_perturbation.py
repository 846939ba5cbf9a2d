"""Unpaired perturbation: mapped control cells against treated cells that no fit has seen."""

from __future__ import annotations

import numpy as np
import pytest

from omt import datasets
from omt.experiments.perturbation import interferon, perturbation

pytest.importorskip("scanpy")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

SEEDS = range(5)


@pytest.fixture(scope="module")
def generated():
    """Results of three generated perturbations by family."""

    def run(family: str):
        results = []
        for seed in range(3):
            adata, truth = datasets.perturbed_counts(1000, random_state=seed)
            options = {"n_components": 4, "n_pcs": 10, "n_genes": 200}
            genes = truth.responding
            found = perturbation(adata, "control", "treated", genes=genes, seed=seed, family=family, **options)
            results.append((found, truth))
        return results

    return {family: run(family) for family in ("gaussian", "negative_binomial")}


@pytest.mark.parametrize(("family", "noises"), [("gaussian", 1.2), ("negative_binomial", 2.2)])
def test_generated_cells_are_mapped_to_unseen_ones_almost_up_to_noise(generated, family, noises):
    for result, _ in generated[family]:
        assert result.ratio <= 0.04
        assert result.mapped <= noises * result.floor


@pytest.mark.parametrize("family", ["gaussian", "negative_binomial"])
def test_every_responding_gene_rises_in_every_generated_component(generated, family):
    for result, _ in generated[family]:
        assert result.rise.min() > 0.0


def test_generated_counts_rise_as_much_as_they_were_made_to(generated):
    for result, truth in generated["negative_binomial"]:
        responding = truth.fold_changes.min(axis=0) > 1.0
        expected = (truth.means * (truth.fold_changes - 1.0))[:, responding].mean()
        assert result.rise.mean() == pytest.approx(expected, rel=0.2)


def test_generated_counts_have_the_moments_that_the_truth_says():
    adata, truth = datasets.perturbed_counts(4000, n_genes=30, random_state=5)
    X, size = adata.X.toarray(), adata.obs["size"].to_numpy()
    for condition, folds in (("control", np.ones_like(truth.means)), ("treated", truth.fold_changes)):
        for k, name in enumerate(truth.types):
            rows = ((adata.obs["condition"] == condition) & (adata.obs["cell_type"] == name)).to_numpy()
            expected = size[rows, None] * truth.means[k] * folds[k]
            variance = expected + truth.dispersion * expected**2
            z = (X[rows] - expected).sum(axis=0) / np.sqrt(variance.sum(axis=0))
            assert np.abs(z).max() < 5.0


# ------------------------------------------------------------------------------------------------- interferon, real
@pytest.fixture(scope="module")
def blood(shared_data):
    """Results of five splits by family."""
    path = shared_data / "omt" / "pbmc_ifnb.h5ad"
    families = ("gaussian", "negative_binomial")
    return {family: [interferon(path, seed=seed, family=family) for seed in SEEDS] for family in families}


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gaussian", "negative_binomial"])
def test_mapped_control_cells_keep_three_percent_of_the_distance_to_unseen_treated_ones(blood, family):
    assert max(result.ratio for result in blood[family]) <= 0.03


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gaussian", "negative_binomial"])
def test_interferon_genes_rise_in_every_component(blood, family):
    assert min(result.rise.min() for result in blood[family]) > 0.0


@pytest.mark.data
@pytest.mark.slow
def test_gaussian_components_end_within_the_noise_of_the_treated_cells(blood):
    for result in blood["gaussian"]:
        assert result.mapped <= 1.1 * result.floor
