r"""One plan from the plans of several fits: mass goes where the fits agree.

A fit with many components is one of many equally good partitions of the cells, and its plan inherits the accidents of
that partition. The mean of several plans keeps what they share but also all their accidents, each with a little mass.
The consensus takes the mean plan for a likelihood and asks for the plan with the right marginals that is most likely
under it, ``min_P ⟨−log P̄, P⟩``: pairs of cells that one fit joined by accident are given up for those that most fits
join.

Letters: ``N``/``M`` source/target samples, ``S`` plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omt.families.base import FloatArray
from omt.plans.sample import SamplePlan

__all__ = ["consensus_plan"]

_MAX_DENSE_ENTRIES = 10**8


def consensus_plan(plans: Sequence[SamplePlan], *, floor: float = 1e-3) -> FloatArray:
    """The plan between samples on which several fits agree.

    Parameters
    ----------
    plans : sequence of SamplePlan
        Balanced plans between the same samples, from different fits (other seeds, other numbers of components).
    floor : float
        Density relative to independence ``μ_i ν_j`` below which a pair counts as never joined.

    Returns
    -------
    array [N, M]
        Most likely plan under the mean of the plans, with marginals ``μ`` and ``ν``: sparse, and dense in memory, so
        for thousands of samples, not for millions.

    Raises
    ------
    ValueError
        If there is no plan, they differ in their samples, one is unbalanced, or the table would be too large.
    RuntimeError
        If the linear program is not solved.

    References
    ----------
    Strehl & Ghosh (2002), Cluster ensembles: a knowledge reuse framework for combining multiple partitions; here the
    co-association of cells of two stages instead of one.

    Examples
    --------
    >>> import numpy as np
    >>> right = SamplePlan(np.eye(3), np.eye(3), np.eye(3) / 3)
    >>> wrong = SamplePlan(np.eye(3), np.eye(3), np.eye(3)[[1, 0, 2]] / 3)
    >>> np.round(3 * consensus_plan([right, right, wrong])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    import ot  # heavy, and needed here only

    if not plans:
        raise ValueError("plans is empty; give the plans of at least one fit")
    mu, nu = plans[0].mu, plans[0].nu
    if mu.size * nu.size > _MAX_DENSE_ENTRIES:
        raise ValueError(
            f"the consensus of {mu.size} × {nu.size} samples is a table of more than {_MAX_DENSE_ENTRIES:g} entries; "
            "use the plan of one fit, or a subsample"
        )
    if not (np.isfinite(floor) and floor > 0.0):
        raise ValueError(f"floor is {floor!r}; it must be a finite number > 0")
    total = np.zeros((mu.size, nu.size))
    for i, plan in enumerate(plans):
        if not plan.balanced:
            raise ValueError(f"plans[{i}] is unbalanced; a consensus needs plans with the samples' own weights")
        same = plan.mu.shape == mu.shape and plan.nu.shape == nu.shape
        if not (same and np.allclose(plan.mu, mu) and np.allclose(plan.nu, nu)):
            raise ValueError(
                f"plans[{i}] is between other samples or weights than plans[0]; give plans of the same ones"
            )
        total += plan.to_dense()
    density = total / (len(plans) * np.outer(np.where(mu > 0, mu, 1.0), np.where(nu > 0, nu, 1.0)))
    joint, log = ot.emd(mu, nu, -np.log(density + floor), numItermax=10**7, log=True)
    if log["warning"] is not None:
        raise RuntimeError(f"the linear program of {mu.size} × {nu.size} samples was not solved: {log['warning']}")
    return np.asarray(joint, dtype=np.float64)
