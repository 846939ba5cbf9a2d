"""What the outer solver returns, and how it says that it did not get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ConvergenceWarning(UserWarning):
    """The outer solver stopped before it reached its tolerance; the message says what helps."""


@dataclass(frozen=True)
class Solution:
    """Solution of the problem between component weights.

    Attributes
    ----------
    coupling : array [K, L]
        ``W``.
    f, g : arrays [K], [L]
        Dual potentials in units of cost. For ``lam > 0``, ``W = a b exp((f ⊕ g − C)/lam)``; for ``lam = 0``,
        ``f ⊕ g ≤ C`` with equality where ``W > 0``. On balanced problems ``⟨f, a⟩ = ⟨g, b⟩`` fixes the free constant.
    lam : float
        Outer temperature ``λ`` in units of cost.
    objective : float
        ``⟨C, W⟩ + λ KL(W‖a⊗b) + ρ_a KL(W1‖a) + ρ_b KL(Wᵀ1‖b)``, the last two only on relaxed sides.
    transport_cost : float
        ``⟨C, W⟩``.
    converged : bool
        Whether ``marginal_error`` is at most the tolerance.
    marginal_error : float
        ``‖W1 − a‖₁ + ‖Wᵀ1 − b‖₁``; on a relaxed side the marginal that optimality asks for, ``a e^{−f/ρ}``, stands in
        for ``a``.
    n_newton, n_sinkhorn : int
        Newton steps and Sinkhorn sweeps.
    strictly_complementary : bool or None
        For ``lam = 0``: whether potentials exist that are tight only where ``W > 0``, that is, whether ``W`` is the
        only optimal plan (up to rounding). None for ``lam > 0``, where it always is.
    errors : array [n] or None
        Marginal error at the start and after each step at the final temperature, relative to the plan's mass where that
        is below 1; block after block, nan between them, where what is forbidden splits the problem. A Newton step that
        no damping made acceptable repeats the error before it. Empty for ``lam = 0``, None if not recorded.
    newton : bool array [n] or None
        Whether the step was Newton's; the others are sweeps, and the start.
    """

    coupling: NDArray[np.float64]
    f: NDArray[np.float64]
    g: NDArray[np.float64]
    lam: float
    objective: float
    transport_cost: float
    converged: bool
    marginal_error: float
    n_newton: int
    n_sinkhorn: int
    strictly_complementary: bool | None = None
    errors: NDArray[np.float64] | None = None
    newton: NDArray[np.bool_] | None = None
