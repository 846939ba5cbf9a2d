"""Transport between component weights: linear program, Newton on the semi-dual, relaxed marginals."""

from __future__ import annotations

from omt.solver.block import BlockDescent, block_coordinate_descent
from omt.solver.inputs import checked_tau
from omt.solver.outer import solve
from omt.solver.solution import ConvergenceWarning, Solution

__all__ = [
    "BlockDescent",
    "ConvergenceWarning",
    "Solution",
    "block_coordinate_descent",
    "checked_tau",
    "solve",
]
