"""What families of counts refuse, and how they say it; and data without any count."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from omt.families import NegativeBinomial, Poisson
from omt.fitting.em import fit_mixture
from omt.mixture import Mixture


@pytest.fixture
def counts():
    """Counts of 1200 samples in 40 features."""
    return {"plain": np.random.default_rng(0).poisson(1.5, (1200, 40)).astype(float)}


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("family", ["poisson", "negative_binomial", "multinomial"])
@pytest.mark.parametrize(("value", "shown"), [(-1.0, "-1"), (0.5, "0.5")])
def test_entries_that_are_no_counts_are_named(counts, kind, family, value, shown):
    X = counts["plain"].copy()
    X[700, 21] = value
    with pytest.raises(ValueError, match=f'X has {shown} in row 700, column 21; family .{family}.*layer="counts"'):
        fit_mixture(kind(X), 3, family=family, batch_size=64)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_matrix])
def test_entries_other_than_zero_and_one_are_named(kind):
    X = np.eye(30)
    X[20, 20] = 2
    with pytest.raises(ValueError, match=r"X has 2 in row 20, column 20; family 'bernoulli' needs 0 and 1"):
        fit_mixture(kind(X), 3, family="bernoulli", batch_size=16)


def test_a_fitted_mixture_refuses_what_are_no_counts(counts):
    mixture = fit_mixture(counts["plain"], 2, family="poisson")
    with pytest.raises(ValueError, match=r"X has 0.6931\d+ in row 0, column 1; family 'poisson' needs counts"):
        mixture.log_prob(np.log1p(np.eye(2, 40, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "poisson", "size_factors": "mean"}, "size_factors is 'mean'; it must be None, 'total' or an array"),
        ({"family": "poisson", "size_factors": [1.0]}, r"size_factors has shape \(1,\); X has 1200 samples"),
        ({"family": "poisson", "size_factors": np.r_[0.0, np.ones(1199)]}, r"size_factors\[0\] is 0; every factor"),
        ({"family": "gaussian", "size_factors": "total"}, "size_factors are for families 'poisson' and 'negative_bino"),
        ({"family": Poisson("total"), "size_factors": "total"}, "size_factors are given twice"),
        ({"family": "poisson", "dtype": "float32"}, "dtype is 'float32'; family 'poisson' needs 'float64'"),
        ({"family": NegativeBinomial([0.1, 0.2])}, r"dispersion has shape \(2,\); it must be one number, or \[40\]"),
        ({"family": "cauchy"}, "family is 'cauchy'; it must be one of gaussian, poisson"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(counts, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_mixture(counts["plain"], 3, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(shrinkage=0.0), "shrinkage is 0.0; it must be a finite number > 0"),
        (lambda: Poisson(reference=10.0), "reference is the total of a sample of size one; it needs size_factors"),
        (lambda: Poisson("total", reference=0.0), "reference is 0.0; it must be a positive total count"),
        (lambda: NegativeBinomial(dispersion=-1.0), "dispersion of feature 0 is -1"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_without_any_count_are_refused():
    with pytest.raises(ValueError, match="X has no counts at all"):
        fit_mixture(np.zeros((10, 3)), 1, family="poisson", size_factors="total")


def test_counts_of_nothing_fit_without_sizes():
    mixture = fit_mixture(np.zeros((10, 3)), 1, family="poisson")
    assert isinstance(mixture, Mixture)
    assert (mixture.components.rates < 1e-2).all()
