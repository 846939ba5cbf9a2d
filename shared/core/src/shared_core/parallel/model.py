"""Share the experts of all layers of a model among processes."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shared_core.experts import GroupedExperts
from shared_core.parallel.exchange import experts_of_a_rank
from shared_core.parallel.layer import ExpertParallel, check_shareable, one_dimensional_mesh

__all__ = ["parallelize_experts"]

_Module = TypeVar("_Module", bound=nn.Module)


def parallelize_experts(
    module: _Module, mesh: DeviceMesh | dist.ProcessGroup, *, src_data_rank: int | None = 0
) -> _Module | ExpertParallel:
    """Replace every :class:`~shared_core.GroupedExperts` in a model by its :class:`ExpertParallel`, in place.

    Names in the state dict stay as they are. Call it before ``fully_shard`` and before the optimiser is made, which
    holds on to the parameters it was given.

    Parameters
    ----------
    module : nn.Module
        A :class:`~shared_core.MoE` or a model of many; may be on the meta device. Experts that stand in several places
        stay shared between them.
    mesh : DeviceMesh or ProcessGroup
        As in :class:`ExpertParallel`.
    src_data_rank : int, optional
        As in :class:`ExpertParallel`.

    Returns
    -------
    nn.Module
        ``module`` itself; if it *is* a GroupedExperts, the ExpertParallel that takes its place. Calling it again with
        the same mesh changes nothing.

    Raises
    ------
    ValueError
        If there are no experts inside, one cannot be shared equally, or is distributed over another mesh; nothing has
        been changed then.
    TypeError
        If a subclass of GroupedExperts with a forward pass of its own is inside.
    RuntimeError
        If ``torch.distributed`` is not initialised.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from shared_core import GroupedExperts, MoE, Router
    >>> from shared_core.parallel import parallelize_experts
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = MoE(Router.linear(8, 4, top_k=2), GroupedExperts(8, 16, num_experts=4))
    >>> type(parallelize_experts(layer, dist.group.WORLD).experts).__name__
    'ExpertParallel'
    >>> dist.destroy_process_group()
    """
    found = {name: part for name, part in module.named_modules() if isinstance(part, GroupedExperts)}
    if not found:
        raise ValueError(f"there are no GroupedExperts in {type(module).__name__}")
    first = next(iter(found.values()))
    mesh = one_dimensional_mesh(mesh, first.down_proj.device)
    for name, experts in found.items():
        if isinstance(experts, ExpertParallel) and experts.mesh == mesh:
            continue
        try:
            check_shareable(experts)
            experts_of_a_rank(experts.num_experts, mesh.size())
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name or type(module).__name__}: {error}") from None
    found.clear()  # every layer is freed as soon as its share is cut out

    if isinstance(module, GroupedExperts):
        return (
            module if isinstance(module, ExpertParallel) else ExpertParallel(module, mesh, src_data_rank=src_data_rank)
        )
    for places in _places_of_whole_experts(module):
        parent, name = places[0]
        share = ExpertParallel(getattr(parent, name), mesh, src_data_rank=src_data_rank)
        for parent, name in places:
            setattr(parent, name, share)
    return module


def _places_of_whole_experts(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For every GroupedExperts inside, the attributes that hold it."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():
            if isinstance(child, GroupedExperts) and not isinstance(child, ExpertParallel):
                places.setdefault(id(child), []).append((parent, name))
    return list(places.values())
