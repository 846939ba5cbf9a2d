"""Fixtures that omt's tests share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from omt.mixture import Mixture

with warnings.catch_warnings():
    # POT's sources hold escape sequences that Python warns of on first compiling them; here warnings are errors.
    warnings.simplefilter("ignore")
    import ot  # noqa: F401


@pytest.fixture
def random_mixture() -> Callable[..., Mixture]:
    """Maker of mixtures of full Gaussians: ``random_mixture(seed, K, d, spread=3.0)``."""

    def make(seed: int, K: int, d: int, spread: float = 3.0) -> Mixture:
        from omt.mixture import Mixture

        rng = np.random.default_rng(seed)
        G = rng.normal(size=(K, d, d)) / np.sqrt(d)
        covariances = G @ G.transpose(0, 2, 1) + 0.2 * np.eye(d)
        return Mixture.from_gaussians(rng.dirichlet(np.full(K, 5.0)), spread * rng.normal(size=(K, d)), covariances)

    return make


@pytest.fixture
def random_problem() -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Maker of outer problems ``C, a, b``: squared distances of Gaussian points, Dirichlet or equal weights."""

    def make(
        seed: int, K: int, L: int, *, equal: bool = False, d: int = 5
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        C = ((rng.normal(size=(K, d))[:, None] - rng.normal(size=(L, d))) ** 2).sum(axis=2)
        weights = [np.full(n, 1.0 / n) if equal else rng.dirichlet(np.full(n, 2.0)) for n in (K, L)]
        return C, weights[0], weights[1]

    return make
