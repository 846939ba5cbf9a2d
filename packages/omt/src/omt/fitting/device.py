"""E-steps of Gaussian mixtures on a device of PyTorch: densities, their log-sum-exp and the statistics of a block.

What :mod:`omt.fitting.sweeps` does in numpy, for blocks that are moved to the device one at a time. Sums come back
once a block and are added in float64; M-steps stay in numpy. PyTorch is imported when a device other than ``"cpu"`` is
asked for.

Letters: ``N`` samples, ``n`` rows of a block, ``d`` features, ``K`` components, ``r`` rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omt.families import Gaussian, GaussianComponents, quadratic
from omt.families.base import Family, Statistics
from omt.fitting.supervision import Rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from omt.fitting.sweeps import Data, Model, Sweep

_LOG_2PI = float(np.log(2.0 * np.pi))
# Rows moved to the device at a time: the transfer of 64 Ki rows of 50 features hides its latency.
_ROWS = 1 << 16
# Entries of the largest work array on the device: 256 MiB of float64.
_ENTRIES = 1 << 25


def engine_for(device: Any, family: Family, dtype: str, *, sparse: bool = False) -> TorchEngine | None:
    """What computes E-steps on a device: ``None`` for ``"cpu"``, which is numpy's.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    ValueError
        If there is no such device, it lacks the type, the family is not Gaussian, or samples are sparse.

    Examples
    --------
    >>> engine_for("cpu", Gaussian(), "float64") is None
    True
    """
    if isinstance(device, str) and device == "cpu":
        return None
    if not isinstance(family, Gaussian):
        raise ValueError(
            f"device is {str(device)!r} and the family is {family.name!r}; only Gaussian families run on a device, so "
            "give device='cpu'"
        )
    if sparse:
        raise ValueError(f"device is {str(device)!r} and X is sparse; give dense samples, or device='cpu'")
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"device={str(device)!r} needs PyTorch: pip install 'omt[torch]'; device='cpu' needs nothing"
        ) from error
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device is {device!r}; it must be 'cpu' or a device of PyTorch such as 'cuda' or 'cuda:1'"
        ) from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but PyTorch finds no CUDA device here; give device='cpu'")
    if place.type == "mps" and dtype == "float64":
        raise ValueError("device is 'mps', which has no float64; give dtype='float32' with it, or device='cpu'")
    try:
        torch.zeros(1, device=place).cpu()  # to and from: a device without memory of its own has no samples either
    except Exception as error:  # PyTorch raises several kinds for a device that it knows and does not have
        raise ValueError(
            f"device is {str(device)!r}, which PyTorch cannot use here: {str(error).splitlines()[0]}"
        ) from error
    return TorchEngine(place, dtype)


class TorchEngine:
    """E-steps on one device.

    Parameters
    ----------
    device
        A device of PyTorch.
    dtype
        ``"float64"`` or ``"float32"``: type of samples, densities and responsibilities there.
    """

    def __init__(self, device: torch.device, dtype: str) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._dtype = torch.float64 if dtype == "float64" else torch.float32
        self._model: Model | None = None
        self._parameters: dict[str, Tensor] = {}

    @property
    def rows(self) -> int:
        """Rows of a block that are worth the transfer."""
        return _ROWS

    def expectation(self, data: Data, model: Model, rows: Rows, X: NDArray[Any], result: Sweep) -> NDArray[Any]:
        """Add the sums of one block to ``result``; give the log-likelihood of each of its samples, ``[n]``."""
        samples = self._moved(X)
        R, value = self._assigned(data, model, rows, self._log_densities(model, samples))
        evidence = self._back(value)
        if data.weight is None:
            result.evidence += float(evidence.sum())
        else:
            result.evidence += float(evidence @ data.weight[rows])
            R *= self._moved(data.weight[rows])[:, None]
        self._add(result.statistics, samples, R)
        return evidence

    def evidence(self, data: Data, model: Model, X: NDArray[Any]) -> NDArray[Any]:
        """Log-likelihood of each sample of a block under the mixture, ``[n]``."""
        scores = self._log_densities(model, self._moved(X)) + self._moved(model.log_weights)
        return self._back(scores.logsumexp(1))

    def accumulate(self, statistics: Statistics, X: NDArray[Any], R: NDArray[Any]) -> None:
        """Add a block with given weighted responsibilities ``[n, K]`` to the statistics."""
        self._add(statistics, self._moved(X), self._moved(R))

    # -------------------------------------------------------------------------------------------------- transfers
    def _moved(self, array: Any) -> Tensor:
        return self._torch.as_tensor(np.require(array, requirements=("C", "W"))).to(self._device, self._dtype)

    @staticmethod
    def _back(tensor: Tensor) -> NDArray[np.float64]:
        return np.asarray(tensor.cpu().double().numpy())

    # -------------------------------------------------------------------------------------------------- densities
    def _prepared(self, model: Model) -> dict[str, Tensor]:
        """Parameters of a model on the device; a sweep uses one model for all its blocks."""
        if self._model is not model:
            g = model.components
            assert isinstance(g, GaussianComponents)  # noqa: S101  # engine_for lets no other family through
            centre = g.means.mean(axis=0)
            arrays: dict[str, Any] = {
                "means": g.means,
                "centre": centre,
                "constant": -0.5 * (g.d * _LOG_2PI + g.log_determinants),
            }
            if g.covariance_type == "full":
                arrays["whitening"] = g._whitening
                arrays["offsets"] = np.einsum("krd,kd->kr", g._whitening, g.means - centre)
            elif g.covariance_type == "tied":
                arrays["whitening"] = g._whitening[0]
                arrays["white means"] = (g.means - centre) @ g._whitening[0].T
            elif g.covariance_type == "lowrank":
                arrays["scale"], arrays["correction"] = g._woodbury[:2]
            else:
                arrays["precisions"] = 1.0 / g.diagonal_variances()
            self._model, self._parameters = model, {name: self._moved(value) for name, value in arrays.items()}
        return self._parameters

    def _log_densities(self, model: Model, X: Tensor) -> Tensor:
        """Log-density of each sample under each component, ``[n, K]``; see :mod:`omt.families.quadratic`."""
        p = self._prepared(model)
        K, d = p["means"].shape
        pieces = []
        step = max(1, _ENTRIES // (K * d))
        for start in range(0, X.shape[0], step):
            piece = X[start : start + step]
            if "offsets" in p:
                white = (piece - p["centre"]) @ p["whitening"].reshape(K * d, d).T
                distance = (white.view(-1, K, d) - p["offsets"]).square_().sum(2)
            elif "white means" in p:
                white = (piece - p["centre"]) @ p["whitening"].T
                distance = self._axis_aligned(white, p["white means"], self._torch.ones_like(p["white means"]))
            elif "precisions" in p:
                distance = self._axis_aligned(piece - p["centre"], p["means"] - p["centre"], p["precisions"])
            else:
                z = (piece - p["means"][:, None, :]) * p["scale"][:, None, :]  # [K, n, d]
                inside = z @ p["correction"].mT
                distance = (z.square().sum(2) - inside.square().sum(2)).T
            pieces.append(distance)
        return p["constant"] - 0.5 * self._torch.cat(pieces)

    def _axis_aligned(self, X: Tensor, means: Tensor, precisions: Tensor) -> Tensor:
        """Squared distances ``Σ_j (x_j − m_kj)² precision_kj``, ``[n, K]``, of samples and means about one centre."""
        far = (means.square() * precisions).sum(1)
        if float(far.max()) > float(quadratic.EXPANDED_LIMIT[np.dtype(str(self._dtype).removeprefix("torch."))]):
            # The expanded square would lose digits there.
            return ((X[:, None, :] - means).square_() * precisions).sum(2)
        return X.square() @ precisions.T - 2.0 * (X @ (means * precisions).T) + far

    def _assigned(self, data: Data, model: Model, rows: Rows, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Responsibilities ``[n, K]`` and log-likelihoods ``[n]``; see :meth:`omt.fitting.supervision.Supervision`."""
        torch, known = self._torch, data.supervision
        scores = scores + self._moved(model.log_weights)
        if known.codes is not None and known.owner is not None:
            codes = torch.as_tensor(known.codes[rows]).to(self._device)[:, None]
            owner = torch.as_tensor(known.owner).to(self._device)
            scores.masked_fill_((codes >= 0) & (codes != owner), -torch.inf)
        value = scores.logsumexp(1)
        # A sample so far out that every density underflows belongs nowhere.
        R = (scores - torch.where(value.isneginf(), 0.0, value)[:, None]).exp_()
        if known.soft is not None:
            soft = self._moved(known.soft[rows])
            given = ~soft[:, 0].isnan()
            r = soft[given]
            R[given] = r
            value[given] = (r * scores[given] - torch.xlogy(r, r)).sum(1)
        return R, value

    # ------------------------------------------------------------------------------------------------- statistics
    def _add(self, statistics: Statistics, X: Tensor, R: Tensor) -> None:
        """Add weights, first and second moments about the statistics' centre; see :class:`omt.families.Gaussian`."""
        sums = statistics.sums
        weight = self._back(R.sum(0))
        sums["weight"] += weight
        assert statistics.centre is not None  # noqa: S101  # those of Gaussians have one
        if sums["second"].ndim == 3:
            centre = self._moved(statistics.centre)
            first, second = [], []
            for k in range(R.shape[1]):
                offset = X - centre[k]
                weighted = offset * R[:, k, None]
                first.append(weighted.sum(0))
                second.append(weighted.T @ offset)
            sums["first"] += self._back(self._torch.stack(first))
            sums["second"] += self._back(self._torch.stack(second))
            return
        shift = statistics.centre.mean(axis=0)
        moved = X - self._moved(shift)
        linear, square = self._back(R.T @ moved), self._back(R.T @ moved.square())
        offsets = statistics.centre - shift
        sums["first"] += linear - weight[:, None] * offsets
        sums["second"] += square - 2.0 * offsets * linear + weight[:, None] * offsets**2
