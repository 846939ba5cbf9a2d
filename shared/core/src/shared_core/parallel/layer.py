"""The experts of one layer, shared among the processes of a group.

Letters: R rows, k slots, E experts, W processes ("ranks"), L = E / W experts of one process, H width in, D width out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shared_core.checks import check_indices, forward_ad_active
from shared_core.dispatch import combine, permute
from shared_core.experts import GroupedExperts, _check_dtypes, _check_shapes, experts_forward
from shared_core.kernels import resolve_backend
from shared_core.parallel.exchange import (
    Terms,
    agree,
    choices_at_ranks,
    exchange,
    experts_of_a_rank,
    give_back,
    refuse,
    route_to_ranks,
)
from shared_core.parallel.shards import check_alike, draw_normal, shard_like, shard_parameter
from shared_core.routing import Routing

__all__ = ["ExpertParallel", "one_dimensional_mesh"]


class ExpertParallel(GroupedExperts):
    r"""Stacked experts of which every process holds a share; rows travel to them and their results back.

    A drop-in for the :class:`~shared_core.GroupedExperts` it is made of: the same call, the same names in the state
    dict, the same result. Each process passes *its own* rows and gets their outputs.

    Parameters
    ----------
    experts : GroupedExperts
        The whole, or a module on the meta device (then ``to_empty`` and :meth:`reset_parameters`, or a checkpoint,
        fill the shards). Its parameters are taken over; do not use it any more.
    mesh : DeviceMesh or ProcessGroup
        One-dimensional, of W processes with W a divisor of E: ``init_device_mesh("cuda", (8,))``, one dimension of a
        larger mesh (``mesh["ep"]``), or a process group.
    src_data_rank : int, optional
        Rank in the group whose values are shared out, as in :func:`torch.distributed.tensor.distribute_tensor`. None:
        every process keeps its share of its own values, which must be equal everywhere, and nothing is sent.

    Attributes
    ----------
    mesh : DeviceMesh
        One-dimensional.
    local_experts : range
        The experts that this process holds.
    gate_up_proj, down_proj, ... : Parameter
        As in :class:`~shared_core.GroupedExperts`, as DTensors sharded in their first dimension, so that
        ``torch.distributed.checkpoint`` restores them for any number of processes.

    Raises
    ------
    TypeError
        If ``experts`` are not plain GroupedExperts or ``mesh`` is neither mesh nor group.
    ValueError
        If the mesh has several dimensions, W does not divide E, or the experts are distributed already.
    RuntimeError
        If ``torch.distributed`` is not initialised, or the processes bring experts of different sizes or dtypes (all
        of them raise; not looked at where ``src_data_rank`` is None).

    Notes
    -----
    *What travels.* A row goes once to each process that holds one of its experts (not once for each choice), with its
    weights; the sum of its experts there comes back. Sums over processes are in float32, in a fixed order.

    *Gradients.* The gradient of a share is that of the **sum of the losses of all W processes**: rows of every process
    arrive there. Gradients of replicated parameters (the router) and of ``x`` are those of the process itself. So with
    summed losses: ``all_reduce(SUM)`` the replicated ones, leave the experts. With losses averaged over processes, as
    DDP and FSDP do: average the replicated ones and divide the gradients of the experts by W (by the number of *all*
    processes if they average over more; ``FSDPModule.set_gradient_divide_factor`` does it under FSDP2).

    *Together.* All processes of the group must call ``forward`` equally often, with an empty batch if they have no
    rows, and all must run the backward pass. Where one refuses its arguments, or comes with another dtype or grad mode,
    all raise; where one does not come at all, the others wait until the group's timeout. ``accumulate_grad`` has no
    effect here. Under ``torch.compile`` the layer runs eagerly between the graphs before and behind it: how many rows
    travel is data.

    References
    ----------
    Lepikhin et al., "GShard", 2020, arXiv:2006.16668 (expert parallelism).

    Examples
    --------
    One process; see ``examples/expert_parallel.py`` for several.

    >>> import torch, torch.distributed as dist
    >>> from shared_core import GroupedExperts, route
    >>> from shared_core.parallel import ExpertParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> whole = GroupedExperts(hidden_size=8, intermediate_size=16, num_experts=4)
    >>> x, routing = torch.randn(5, 8), route(torch.randn(5, 4), top_k=2)
    >>> expected = whole(x, routing)
    >>> shared = ExpertParallel(whole, dist.group.WORLD)
    >>> torch.allclose(shared(x, routing), expected), shared.local_experts
    (True, range(0, 4))
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        experts: GroupedExperts,
        mesh: DeviceMesh | dist.ProcessGroup,
        *,
        src_data_rank: int | None = 0,
    ) -> None:
        check_shareable(experts)
        mesh = one_dimensional_mesh(mesh, experts.down_proj.device)
        if src_data_rank is not None:
            _check_same_experts(experts, mesh)
        held = experts_of_a_rank(experts.num_experts, mesh.size())
        super().__init__(
            experts.hidden_size,
            experts.intermediate_size,
            experts.num_experts,
            activation=experts.activation,
            gated=experts.gated,
            bias=experts.down_proj_bias is not None,
            init_std=experts.init_std,
            recompute=experts.recompute,
            accumulate_grad=experts.accumulate_grad,
            backend=experts.backend,
            device="meta",  # only the names; the parameters are set below
        )
        self.mesh = mesh
        rank = mesh.get_local_rank()
        self.local_experts = range(rank * held, (rank + 1) * held)
        self.train(experts.training)
        for name, parameter in experts.named_parameters():
            setattr(self, name, shard_parameter(parameter, mesh, src_data_rank))
        self.register_load_state_dict_pre_hook(_cut_whole_tensors)  # type: ignore[no-untyped-call]

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes that share these experts."""
        return self.mesh.get_group()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights from ``N(0, init_std²)`` and set the biases to 0, alike for any number of processes.

        Parameters
        ----------
        generator : torch.Generator, optional
            In the same state on all processes; PyTorch's own by default (seed it alike).
        """
        for name, parameter in self.named_parameters():
            if not isinstance(parameter, DTensor):  # the meta placeholders of the constructor
                continue
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                draw_normal(parameter, self.init_std, generator)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, routing: Routing, *, weight_input: bool = False) -> Tensor:
        """Apply the chosen experts, wherever they are, to every row of this process.

        Parameters
        ----------
        x : Tensor
            ``[..., H]``, R rows; R may be 0 and differ between processes.
        routing : Routing
            Of the flattened rows to all E experts; k may differ between processes.
        weight_input : bool
            Multiply the weight into the expert's input instead of its output.

        Returns
        -------
        Tensor
            ``[..., H]`` in the dtype of ``x`` (under autocast: of autocast).

        Raises
        ------
        TypeError, ValueError
            As :func:`~shared_core.experts_forward`.
        RuntimeError
            If another process refused its arguments, or the processes disagree on sizes, dtypes, ``weight_input``, grad
            mode or whether the experts are trained.
        NotImplementedError
            Inside transforms of ``torch.func`` and forward-mode differentiation.
        """
        up, down = getattr(self, self._up_name), self.down_proj
        up_bias, down_bias = getattr(self, self._up_name + "_bias"), self.down_proj_bias
        group, num_ranks = self.group, self.mesh.size()
        try:  # whatever one process can fail at alone comes before the others are told to go on
            _check_transforms()
            _check_shapes(x, routing, up, down, up_bias, down_bias, self.gated)
            check_indices(routing.indices, routing.num_experts)
            _check_devices(down, x=x, indices=routing.indices, weights=routing.weights)
            device = x.device.type
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                x = x.to(torch.get_autocast_dtype(device))  # here, so that the narrower rows travel
            else:
                _check_dtypes(x, up=up, down=down, up_bias=up_bias, down_bias=down_bias)
            resolve_backend(self.backend, x.device, x.dtype)
            trained = any(parameter.requires_grad for parameter in self.parameters())
            terms = Terms.of(x, routing, weight_input=weight_input, trained_experts=trained)
            plan = route_to_ranks(routing, num_ranks).plan()
            experts, weights = choices_at_ranks(routing, plan)
            rows = permute(x.reshape(-1, x.shape[-1]), plan)
        except Exception:
            refuse(num_ranks, torch.device(self.mesh.device_type) if down.is_meta else down.device, group)
            raise
        agreement = agree(
            terms,
            experts,
            plan,
            x_needs_grad=x.requires_grad,
            weights_need_grad=routing.weights.requires_grad,
            group=group,
        )
        visitors, choices = exchange(rows, experts, weights, len(self.local_experts), agreement, group)
        sums = experts_forward(
            visitors,
            choices,
            _local(up),
            _local(down),
            up_bias=None if up_bias is None else _local(up_bias),
            down_bias=None if down_bias is None else _local(down_bias),
            activation=self.activation,
            gated=self.gated,
            weight_input=weight_input,
            recompute=self.recompute,
            backend=self.backend,
        )
        out = combine(give_back(sums, agreement, group), plan, weighted=False)
        return out.view(*x.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        """What the whole has, and which experts are here."""
        here = self.local_experts
        return f"{super().extra_repr()}, local_experts={here.start}..{here.stop - 1}"


def _local(parameter: Tensor) -> Tensor:
    """The shard itself. Its gradient flows back as a DTensor of the same placement."""
    local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return local


def _check_transforms() -> None:
    if torch._C._are_functorch_transforms_active() or forward_ad_active():
        raise NotImplementedError(
            "ExpertParallel does not run inside torch.func transforms or forward-mode differentiation"
        )


def _check_devices(down: Tensor, **tensors: Tensor) -> None:
    """Raise unless rows and routing are plain tensors where the experts are."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise TypeError(f"{name} is a DTensor; every process passes its own rows, as {name}.to_local()")
        if tensor.device != down.device:
            raise ValueError(f"{name} is on {tensor.device}, but the experts are on {down.device}")


def _check_same_experts(experts: GroupedExperts, mesh: DeviceMesh) -> None:
    """Raise on all processes where one comes with other experts, which the others would wait for or misread."""
    check_alike(
        mesh,
        num_experts=experts.num_experts,
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size,
        gated=experts.gated,
        bias=experts.down_proj_bias is not None,
        bytes_per_value=experts.down_proj.element_size(),
        is_bfloat16=experts.down_proj.dtype == torch.bfloat16,
        is_meta=experts.down_proj.is_meta,
    )


def check_shareable(experts: object) -> None:
    """Raise unless ``experts`` are GroupedExperts with whole parameters and the forward pass that is replaced."""
    if isinstance(experts, ExpertParallel):
        raise ValueError(f"the experts are already distributed, over {experts.mesh.size()} processes")
    if not isinstance(experts, GroupedExperts) or type(experts).forward is not GroupedExperts.forward:
        raise TypeError(f"experts must be GroupedExperts with their own forward, got {type(experts).__name__}")
    names = dict(experts.named_parameters())
    if {experts._up_name, "down_proj"} - names.keys() or any("." in name for name in names):
        raise ValueError(
            f"the experts hold {', '.join(names)} in place of plain parameters; "
            "remove parametrizations and pruning first"
        )
    for name, parameter in names.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is already distributed, as {parameter.placements}; "
                "share the experts first and apply fully_shard afterwards"
            )


def one_dimensional_mesh(mesh: object, device: torch.device) -> DeviceMesh:
    """``mesh``, or the mesh of a process group.

    Parameters
    ----------
    mesh : DeviceMesh or ProcessGroup
    device : torch.device
        Of the experts.

    Returns
    -------
    DeviceMesh

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :class:`ExpertParallel`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialised; start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names and then mesh['name']"
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions{'' if names is None else f' {names}'}; pass one of them, as {example}"
            )
        return mesh
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not a member of the group")
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"mesh must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    if device.type == "meta":
        raise ValueError("experts on the meta device need a DeviceMesh: a process group does not say which device")
    return DeviceMesh.from_group(mesh, device.type, mesh_dim_names=("ep",))


def _cut_whole_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Let ``load_state_dict`` take the file of a single process: every process cuts out its share."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
            continue
        if value.shape == parameter.shape:  # otherwise load_state_dict reports both shapes
            share = shard_like(value, parameter)
            if metadata.get("assign_to_params_buffers"):  # the share stays; as a view it would keep the whole alive
                state_dict[prefix + name] = share.clone()
            else:
                state_dict[prefix + name] = share
