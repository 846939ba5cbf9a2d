"""Experts on a CUDA device: the launches of a forward and of a backward pass.

Forward: sort, up, down, combine. Backward: hidden gradient, its by-products, dW2, dW1, dX, combine. Rows are gathered
where they are loaded, so no permuted copy of ``x`` or of the output gradient exists; nothing looks at a value on the
host, so nothing waits for the device and a CUDA graph can capture both; nothing is summed by atomics, so the same
inputs give the same bits.

Letters: R rows, k slots, E experts, N = R·k assignments sorted by expert (sentinels last), H width in, D width out, I
intermediate width, J = 2I if gated else I, C column blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from shared_core.kernels.formula import Formula, Parameters
from shared_core.kernels.triton.bias_gradient import bias_gradient_kernel
from shared_core.kernels.triton.combine import combine_kernel
from shared_core.kernels.triton.hidden_gradient import hidden_gradient_kernel
from shared_core.kernels.triton.launch import Setting, launch, narrowest, on_device
from shared_core.kernels.triton.plan import sort_assignments
from shared_core.kernels.triton.project import project_kernel
from shared_core.kernels.triton.routing_gradient import routing_gradient_kernel
from shared_core.kernels.triton.tiles import max_tiles
from shared_core.kernels.triton.up import up_kernel
from shared_core.kernels.triton.weight_gradient import weight_gradient_kernel

__all__ = ["backward", "forward"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_COLUMNS = 1024  # of a program that only adds rows


def forward(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    parameters: Parameters,
    formula: Formula,
    *,
    keep_plan: bool = False,
    keep_z: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Evaluate the experts outside of autograd, as :func:`shared_core.kernels.cpu_experts.forward` does.

    Raises
    ------
    ValueError
        If the dtype is not one that these kernels take, or there are 2³¹ assignments or more.
    """
    _check(x, indices.numel())
    with on_device(x.device):
        order, bounds = sort_assignments(indices, parameters.up.shape[0])
        call = _Call(_rows_contiguous(x), weights, parameters, formula, order, bounds)
        z, h = call.up(keep_z=keep_z, keep_h=True)
        out = call.down(h, indices)
    if not keep_plan:
        order, bounds = order.new_empty(0), order.new_empty(0)
    return out, x.new_empty(0) if z is None else z, order, bounds


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    parameters: Parameters,
    kept_z: Tensor,
    order: Tensor,
    bounds: Tensor,
    formula: Formula,
    *,
    needs: tuple[bool, bool, bool, bool, bool, bool],
    up_grad: Tensor | None = None,
    down_grad: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients, outside of autograd; arguments and results as in :func:`shared_core.kernels.cpu_experts.backward`."""
    need_x, need_w, need_up, need_down, need_up_bias, need_down_bias = needs
    with on_device(x.device):
        call = _Call(_rows_contiguous(x), weights, parameters, formula, order, bounds)
        g = _rows_contiguous(grad)
        # Where the weight multiplies the input, dz of the products has it and dz of the bias lacks it.
        separate = formula.weight_input and need_up_bias
        keep_dz = need_x or need_up or (need_up_bias and not separate)
        h = dz = bare = parts = None
        if need_down or keep_dz or separate or need_w:
            z = kept_z if kept_z.numel() else call.up(keep_z=True, keep_h=False)[0]
            h, dz, bare, parts = call.hidden_gradient(
                g, z, keep_h=need_down, keep_dz=keep_dz, keep_bare=separate, keep_parts=need_w
            )
        dw, absent = call.routing_gradient(g, parts, mark=need_x)
        return (
            call.rows_gradient(dz, absent) if dz is not None and need_x else None,
            dw,
            call.up_gradient(dz, up_grad) if dz is not None and need_up else None,
            call.down_gradient(g, h, down_grad) if h is not None else None,
            call.bias_gradient(parameters.up_bias, bare if separate else dz) if need_up_bias else None,
            call.bias_gradient(parameters.down_bias, g, gather=True) if need_down_bias else None,
        )


def _check(x: Tensor, num_assignments: int) -> None:
    if x.dtype not in _DTYPES:
        taken = ", ".join(str(dtype) for dtype in _DTYPES)
        raise ValueError(f"backend 'triton' takes {taken}, got x of {x.dtype}")
    if num_assignments >= 2**31:
        raise ValueError(
            f"backend 'triton' takes fewer than 2**31 assignments (rows times slots), got {num_assignments}"
        )


def _rows_contiguous(rows: Tensor) -> Tensor:
    """Rows whose features lie side by side, which is what the loads of a tile are made for."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _unit_strides(matrices: Tensor) -> tuple[int, int]:
    """Along which of its two directions a stacked matrix is contiguous: it decides how a tile is best loaded."""
    return int(matrices.stride(1) == 1), int(matrices.stride(2) == 1)


class _Call:
    """What every launch of one call reads."""

    def __init__(
        self, x: Tensor, weights: Tensor, parameters: Parameters, formula: Formula, order: Tensor, bounds: Tensor
    ) -> None:
        self.x, self.weights, self.formula = x, weights.reshape(-1).contiguous(), formula
        up, down, up_bias, down_bias = parameters
        self.up_matrix, self.down_matrix = up, down
        self.up_bias = None if up_bias is None else up_bias.contiguous()
        self.down_bias = None if down_bias is None else down_bias.contiguous()
        self.order, self.bounds = order, bounds
        self.num_rows, self.num_slots = weights.shape
        self.num_assignments = order.shape[0]
        self.num_experts, self.features, self.hidden = up.shape
        self.inner, self.width = down.shape[2], down.shape[1]
        self.setting = Setting(x.device, x.dtype, self.num_assignments, self.num_experts)
        self.padded_experts = triton.next_power_of_2(self.num_experts)
        # A tuner runs a kernel many times: none reads what it writes, but for sums onto a gradient, never tuned.
        self.plan: dict[str, Any] = {"order_ptr": order, "bounds_ptr": bounds}
        self.products: dict[str, Any] = {
            "num_experts": self.num_experts,
            "PRECISION": self.setting.precision,
            "EXPERTS": self.padded_experts,
        }
        self.activation: dict[str, Any] = {
            "ACTIVATION": formula.activation,
            "GATED": formula.gated,
            "WEIGHT_INPUT": formula.weight_input,
        }

    def _tiles(self, columns: int) -> Callable[[int, int], int]:
        def programs(block_m: int, block_n: int) -> int:
            rows = max_tiles(self.num_assignments, self.num_experts, block_m)
            return rows * _blocks(columns, block_n)

        return programs

    def up(self, *, keep_z: bool, keep_h: bool) -> tuple[Tensor | None, Tensor]:
        """Bare products ``[N, J]``, flat, if kept; hidden layer ``[N, I]``."""
        z = self.x.new_empty(self.num_assignments * self.features) if keep_z else None
        h = self.x.new_empty(self.num_assignments if keep_h else 0, self.inner)
        arguments = {
            "x_ptr": self.x,
            "up_ptr": self.up_matrix,
            "bias_ptr": self.up_bias,
            "weights_ptr": self.weights,
            "z_ptr": z,
            "h_ptr": h if keep_h else None,
            "num_slots": self.num_slots,
            "hidden": self.hidden,
            "inner": self.inner,
            "x_row": self.x.stride(0),
            "up_expert": self.up_matrix.stride(0),
            "up_out": self.up_matrix.stride(1),
            "up_in": self.up_matrix.stride(2),
        }
        launch(
            "up",
            up_kernel,
            self._tiles(self.inner),
            arguments | self.plan | self.products | self.activation,
            self.setting,
            sizes=(self.hidden, self.features, *_unit_strides(self.up_matrix)),
            depth=self.hidden,
        )
        return z, h

    def down(self, h: Tensor, indices: Tensor) -> Tensor:
        """Output ``[R, D]`` of the hidden layer."""
        weights = None if self.formula.weight_input else self.weights
        return self._project(
            h, self.down_matrix.mT, self.down_bias, weights, indices.reshape(-1).contiguous(), self.num_experts
        )

    def rows_gradient(self, dz: Tensor, absent: Tensor) -> Tensor:
        """Gradient ``[R, H]`` of the rows."""
        return self._project(dz, self.up_matrix, None, None, absent, 1)

    def _project(
        self, a: Tensor, matrices: Tensor, bias: Tensor | None, weights: Tensor | None, chosen: Tensor, limit: int
    ) -> Tensor:
        """Every assignment's row of ``a [N, K]`` times its ``matrices [E, K, M]``, summed over slots: ``[R, M]``."""
        _, depth, width = matrices.shape
        only_slot = self.num_slots == 1
        # One slot: its result is the row's result, so there is nothing to add, but rows without an expert must be 0.
        by_slot = self.x.new_zeros(self.num_rows, width) if only_slot else a.new_empty(self.num_assignments, width)
        arguments = {
            "a_ptr": a,
            "b_ptr": matrices,
            "bias_ptr": bias,
            "weights_ptr": weights,
            "out_ptr": by_slot,
            "inner": depth,
            "width": width,
            "b_expert": matrices.stride(0),
            "b_in": matrices.stride(1),
            "b_out": matrices.stride(2),
        }
        launch(
            "project",
            project_kernel,
            self._tiles(width),
            arguments | self.plan | self.products,
            self.setting,
            sizes=(depth, width, *_unit_strides(matrices)),
            depth=depth,
        )
        return by_slot if only_slot else self._combine(by_slot, chosen, limit)

    def _combine(self, by_slot: Tensor, chosen: Tensor, limit: int) -> Tensor:
        width = by_slot.shape[1]
        out = self.x.new_empty(self.num_rows, width)
        block = min(_MAX_COLUMNS, triton.next_power_of_2(max(width, 1)))
        if out.numel():
            combine_kernel[self.num_rows, _blocks(width, block)](
                by_slot, chosen, out, self.num_slots, limit, width, BLOCK_N=block, num_warps=4, enable_fp_fusion=True
            )
        return out

    def hidden_gradient(
        self, g: Tensor, z: Tensor | None, *, keep_h: bool, keep_dz: bool, keep_bare: bool, keep_parts: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """``h [N, I]``, ``dz [N, J]`` for products and for the bias, parts ``[C, N]`` of dw; each only if kept."""
        h = self.x.new_empty(self.num_assignments, self.inner) if keep_h else None
        dz = self.x.new_empty(self.num_assignments, self.features) if keep_dz else None
        bare = self.x.new_empty(self.num_assignments, self.features) if keep_bare else None
        parts = None
        if keep_parts:
            most = _blocks(self.inner, narrowest("hidden_gradient", self.setting))
            parts = self.x.new_empty(most, self.num_assignments, dtype=torch.float32)
        arguments = {
            "g_ptr": g,
            "down_ptr": self.down_matrix,
            "z_ptr": z,
            "bias_ptr": self.up_bias,
            "weights_ptr": self.weights,
            "h_ptr": h,
            "dz_ptr": dz,
            "dz_bare_ptr": bare,
            "parts_ptr": parts,
            "num_assignments": self.num_assignments,
            "num_slots": self.num_slots,
            "inner": self.inner,
            "width": self.width,
            "g_row": g.stride(0),
            "down_expert": self.down_matrix.stride(0),
            "down_out": self.down_matrix.stride(1),
            "down_in": self.down_matrix.stride(2),
        }
        tile = launch(
            "hidden_gradient",
            hidden_gradient_kernel,
            self._tiles(self.inner),
            arguments | self.plan | self.products | self.activation,
            self.setting,
            sizes=(self.width, self.features, *_unit_strides(self.down_matrix)),
            depth=self.width,
        )
        # Tuning may have left other tiles' parts behind those of the last launch.
        return h, dz, bare, None if parts is None else parts[: _blocks(self.inner, tile.n)]

    def routing_gradient(self, g: Tensor, parts: Tensor | None, *, mark: bool) -> tuple[Tensor | None, Tensor]:
        """Gradient ``[R, k]`` of the weights if there are parts of it, and 1 in ``[R·k]`` for sentinels if marked."""
        dw = None if parts is None else torch.empty_like(self.weights).view(self.num_rows, self.num_slots)
        mark = mark and self.num_slots > 1
        absent = self.order.new_empty(self.num_assignments if mark else 0, dtype=torch.int8)
        if self.num_assignments and (dw is not None or mark):
            bias = None if self.formula.weight_input else self.down_bias
            block = 32 if bias is not None else 128
            routing_gradient_kernel[(_blocks(self.num_assignments, block),)](
                parts,
                g,
                bias,
                self.order,
                self.bounds,
                dw,
                absent if mark else None,
                self.num_assignments,
                self.num_experts,
                self.num_slots,
                0 if parts is None else parts.shape[0],
                self.width,
                g.stride(0),
                EXPERTS=self.padded_experts,
                BLOCK_M=block,
                BLOCK_N=128,
                num_warps=4,
                enable_fp_fusion=True,
            )
        return dw, absent

    def up_gradient(self, dz: Tensor, existing: Tensor | None) -> Tensor | None:
        """``Σ dzᵀ x`` of every expert, ``[E, J, H]``; None if it was added to what exists."""
        return self._weight_gradient(self.up_matrix, dz, self.x, existing, gather_left=False)

    def down_gradient(self, g: Tensor, h: Tensor, existing: Tensor | None) -> Tensor | None:
        """``Σ gᵀ h`` of every expert, ``[E, D, I]``; None if it was added to what exists."""
        return self._weight_gradient(self.down_matrix, g, h, existing, gather_left=True)

    def _weight_gradient(
        self, like: Tensor, left: Tensor, right: Tensor, existing: Tensor | None, *, gather_left: bool
    ) -> Tensor | None:
        out = torch.empty_like(like, memory_format=torch.contiguous_format) if existing is None else existing
        _, left_width, right_width = like.shape
        arguments = {
            "left_ptr": left,
            "right_ptr": right,
            "out_ptr": out,
            "num_slots": self.num_slots,
            "left_width": left_width,
            "right_width": right_width,
            "left_row": left.stride(0),
            "right_row": right.stride(0),
            "GATHER_LEFT": gather_left,
            "ACCUMULATE": existing is not None,
            "PRECISION": self.setting.precision,
        }

        def programs(block_m: int, block_n: int) -> int:
            return self.num_experts * _blocks(left_width, block_m) * _blocks(right_width, block_n)

        launch(
            "weight_gradient",
            weight_gradient_kernel,
            programs,
            arguments | self.plan,
            self.setting,
            sizes=(left_width, right_width, int(gather_left)),
            repeatable=existing is None,
        )
        return out if existing is None else None

    def bias_gradient(self, like: Tensor | None, values: Tensor | None, *, gather: bool = False) -> Tensor | None:
        """Sum of every expert's rows, shaped ``like``."""
        if like is None or values is None:
            return None
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        weights = self.weights if gather and not self.formula.weight_input else None
        block = 128
        bias_gradient_kernel[self.num_experts, _blocks(like.shape[1], block)](
            values,
            weights,
            self.order,
            self.bounds,
            out,
            self.num_slots,
            like.shape[1],
            values.stride(0),
            GATHER=gather,
            BLOCK_M=32,
            BLOCK_N=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
        return out
