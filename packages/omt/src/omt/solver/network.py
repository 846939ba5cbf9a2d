"""Potentials of an electrical network whose conductances span hundreds of orders of magnitude.

The Hessian of the semi-dual is the Laplacian of such a network: nodes are source components, the conductance between
two of them is the mass that they share through common targets, and a relaxed marginal is a leak to the ground. Where
the plan is nearly a permutation, conductances are tiny and differ by more than the sixteen digits of float64, and a
factorisation that subtracts them returns noise. Nothing is subtracted here: eliminating a node adds conductances in
parallel and in series (the star-mesh transformation), sources are carried as antisymmetric currents of the edges, and
what is computed of the potentials are their differences.

Letters: ``K`` nodes; the ground is node ``K``.

References
----------
W. Grassmann, M. Taksar, D. Heyman, Regenerative analysis and steady state distributions for Markov chains, Operations
Research 33, 1985. A. Alfa, J. Xue, Q. Ye, Accurate computation of the smallest eigenvalue of a diagonally dominant
M-matrix, Math. Comp. 71, 2002.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_CURRENT = 1e-9  # share of all currents below which a current that has nowhere to go is rounding

__all__ = ["IsolatedError", "Network"]


class IsolatedError(ValueError):
    """A current is to leave a set of nodes that nothing connects to the others.

    Parameters
    ----------
    node : int
        One of the nodes.
    """

    def __init__(self, node: int) -> None:
        super().__init__(f"no conductance leads away from node {node} and those behind it")
        self.node = node


@dataclass(frozen=True)
class Network:
    """A network with all nodes eliminated in turn, the ground last.

    Attributes
    ----------
    share : array [K, K + 1]
        ``share[k, j]``, ``j > k``: share of node ``k``'s current that goes to ``j`` once the nodes before ``k`` are
        gone. Rows sum to 1, or are zero where nothing leads away.
    conductance : array [K]
        Total conductance of each node at its turn.
    """

    share: NDArray[np.float64]
    conductance: NDArray[np.float64]

    @classmethod
    def of(cls, edges: NDArray[np.float64], leaks: NDArray[np.float64]) -> Self:
        """Eliminate the nodes.

        Parameters
        ----------
        edges : array [K, K]
            Symmetric conductances ≥ 0; the diagonal is ignored.
        leaks : array [K]
            Conductances to the ground, ≥ 0.
        """
        K = leaks.size
        rest = np.concatenate([edges, leaks[:, None]], axis=1)
        share, conductance = np.zeros((K, K + 1)), np.zeros(K)
        for k in range(K):
            ahead = rest[k, k + 1 :]
            conductance[k] = ahead.sum()
            if conductance[k] > 0.0:
                share[k, k + 1 :] = ahead / conductance[k]
                # Series conductances through k come in parallel to those that are there: all terms are ≥ 0.
                rest[k + 1 :, k + 1 :] += share[k, k + 1 : K, None] * ahead
        return cls(share, conductance)

    def potential_differences(
        self, currents: NDArray[np.float64], injected: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Solve for the potentials under sources on edges and nodes.

        Parameters
        ----------
        currents : array [K, K]
            Antisymmetric: current that a source on the edge drives into the row's node, out of the column's.
        injected : array [K]
            Current that enters each node from outside; without leaks they sum to zero.

        Returns
        -------
        array [K + 1, K + 1]
            Antisymmetric ``x_i − x_j``; the last row and column are the ground. Differences between nodes that
            nothing connects are 0.

        Raises
        ------
        IsolatedError
            If current has to leave nodes that nothing connects to the others.
        """
        K = injected.size
        flow = np.zeros((K + 1, K + 1))
        flow[:K, :K], flow[:K, K], flow[K, :K] = currents, injected, -injected
        allowed = _NO_CURRENT * float(np.abs(injected).sum())
        own = np.zeros(K)
        for k in range(K):
            out, ahead = flow[k, k + 1 :], self.share[k, k + 1 :]
            total = float(out.sum())
            if self.conductance[k] > 0.0:
                own[k] = total / self.conductance[k]
                passed = np.multiply.outer(ahead, out)
                flow[k + 1 :, k + 1 :] += passed - passed.T
            elif abs(total) > allowed:
                raise IsolatedError(k)
        difference = np.zeros((K + 1, K + 1))
        for k in range(K - 1, -1, -1):
            row = own[k] + self.share[k, k + 1 :] @ difference[k + 1 :, k + 1 :]
            difference[k, k + 1 :] = row
            difference[k + 1 :, k] = -row
        return difference
