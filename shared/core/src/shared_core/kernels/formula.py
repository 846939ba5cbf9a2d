"""What one expert computes between its two products, and the derivative of that; shared by all kernels.

Letters: I intermediate width, J = 2I if gated else I.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shared_core.kernels.activations import activate, activation_gradient

__all__ = ["Formula", "Parameters"]


class Parameters(NamedTuple):
    """Stacked parameters of E experts: ``up [E, J, H]``, ``down [E, D, I]``, biases ``[E, J]``, ``[E, D]`` or None."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


class Formula(NamedTuple):
    """``y = W2 h + b2`` with ``h = act(gate) · value`` of ``z = [gate; value] = W1 x + b1``, or ``h = act(z)``.

    Attributes
    ----------
    activation : str
        Name of the activation.
    gated : bool
        Whether ``z`` holds gate and value, gate first.
    weight_input : bool
        Whether a routing weight multiplies ``x`` instead of ``y``. Otherwise it is folded into the narrower ``h``.
    """

    activation: str
    gated: bool
    weight_input: bool

    def hidden(self, z: Tensor, dim: int) -> Tensor:
        """``h`` as a new tensor.

        Parameters
        ----------
        z : Tensor
            J features along ``dim``.
        dim : int
            0 or 1.

        Returns
        -------
        Tensor
            I features along ``dim``, strides as ``z``.
        """
        if not self.gated:
            return activate(self.activation, z)
        gate, value = z.chunk(2, dim)
        return activate(self.activation, gate).mul_(value)

    def hidden_for_gradient(self, z: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        """``h`` and, if gated, ``act(gate)``, which :meth:`gradient` needs again."""
        if not self.gated:
            return activate(self.activation, z), None
        gate, value = z.chunk(2, dim)
        activated = activate(self.activation, gate)
        return activated * value, activated

    def gradient(self, z: Tensor, activated: Tensor | None, dh: Tensor, dim: int) -> Tensor:
        """Gradient of ``z``; overwrites ``dh``.

        Parameters
        ----------
        z, activated : Tensor
            As given to and returned by :meth:`hidden_for_gradient`.
        dh : Tensor
            Gradient of ``h``.
        dim : int
            Where the features lie.

        Returns
        -------
        Tensor
            Shape and strides of ``z``.
        """
        dz = torch.empty_like(z)
        if activated is None:
            return activation_gradient(self.activation, z, dh, out=dz)
        gate, value = z.chunk(2, dim)
        d_gate, d_value = dz.chunk(2, dim)
        torch.mul(dh, activated, out=d_value)
        activation_gradient(self.activation, gate, dh.mul_(value), out=d_gate)
        return dz
