"""Loads from files: routing traces, or token states under a randomly drawn gate. numpy only, except for balancing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_core.assignment import soft_assign
from shared_core.files import array_names, read_arrays
from shared_core.traces import RoutingTrace

# torch and rich are imported where they are used: they are extras.


def holds_states(files: list[Path]) -> bool:
    """Whether the input is token states; otherwise it is routing traces."""
    kinds = ["hidden" in array_names(path, kind=".npz file") for path in files]
    if any(kinds) and len(files) > 1:
        raise ValueError("token states are read from one file; several files must all be routing traces")
    return kinds[0]


def loads_of_traces(files: list[Path]) -> list[tuple[str, NDArray[Any]]]:
    """Count assignments per expert in each trace, with the name of its file."""
    return [(path.stem, RoutingTrace.load(path).counts()) for path in files]


def loads_of_states(
    path: Path, experts: int | None, top_k: int | None, seed: int, balance: tuple[int, float] | None
) -> list[tuple[str, NDArray[Any]]]:
    """Route token states by a random linear gate and count assignments.

    Parameters
    ----------
    path
        ``.npz`` with floats ``hidden [..., H]``.
    experts, top_k
        Experts to route to, and how many a token gets.
    seed
        Of the gate, drawn from N(0, 1/H), and of the tokens that balancing draws.
    balance
        Number of bias updates and their size, to count also after balancing (needs torch).

    Returns
    -------
    list of (str, ndarray)
        A name and the counts ``[E]``: by the gate alone, and with `balance` by the balanced gate.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file or a number is not as above.
    ImportError
        If `balance` is given and torch is not installed.
    """
    if experts is None or top_k is None:
        raise ValueError("token states need --experts and --top-k, for example --experts 64 --top-k 8")
    if experts < 1 or top_k < 1:
        raise ValueError(f"--experts and --top-k must be at least 1, got {experts} and {top_k}")
    if top_k > experts:
        raise ValueError(f"top_k={top_k} exceeds num_experts={experts}")
    hidden = read_arrays(path, {"hidden": (-1, "f")}, kind="file of token states")["hidden"]
    if hidden.ndim < 2 or not hidden.size:
        raise ValueError(f"hidden in {path} must have shape [..., H] with at least one token, not {list(hidden.shape)}")
    states = hidden.reshape(-1, hidden.shape[-1]).astype(np.float32)
    if not np.isfinite(states).all():
        row, column = np.argwhere(~np.isfinite(states))[0].tolist()
        raise ValueError(f"hidden in {path} is not finite in row {row}, column {column}")
    H = states.shape[1]
    gate = (np.random.default_rng(seed).standard_normal((H, experts)) / np.sqrt(H)).astype(np.float32)
    logits = states @ gate
    trace, _ = soft_assign(logits, top_k=top_k)
    loads = [("random gate", trace.counts())]
    if balance is not None:
        loads.append(("balanced", _balanced_counts(logits, top_k, seed, *balance)))
    return loads


def _balanced_counts(logits: NDArray[np.float32], top_k: int, seed: int, updates: int, rate: float) -> NDArray[Any]:
    """Let a :class:`BiasBalancer` learn its bias on random tokens; count what all tokens then choose."""
    from rich.console import Console
    from rich.progress import track

    if find_spec("torch") is None:
        raise ImportError("--balance needs PyTorch: pip install 'shared-core[torch]'")
    import torch

    from shared_core import BiasBalancer, route

    z = torch.from_numpy(logits)
    balancer = BiasBalancer(z.shape[1], rate)
    generator = torch.Generator().manual_seed(seed)
    console = Console(stderr=True)
    for _ in track(range(updates), "balancing", console=console, transient=True, disable=not console.is_terminal):
        rows = torch.randint(len(z), (1024,), generator=generator)
        balancer.observe(route(z[rows], top_k, score="sigmoid", selection_bias=balancer.expert_bias))
        balancer.update()
    counts = route(z, top_k, score="sigmoid", selection_bias=balancer.expert_bias).counts()
    return np.asarray(counts)
