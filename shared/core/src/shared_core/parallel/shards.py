"""Parameters as shards of a mesh: cutting a stacked tensor, filling a shard from a whole one, drawing initial values.

Letters: E experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["block_of", "check_alike", "draw_normal", "shard_like", "shard_parameter"]


def check_alike(mesh: DeviceMesh, **properties: int) -> None:
    """Raise on every process unless all of them bring the same numbers; one small collective.

    Parameters
    ----------
    mesh : DeviceMesh
        One-dimensional.
    **properties : int
        By the names that the message uses, equally many on every process.

    Raises
    ------
    RuntimeError
        With the first property that differs and its value on every rank.
    """
    own = torch.tensor(list(properties.values()), dtype=torch.int64, device=mesh.device_type)
    table = torch.empty(mesh.size(), len(properties), dtype=torch.int64, device=mesh.device_type)
    dist.all_gather(list(table.unbind()), own, group=mesh.get_group())
    for name, values in zip(properties, table.T.tolist(), strict=True):
        if len(set(values)) > 1:
            told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise RuntimeError(f"the processes bring different experts: {name} is {told}; build them alike everywhere")


def shard_parameter(parameter: nn.Parameter, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Parameter:
    """Share a stacked parameter ``[E, ...]`` among the processes of a mesh.

    Parameters
    ----------
    parameter : Parameter
        The whole; a meta tensor stays one.
    mesh : DeviceMesh
        One-dimensional.
    src_data_rank : int, optional
        Whose values count; None: every process cuts its own, without communication.

    Returns
    -------
    Parameter
        A DTensor, ``Shard(0)``, with storage of its own, so that the whole can be freed.
    """
    source = None if parameter.is_meta else src_data_rank
    shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=source)
    local = shard.to_local()
    if not parameter.is_meta and local.untyped_storage().nbytes() > local.nbytes:  # a view would keep the whole alive
        shard = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def block_of(parameter: DTensor) -> tuple[slice, ...]:
    """Where the local shard lies in the whole, under any nesting of shards (expert parallelism, then FSDP).

    Parameters
    ----------
    parameter : DTensor

    Returns
    -------
    tuple of slice
        ``whole[block_of(parameter)]`` has the shape of ``parameter.to_local()``.
    """
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def shard_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """Cut from a whole tensor what this process holds of ``parameter``, without communication.

    Parameters
    ----------
    whole : Tensor
        ``[E, ...]``, the same on every process.
    parameter : DTensor
        Of the same global shape.

    Returns
    -------
    DTensor
        With the mesh and placements of ``parameter``.
    """
    return DTensor.from_local(
        whole[block_of(parameter)],
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def draw_normal(parameter: DTensor, std: float, generator: torch.Generator | None) -> None:
    """Fill the local shard from N(0, std²) such that the values do not depend on how many processes there are.

    Every process draws all E experts in turn and keeps its own. Drawing only the own ones would give each process the
    *same* experts wherever all processes start from one seed, as they must for the replicated parameters.

    Parameters
    ----------
    parameter : DTensor
        ``[E, ...]``.
    std : float
    generator : torch.Generator, optional
        In the same state on all processes.
    """
    local = parameter.to_local()
    own, *inner = block_of(parameter)
    scratch = torch.empty(parameter.shape[1:], device=local.device, dtype=local.dtype)
    for expert in range(parameter.shape[0]):
        nn.init.normal_(scratch, std=std, generator=generator)
        if own.start <= expert < own.stop:
            local[expert - own.start].copy_(scratch[tuple(inner)])
