"""The two loops of expectation-maximisation, and the state that they carry from pass to pass.

Letters: ``N`` samples, ``d`` features, ``K`` components.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omt.families.base import Family, Prior, Statistics
from omt.families.build import components_of
from omt.fitting.checkpoint import Checkpoint
from omt.fitting.progress import Progress
from omt.fitting.sweeps import ATTEMPTS, CANDIDATES, Data, Model, Sweep, expectation, maximise, refill, sweep
from omt.report import ComponentCurve

# Step sizes of stepwise EM: η_t = (t + t₀)^−κ.
_STEP_OFFSET = 8
_STEP_POWER = 0.6


@dataclass
class State:
    """Where a fit stands.

    Attributes
    ----------
    model, prior
        The current mixture, and what regularises it.
    iteration
        Passes done.
    history
        Objective per sample of each pass.
    attempts, origin
        How often each component was placed anew, and which component it was at the start, ``[K]``.
    removed
        Components given up.
    converged
        Whether the last pass changed the objective by less than the tolerance.
    log_likelihood
        Log-likelihood per sample in the last pass, before the update that it led to.
    running
        Statistics of stepwise EM, on the scale of all samples.
    curve
        The criterion by which the number of components was chosen, if it was.
    """

    model: Model
    prior: Prior
    attempts: NDArray[np.int64]
    origin: NDArray[np.int64]
    iteration: int = 0
    history: list[float] = field(default_factory=list)
    removed: int = 0
    converged: bool = False
    log_likelihood: float = float("nan")
    running: Statistics | None = None
    curve: ComponentCurve | None = None

    @classmethod
    def of(cls, model: Model, prior: Prior) -> Self:
        """State before the first pass."""
        K = model.components.K
        return cls(model, prior, np.zeros(K, dtype=np.int64), np.arange(K, dtype=np.int64))

    def restart(self) -> None:
        """Forget the passes made so far, but not the model."""
        self.iteration, self.history, self.converged = 0, [], False

    def drop(self, keep: NDArray[np.bool_]) -> None:
        """Give up components; warn of it."""
        if keep.all():
            return
        lost = int((~keep).sum())
        self.removed += lost
        self.attempts, self.origin = self.attempts[keep], self.origin[keep]
        warnings.warn(
            f"{lost} component(s) had no samples left and were removed; {int(keep.sum())} remain; give a smaller "
            "n_components",
            UserWarning,
            stacklevel=5,
        )

    def save(self, store: Checkpoint, *, now: bool = False) -> None:
        """Keep the state on disk."""
        parameters = self.model.components.parameters()
        arrays = {f"components/{key}": np.asarray(value) for key, value in parameters.items()}
        arrays |= {f"prior/{key}": value for key, value in self.prior.items()}
        arrays |= {"weights": self.model.weights, "attempts": self.attempts.copy(), "origin": self.origin}
        if self.running is not None:
            arrays |= {f"running/{key}": value for key, value in self.running.sums.items()}
            arrays |= {} if self.running.centre is None else {"centre": self.running.centre}
        progress = {
            "family": self.model.components.family,
            "iteration": self.iteration,
            "history": list(self.history),
            "removed": self.removed,
            "converged": self.converged,
            "log_likelihood": self.log_likelihood,
            "curve": None if self.curve is None else self.curve.to_dict(),
        }
        store.save(arrays, progress, now=now)

    @classmethod
    def restore(cls, store: Checkpoint) -> Self | None:
        """State of an unfinished fit, or ``None`` if there is none."""
        found = store.load()
        if found is None:
            return None
        arrays, progress = found
        parts: dict[str, dict[str, Any]] = {"components": {}, "prior": {}, "running": {}}
        for key, value in arrays.items():
            if "/" in key:
                group, name = key.split("/", 1)
                parts[group][name] = value
        components = components_of(progress["family"], parts["components"])
        return cls(
            Model(arrays["weights"], components),
            parts["prior"],
            arrays["attempts"],
            arrays["origin"],
            int(progress["iteration"]),
            [float(value) for value in progress["history"]],
            int(progress["removed"]),
            bool(progress["converged"]),
            float(progress["log_likelihood"]),
            Statistics(parts["running"], arrays.get("centre")) if parts["running"] else None,
            None if progress.get("curve") is None else ComponentCurve.from_dict(progress["curve"]),
        )


def batch(
    data: Data,
    family: Family,
    state: State,
    max_iter: int,
    tol: float,
    store: Checkpoint | None,
    bar: Progress,
    *,
    title: str = "batch EM",
    adapt: bool = False,
) -> None:
    """Batch EM until the objective per sample rises by less than ``tol``, from ``state`` and into it.

    The objective is the log-likelihood plus the log-prior. It never falls, except where an empty component is
    placed anew.

    Parameters
    ----------
    data, family, state
        What to sweep over, how, and from where.
    max_iter
        Most passes, those of a resumed fit included.
    tol
        Nats per sample.
    store, bar
        Where state and progress go.
    title
        What the progress bar calls this stage.
    adapt
        Estimate the prior anew in every pass: for the first passes, which begin with a crude partition. A fixed
        prior is what makes the objective monotone.
    """
    supervised = data.supervision.is_given
    disturbed = False
    with bar.stage(title, max_iter, state.iteration) as advance:
        while state.iteration < max_iter and not state.converged:
            found = sweep(data, family, state.model)
            if adapt:
                state.prior = family.prior(found.statistics)
            state.log_likelihood = found.evidence / data.N
            value = state.log_likelihood + family.log_prior(state.model.components, state.prior) / data.N
            rise = value - state.history[-1] if state.history else np.inf
            state.history.append(value)
            keep, placed = refill(family, found, state.prior, state.attempts, supervised=supervised)
            if rise <= tol and not disturbed and not adapt and placed == 0 and keep.all():
                state.converged = True
            else:
                _maximise(data, family, found, state, keep)
                disturbed = placed > 0 or not keep.all()
            state.iteration += 1
            if store is not None:
                state.save(store)
            advance(value)


def stepwise(
    data: Data,
    family: Family,
    state: State,
    epochs: int,
    seed: int,
    store: Checkpoint,
    bar: Progress,
) -> None:
    """Stepwise EM over shuffled batches for some epochs, then one exact pass, from ``state`` and into it.

    Running statistics follow ``s ← (1 − η_t) s + η_t ŝ`` with the statistics ŝ of one batch, scaled up to all samples.

    References
    ----------
    Cappé & Moulines (2009), On-line expectation-maximization algorithm for latent data models, equation 15.
    """
    supervised = data.supervision.is_given
    with bar.stage("stepwise EM", epochs + 1, state.iteration) as advance:
        while state.iteration < epochs:
            found = _epoch(data, family, state, seed)
            keep, _ = refill(family, found, state.prior, state.attempts, supervised=supervised)
            state.running = found.statistics.select(keep)
            _maximise(data, family, found, state, keep)
            state.history.append(found.evidence / data.N)
            state.iteration += 1
            state.save(store, now=True)
            advance(state.history[-1])
        found = sweep(data, family, state.model)
        state.log_likelihood = found.evidence / data.N
        state.history.append(state.log_likelihood)
        # Nothing comes after this pass: what is empty now is not placed anew.
        keep, _ = refill(family, found, state.prior, state.attempts + ATTEMPTS, supervised=supervised)
        _maximise(data, family, found, state, keep)
        state.converged = True
        advance(state.history[-1])


def _epoch(data: Data, family: Family, state: State, seed: int) -> Sweep:
    """One pass of stepwise EM; ``found.statistics`` are the running ones, which become those of the state."""
    assert state.running is not None  # noqa: S101  # set where the stage begins
    # A copy: an interrupted epoch leaves the state as it was before.
    running = Statistics({name: value.copy() for name, value in state.running.sums.items()}, state.running.centre)
    model = state.model
    K, d = model.components.K, model.components.d
    result = Sweep(running)
    buffer = np.empty((data.batch_size, K), dtype=data.dtype)
    rng = np.random.default_rng([seed, 2**32, state.iteration])
    step = state.iteration * -(-data.N // data.batch_size)
    for rows, X in data.source.shuffled(data.batch_size, rng, data.dtype):
        found = Sweep(family.empty(K, d, running.centre))
        expectation(data, family, model, rows, X, found, buffer)
        result.evidence += found.evidence
        result.candidates = sorted(result.candidates + found.candidates, key=lambda pair: pair[0])[:CANDIDATES]
        step += 1
        eta = (step + _STEP_OFFSET) ** -_STEP_POWER
        running.blend(found.statistics, 1.0 - eta, eta * data.N / rows.size)
        model = maximise(family, running, state.prior, model.components)
    return result


def _maximise(data: Data, family: Family, found: Sweep, state: State, keep: NDArray[np.bool_]) -> None:
    """M-step on the components that are kept; the supervision of the others goes with them."""
    previous = state.model.components
    if not keep.all():
        state.drop(keep)
        data.supervision = data.supervision.select(keep)
        previous = previous.select(keep)
        found.statistics = found.statistics.select(keep)
    state.model = maximise(family, found.statistics, state.prior, previous)
