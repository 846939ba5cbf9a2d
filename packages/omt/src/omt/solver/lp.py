"""The exact linear program between component weights, and what its residual graph tells.

Letters: ``K`` source components, ``L`` target components.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOW = 1e-14  # mass below this share of the total is rounding of the network simplex, not flow


def solve_lp(
    C: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Solve ``min ⟨C, W⟩`` over couplings of ``a`` and ``b`` by the network simplex.

    Parameters
    ----------
    C : array [K, L]
        Cost, ``inf`` where no mass may go; some plan must be finite.
    a, b : arrays [K], [L]
        Positive weights of equal sum.

    Returns
    -------
    W : array [K, L]
        An optimal vertex.
    f, g : arrays [K], [L]
        Optimal potentials: ``f_k + g_l ≤ C_kl``, with equality where ``W_kl > 0``.

    Raises
    ------
    RuntimeError
        If the network simplex stops before optimality.
    """
    finite = np.isfinite(C)
    offset = float(C[finite].min())
    scale = float(C[finite].max()) - offset
    if min(C.shape) == 1:  # there is only one coupling
        W, u = np.outer(a, b) / b.sum(), C.min(axis=1)
    else:
        # The simplex compares with absolute tolerances, so it gets costs in [0, 1] and weights of sum 1. An impossible
        # entry costs more than any detour around it.
        cost = np.where(finite, (C - offset) / (scale or 1.0), 2.0 * min(C.shape) + 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a failure is told by the exception below
            from ot import emd  # POT loads every array library it finds, so only to solve a problem

            W, log = emd(a / a.sum(), b / b.sum(), cost, numItermax=10_000_000, log=True)
        if log["warning"] is not None:
            raise RuntimeError(f"the network simplex did not reach the optimum of the linear program: {log['warning']}")
        W, u = W * a.sum(), log["u"] * (scale or 1.0)
    # One exact c-transform each way removes the rounding of the simplex's own potentials.
    g = np.min(C - u[:, None], axis=0)
    f = np.min(C - g, axis=1)
    return W, f, g


def centred_potentials(
    C: NDArray[np.float64], W: NDArray[np.float64], f: NDArray[np.float64], g: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Move optimal potentials away from the boundary of the optimal set, towards its middle.

    The simplex ends at a corner, where entries are tight that carry no mass; entropic potentials tend to the inside as
    ``λ → 0``. Parts of the support that are not connected may shift against each other as far as the slacks between
    them allow: these differences are bounded by shortest paths, and the mean of the largest and the smallest shifts
    seen from a few sources is optimal too. It saves a third of the Newton steps where weights tie (assignments).

    Parameters
    ----------
    C, W : arrays [K, L]
        Cost and optimal vertex.
    f, g : arrays [K], [L]
        Optimal potentials.

    Returns
    -------
    f, g : arrays [K], [L]
        Optimal potentials again.
    """
    K, L = C.shape
    support = _FLOW * W.sum() < W
    if int(support.sum()) >= K + L - 1 or not support.any(axis=1).all():  # one tree: nothing can shift
        return f, g
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    slack = np.maximum(C - f[:, None] - g, 0.0)
    owner, column = np.nonzero(support)
    bound_KK = np.minimum.reduceat(slack[:, column], np.searchsorted(owner, np.arange(K)), axis=1)
    head, tail = np.nonzero(np.isfinite(bound_KK))
    # Explicit entries: a dense array would lose the arcs of length zero.
    graph = csr_array((bound_KK[head, tail], (tail, head)), shape=(K, K))
    roots = np.unique(np.linspace(0, K - 1, 4).astype(int))
    shift = 0.5 * (dijkstra(graph, indices=roots).mean(axis=0) - dijkstra(graph.T, indices=roots).mean(axis=0))
    if not np.all(np.isfinite(shift)):
        return f, g
    g = np.min(C - (f + shift)[:, None], axis=0)
    return f + shift, g


def vertex_potentials(
    W: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64], reduced: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Source potentials for which the entropic plan has the values of the vertex ``W`` on its support.

    The support of a vertex is a forest, so ``φ_k + ψ_l = log(W_kl/(a_k b_l)) + c_kl`` along its edges has a solution,
    one constant a tree. It is where the potentials tend as ``λ → 0``, and where Newton should start: from ``φ = 0`` an
    edge between two rare components carries ``a_k b_l``, orders of magnitude below what it should, which a quadratic
    model overshoots.

    Parameters
    ----------
    W : array [K, L]
        Optimal vertex.
    a, b : arrays [K], [L]
        Weights.
    reduced : array [K, L]
        Reduced cost in units of the temperature.

    Returns
    -------
    phi : array [K]
        Potentials in units of the temperature; each tree is centred at zero.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components

    K, L = W.shape
    rows, columns = np.nonzero(W > 0.0)
    total = np.zeros_like(W)
    total[rows, columns] = np.log(W[rows, columns] / (a[rows] * b[columns])) + reduced[rows, columns]
    forest = csr_array((np.ones(rows.size), (rows, columns + K)), shape=(K + L, K + L))
    n_trees, tree = connected_components(forest, directed=False)
    # One search from a node above all trees visits every node after its parent.
    top, (_, first) = K + L, np.unique(tree, return_index=True)
    heads, tails = np.concatenate([rows, np.full(n_trees, top)]), np.concatenate([columns + K, first])
    joined = csr_array((np.ones(heads.size), (heads, tails)), shape=(top + 1, top + 1))
    order, parent = breadth_first_order(joined, top, directed=False)
    potential = np.zeros(K + L)
    for node in order[1:].tolist():
        up = int(parent[node])
        if up != top:
            potential[node] = (total[up, node - K] if node >= K else total[node, up - K]) - potential[up]
    means = [
        np.bincount(tree[side], potential[side], n_trees) / np.maximum(np.bincount(tree[side], minlength=n_trees), 1)
        for side in (slice(0, K), slice(K, K + L))
    ]
    centred: NDArray[np.float64] = potential[:K] - 0.5 * (means[0] - means[1])[tree[:K]]
    return centred


def strong_components(allowed: NDArray[np.bool_], W: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Label sources and targets by the strongly connected components of the residual graph of ``W``.

    Arcs lead from a source to a target where mass may be added (``allowed``) and back where mass may be taken away
    (``W > 0``). An allowed entry can carry mass in *some* plan with the same marginals and support ``allowed`` exactly
    if its two ends get the same label.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    K, L = allowed.shape
    rows, columns = np.nonzero(allowed)
    # The largest entry of each row and column is flow even where a component weighs less than the others' rounding.
    largest = np.equal(W, W.max(axis=1, keepdims=True)) | np.equal(W, W.max(axis=0))
    flow = (_FLOW * W.sum() < W) | ((W > 0.0) & largest)
    back_columns, back_rows = np.nonzero(flow.T)
    heads = np.concatenate([rows, back_columns + K])
    tails = np.concatenate([columns + K, back_rows])
    graph = csr_array((np.ones(heads.size, dtype=np.int8), (heads, tails)), shape=(K + L, K + L))
    _, labels = connected_components(graph, directed=True, connection="strong")
    found: NDArray[np.intp] = np.asarray(labels, dtype=np.intp)
    return found[:K], found[K:]


def is_strictly_complementary(
    C: NDArray[np.float64], W: NDArray[np.float64], f: NDArray[np.float64], g: NDArray[np.float64]
) -> bool:
    """Whether potentials exist with ``f_k + g_l < C_kl`` wherever the optimal vertex ``W_kl`` is zero.

    They exist exactly if ``W`` is the only optimal plan: otherwise mass can go round a cycle of tight entries. Decided
    from any optimal potentials, up to rounding of the costs.
    """
    slack = C - f[:, None] - g
    tight = slack <= 1e-12 * max(float(np.ptp(C[np.isfinite(C)])), np.finfo(float).tiny)
    source, target = strong_components(tight, W)
    on_a_cycle = tight & (source[:, None] == target)
    return not bool(np.any(on_a_cycle & (_FLOW * W.sum() >= W)))


def feasible_blocks(
    allowed: NDArray[np.bool_],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    source_names: list[str],
    target_names: list[str],
) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Split a problem with impossible entries into blocks that can be filled entirely.

    Parameters
    ----------
    allowed : bool array [K, L]
        Entries that may carry mass.
    a, b : arrays [K], [L]
        Weights.
    source_names, target_names : lists of str
        Names for messages.

    Returns
    -------
    list of (sources, targets)
        Index arrays. Inside a block every allowed entry is positive in some plan; between blocks none is.

    Raises
    ------
    ValueError
        If no plan fits, naming the components that cannot place or receive their weight.
    """
    mass = float(a.sum())
    W, f, _ = solve_lp(np.where(allowed, 0.0, 1.0), a, b)
    if float(W[~allowed].sum()) > 1e-12 * mass:
        _raise_infeasible(allowed, a, b, f, source_names, target_names)
    source, target = strong_components(allowed, np.where(allowed, W, 0.0))
    return [(np.flatnonzero(source == label), np.flatnonzero(target == label)) for label in np.unique(source)]


def _raise_infeasible(
    allowed: NDArray[np.bool_],
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    f: NDArray[np.float64],
    source_names: list[str],
    target_names: list[str],
) -> None:
    """Name a set of sources that outweighs everything it may reach (Hall's condition; it is a level set of ``f``)."""
    excess, sources, targets = max(
        (
            (float(a[f >= level].sum() - b[reach].sum()), np.flatnonzero(f >= level), np.flatnonzero(reach))
            for level in np.unique(f)
            for reach in [allowed[f >= level].any(axis=0)]
        ),
        key=lambda cut: cut[0],
    )
    who = ", ".join(repr(source_names[k]) for k in sources)
    where = ", ".join(repr(target_names[l]) for l in targets)
    raise ValueError(
        f"forbidden leaves no feasible plan: source component {who} of weight {a[sources].sum():.6g} may only go to "
        f"{where} of weight {b[targets].sum():.6g}, so {excess:.3g} has nowhere to go; "
        f"allow more transitions, or relax the marginals with tau < 1"
    )
