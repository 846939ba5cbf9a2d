"""Maximise the semi-dual of entropic transport between weights, balanced or not: Sinkhorn sweeps and Newton steps.

Everything here is dimensionless: costs and potentials are in units of the temperature ``λ``. Letters: ``K`` sources,
``L`` targets. With ``κ = τ/(1−τ)`` (infinite on a balanced side) the dual is

    D(φ, ψ) = −κ_a ⟨a, e^{−φ/κ_a} − 1⟩ − κ_b ⟨b, e^{−ψ/κ_b} − 1⟩ − Σ_kl a_k b_l (e^{φ_k + ψ_l − c_kl} − 1),

whose first two terms become ``⟨a, φ⟩`` and ``⟨b, ψ⟩`` on a balanced side. The best ``ψ`` for a given ``φ`` is explicit,

    ψ_l = −τ_b log Σ_k a_k e^{φ_k − c_kl},      Wᵀ1 = b e^{−ψ/κ_b},

so the search is over ``φ`` alone. There the gradient is ``a e^{−φ/κ_a} − W1``, and the Hessian of ``−D`` is the Schur
complement

    H = diag(e^{−φ/κ_a} a / κ_a + W1) − W diag(τ_b / Wᵀ1) Wᵀ.

Balanced, it is a weighted graph Laplacian: its off-diagonal part is all that has to be computed, its diagonal is minus
the sum of that, and nothing cancels even where the plan is a permutation up to 1e-15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FOLD = 30.0  # potentials further than this from the kernel's origin get a new kernel: no entry that matters underflows
_NOTHING = 1e-150  # shares below this are zero: their products are denormal numbers, which slow a GEMM tenfold
_DAMPINGS = 10  # Levenberg-Marquardt factors tried before a sweep takes over


@dataclass(frozen=True)
class Kernel:
    """``conditional[k, l]``: the plan at the origin ``(phi, psi)`` with columns scaled to sum 1."""

    phi: NDArray[np.float64]
    psi: NDArray[np.float64]
    conditional: NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A point of the semi-dual with everything that a step needs; ``plan = u[:, None] · conditional · v``."""

    phi: NDArray[np.float64]
    psi: NDArray[np.float64]
    kernel: Kernel
    u: NDArray[np.float64]
    v: NDArray[np.float64]
    row: NDArray[np.float64]  # W1
    column: NDArray[np.float64]  # Wᵀ1, exactly what optimality of ψ asks for
    wanted: NDArray[np.float64]  # what optimality of φ asks W1 to be

    @property
    def plan(self) -> NDArray[np.float64]:
        """``W``, shape [K, L]."""
        plan = self.kernel.conditional * self.v
        plan *= self.u[:, None]
        return plan

    @property
    def residual(self) -> float:
        """``‖W1 − wanted‖₁``; the other marginal is exact."""
        return float(np.abs(self.wanted - self.row).sum())

    @property
    def error(self) -> float:
        """The residual, relative to the plan's mass where that is below 1."""
        return self.residual / min(1.0, max(float(self.row.sum()), np.finfo(float).tiny))

    @property
    def worst_ratio(self) -> float:
        """Largest relative error of a single row."""
        live = self.wanted > _NOTHING**0.5 * self.wanted.max()
        return float(np.abs(self.row[live] / self.wanted[live] - 1.0).max(initial=0.0))


@dataclass(frozen=True)
class SemiDual:
    """One problem: cost ``c`` [K, L] (``inf`` where impossible), weights ``a`` [K], ``b`` [L], ``tau`` of each side."""

    c: NDArray[np.float64]
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    tau: tuple[float, float]

    @property
    def balanced(self) -> bool:
        """Whether both marginals are prescribed; then ``φ`` is defined up to a constant."""
        return self.tau == (1.0, 1.0)

    def at(self, phi: NDArray[np.float64], near: Point | None = None) -> Point:
        """Evaluate at ``phi`` [K]: two matrix-vector products if close to the origin of ``near``'s kernel."""
        if near is None or float(np.abs(phi - near.kernel.phi).max()) > _FOLD:
            kernel = self._kernel(phi)
            u, reached = np.ones_like(phi), np.ones_like(self.b)
        else:
            kernel = near.kernel
            u = np.exp(phi - kernel.phi)
            reached = u @ kernel.conditional
        psi = kernel.psi - self.tau[1] * np.log(reached)
        column = self._share(self.b, psi, self.tau[1])
        v = column / reached
        row = u * (kernel.conditional @ v)
        return Point(phi, psi, kernel, u, v, row, column, self._share(self.a, phi, self.tau[0]))

    def _kernel(self, phi: NDArray[np.float64]) -> Kernel:
        conditional = phi[:, None] - self.c
        top = conditional.max(axis=0)
        conditional -= top
        np.exp(conditional, out=conditional)
        conditional *= self.a[:, None]
        total = conditional.sum(axis=0)
        conditional /= total
        conditional[conditional < _NOTHING] = 0.0
        return Kernel(phi, -self.tau[1] * (np.log(total) + top), conditional)

    @staticmethod
    def _share(weights: NDArray[np.float64], potential: NDArray[np.float64], tau: float) -> NDArray[np.float64]:
        """Marginal that optimality asks for: ``weights · e^{−potential/κ}``."""
        if tau == 1.0:
            return weights
        return weights * np.exp(-potential * ((1.0 - tau) / tau))

    def swept(self, point: Point) -> Point:
        """One Sinkhorn sweep: the best ``φ`` for ``ψ``, then the best ``ψ`` for that ``φ``."""
        tau = self.tau[0]
        if float(point.row.min()) > 1e-280:
            phi = tau * (point.phi - np.log(point.row / self.a))
        else:  # a row has underflowed: say the same in the log domain
            exponent = point.psi - self.c
            top = exponent.max(axis=1)
            phi = -tau * (np.log(np.exp(exponent - top[:, None]) @ self.b) + top)
        if not self.balanced:
            phi = phi + self._best_shift(phi, self.at(phi, point).psi)
        return self.at(phi, point)

    def _best_shift(self, phi: NDArray[np.float64], psi: NDArray[np.float64]) -> float:
        """Constant ``t`` for which ``(φ + t, ψ − t)`` is best: total masses agree. It speeds up sweeps at τ near 1."""
        per_kappa = [(1.0 - tau) / tau for tau in self.tau]
        masses = [self._log_mass(w, p, k) for w, p, k in zip((self.a, self.b), (phi, psi), per_kappa, strict=True)]
        return (masses[0] - masses[1]) / sum(per_kappa)

    @staticmethod
    def _log_mass(weights: NDArray[np.float64], potential: NDArray[np.float64], per_kappa: float) -> float:
        exponent = -potential * per_kappa
        top = float(exponent.max())
        return float(np.log(weights @ np.exp(exponent - top))) + top

    def gain(self, old: Point, new: Point) -> float:
        """``D(new) − D(old)``, summed from differences; the plan's own term is eliminated because ``ψ`` is optimal."""
        return self._side(old.wanted, new.phi - old.phi, self.tau[0], 0.0) + self._side(
            old.column, new.psi - old.psi, self.tau[1], 1.0
        )

    @staticmethod
    def _side(marginal: NDArray[np.float64], step: NDArray[np.float64], tau: float, extra: float) -> float:
        if tau == 1.0:
            return float(marginal @ step)
        kappa = tau / (1.0 - tau)
        with np.errstate(over="ignore"):
            return -(kappa + extra) * float(marginal @ np.expm1(-step / kappa))

    def newton(self, point: Point, damping: float) -> tuple[Point | None, float]:
        """One Levenberg-Marquardt step.

        Returns
        -------
        point : Point or None
            The next point, or None where no damping finds one.
        damping : float
            Where the next step should start.
        """
        from scipy.linalg import LinAlgError, cho_factor, cho_solve

        scaled_hessian, scale = self._scaled_hessian(point)
        gradient = scale * (point.wanted - point.row)
        diagonal = np.diag_indices_from(scaled_hessian)
        core = scaled_hessian[diagonal].copy()
        rounding = 16.0 * np.finfo(float).eps * (1.0 + float(np.abs(point.phi).max() + np.abs(point.psi).max()))
        for _ in range(_DAMPINGS):
            scaled_hessian[diagonal] = core + damping
            try:
                step = scale * cho_solve(cho_factor(scaled_hessian, lower=True, check_finite=False), gradient)
            except LinAlgError:
                damping = max(10.0 * damping, 1e-14)
                continue
            with np.errstate(all="ignore"):
                new = self.at(point.phi + step, point)
                gain, residual = self.gain(point, new), new.residual
                # Close to the optimum the gain is rounding, and a smaller residual has to do.
                accepted = np.isfinite(residual) and (
                    gain >= 0.0 or (residual < 0.5 * point.residual and gain > -rounding)
                )
            if accepted:
                return self._stretched(point, new), damping / 10.0
            damping = max(10.0 * damping, 1e-12)
        return None, damping

    def _stretched(self, old: Point, new: Point) -> Point:
        """Double an accepted step as long as the dual rises.

        Where a start lies on the boundary of the optimal duals, entries have to decay like ``e^{−step}`` and Newton
        takes unit steps; a longer one costs two matrix-vector products, against a Hessian and its factor for the next.
        """
        step = new.phi - old.phi
        while new.residual > 0.1 * old.residual:
            step = 2.0 * step
            with np.errstate(all="ignore"):
                further = self.at(old.phi + step, new)
                if not (np.isfinite(further.residual) and self.gain(new, further) > 0.0):
                    break
            new = further
        return new

    def _scaled_hessian(self, point: Point) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``S H S`` with ``S = diag(H)^{-1/2}``, made definite along the constant, and ``diag(S)``."""
        root = point.u[:, None] * point.kernel.conditional
        root *= np.sqrt(self.tau[1] / np.maximum(point.column, np.finfo(float).tiny)) * point.v
        hessian: NDArray[np.float64] = root @ root.T
        np.negative(hessian, out=hessian)
        np.fill_diagonal(hessian, 0.0)
        # W1 − Σ_j (W diag(τ_b/Wᵀ1) Wᵀ)_kj over all j is (1 − τ_b) W1: what is left of the diagonal has no cancellation.
        diagonal = -hessian.sum(axis=1) + (1.0 - self.tau[1]) * point.row
        if self.tau[0] < 1.0:
            diagonal += (1.0 - self.tau[0]) / self.tau[0] * point.wanted
        # Rows that talk to nobody keep a floor: their gradient is rounding, and must not become a huge step.
        diagonal += 1e-15 * np.maximum(point.row, point.wanted) + np.finfo(float).tiny
        scale = 1.0 / np.sqrt(diagonal)
        hessian *= scale[:, None]
        hessian *= scale
        np.fill_diagonal(hessian, 1.0)
        if self.balanced:
            gauge = 1.0 / scale
            gauge /= np.linalg.norm(gauge)
            hessian += gauge[:, None] * gauge
        return hessian, scale
