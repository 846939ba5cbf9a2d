"""A differentiation that branches twice, with known fates and growth."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from omt import datasets
from omt.experiments.labelled import consistency

__all__ = ["Branching", "branching"]


class Branching(NamedTuple):
    """What a chain found in the branching process.

    Attributes
    ----------
    share, bound
        Mass on possible descents and the most there could be, means over the steps.
    fate_error
        Mean over the types at the first time of the total-variation distance between the found and the true
        distribution over types at the last time: 0 to 1.
    """

    share: float
    bound: float
    fate_error: float


def branching(*, seed: int, tau: float = 1.0, growth_known: bool = False, n_cells: int = 600) -> Branching:
    """Five times of a branching differentiation; cell types as components.

    With `growth_known` the weights of each source are multiplied by the growth of its types, so that a balanced plan
    has the true marginals.
    """
    from omt.chain import TransportChain
    from omt.fitting.em import fit_mixture
    from omt.problem import transport

    adata, truth = datasets.branching_process(n_cells, random_state=seed)
    X, time = np.asarray(adata.obsm["X_state"]), adata.obs["time"].to_numpy()
    labels = adata.obs["cell_type"].astype(str).to_numpy()
    times = np.unique(time)
    index = {name: k for k, name in enumerate(truth.types)}
    descendants = {name: [truth.types[l] for l in np.flatnonzero(truth.allowed[k])] for name, k in index.items()}
    mixtures = [fit_mixture(X[time == t], labels=labels[time == t], progress=False) for t in times]
    plans = []
    for P, Q in itertools.pairwise(mixtures):
        grown = P.weights * truth.growth[[index[name] for name in P.names]]
        plans.append(transport(replace(P, weights=grown / grown.sum()) if growth_known else P, Q, tau=tau))
    steps = [consistency(plan, descendants) for plan in plans]
    found = TransportChain(mixtures, [float(t) for t in times], plans).transition_matrix(
        float(times[0]), float(times[-1])
    )
    first, last = ([index[name] for name in mixture.names] for mixture in (mixtures[0], mixtures[-1]))
    true = np.linalg.matrix_power(truth.transition, len(times) - 1)[np.ix_(first, last)]
    return Branching(
        float(np.mean([step.share for step in steps])),
        float(np.mean([step.bound for step in steps])),
        float(np.mean(0.5 * np.abs(np.asarray(found) - true).sum(axis=1))),
    )
