"""Generators and data sets that need no download."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from omt import datasets


def test_maps_of_the_known_map_problem_are_gradients_of_convex_functions():
    problem = datasets.known_map(4, 6, random_state=3)
    assert np.allclose(problem.linear, problem.linear.swapaxes(1, 2))
    assert np.linalg.eigvalsh(problem.linear).min() > 0  # symmetric positive definite: optimal by Brenier


def test_target_samples_have_the_moments_of_the_mapped_source_components():
    problem = datasets.known_map(3, 4, random_state=0)
    Y, k = problem.sample_target(200_000, np.random.default_rng(0))
    for c in range(3):
        expected = problem.linear[c] @ problem.covariances[c] @ problem.linear[c]
        assert np.allclose(Y[k == c].mean(axis=0), problem.target_means[c], atol=0.05)
        assert np.allclose(np.cov(Y[k == c].T), expected, atol=0.1)


def test_the_same_seed_gives_the_same_branching_process():
    first, _ = datasets.branching_process(50, random_state=4)
    again, _ = datasets.branching_process(50, random_state=4)
    other, _ = datasets.branching_process(50, random_state=5)
    assert np.array_equal(first.obsm["X_state"], again.obsm["X_state"])
    assert not np.array_equal(first.obsm["X_state"], other.obsm["X_state"])


def test_composition_of_the_branching_process_follows_from_growth_and_transitions():
    _, truth = datasets.branching_process(10)
    for now, later in zip(truth.composition[:-1], truth.composition[1:], strict=True):
        counts = np.zeros(len(truth.types))
        for k, share in enumerate(now):  # every cell leaves growth[k] descendants, of types drawn from transition[k]
            for l, probability in enumerate(truth.transition[k]):
                counts[l] += share * truth.growth[k] * probability
        assert np.allclose(counts / counts.sum(), later)


def test_cells_of_the_branching_process_have_the_composition_of_their_time():
    adata, truth = datasets.branching_process(20_000, random_state=1)
    for t, expected in enumerate(truth.composition):
        shares = adata.obs.loc[adata.obs["time"] == t, "cell_type"].value_counts(normalize=True)
        assert np.allclose([shares.get(name, 0.0) for name in truth.types], expected, atol=4 * np.sqrt(0.25 / 20_000))


def test_a_direct_step_costs_less_than_a_jump_over_a_type():
    adata, truth = datasets.branching_process(5000)
    late = adata[adata.obs["time"] == 4]
    X, kind = late.obsm["X_state"], late.obs["cell_type"].to_numpy()
    center = {name: X[kind == name].mean(axis=0) for name in truth.types}
    for middle, end in (("A progenitor", "A1"), ("A progenitor", "A2"), ("B progenitor", "B1")):
        steps = sum(np.sum((center[a] - center[b]) ** 2) for a, b in (("stem", middle), (middle, end)))
        assert np.sum((center["stem"] - center[end]) ** 2) > 1.2 * steps


def test_shift_and_dim_moves_by_whole_pixels_exactly():
    images = np.random.default_rng(0).random((3, 64))
    moved = datasets.shift_and_dim(images, shift=2.0, scale=0.5, offset=0.25).reshape(3, 8, 8)
    assert np.allclose(moved[:, :, 2:], 0.5 * images.reshape(3, 8, 8)[:, :, :-2] + 0.25)
    assert np.allclose(moved[:, :, :2], 0.25)


def test_shift_and_dim_refuses_images_of_another_size():
    with pytest.raises(ValueError, match=r"images must have shape \[N, 64\] \(8 x 8 pixels\), got \(2, 63\)"):
        datasets.shift_and_dim(np.zeros((2, 63)))


def test_branching_process_refuses_too_few_dimensions():
    with pytest.raises(ValueError, match=r"n_features is 4, must be at least 5"):
        datasets.branching_process(10, n_features=4)


def test_digits_are_the_1797_images_of_scikit_learn():
    from sklearn.datasets import load_digits

    images, digit = datasets.digits()
    assert np.array_equal(images * 16, load_digits().data)
    assert np.array_equal(digit, load_digits().target)


def test_blood_cells_come_with_their_labels_and_principal_components():
    adata = datasets.pbmc68k_reduced()
    assert adata.shape == (700, 765)
    assert adata.obsm["X_pca"].shape == (700, 50)
    assert adata.obs["bulk_labels"].nunique() == 10


def test_without_scanpy_the_blood_cells_name_the_extra():
    code = (
        "import sys; sys.modules['scanpy'] = None\n"
        "from omt import datasets\n"
        "try: datasets.pbmc68k_reduced()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'omt[scanpy]'" in done.stdout
