"""Share the experts of a layer among processes, and look at what travels. Needs the extra ``torch``.

    torchrun --standalone --nproc-per-node=2 expert_parallel.py

Every process routes its own rows. The table shows how many rows reached each process, what it sent to the others (a row
goes once to a process, however many of its experts live there), and how far outputs and gradients are from those of one
process that holds all experts and all rows.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shared_core import GroupedExperts, MoE, Router
from shared_core.parallel import parallelize_experts, route_to_ranks

ROWS, H, I, E, K = 256, 64, 48, 12, 4

torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))  # starts gloo
rank, processes = mesh.get_local_rank(), mesh.size()

torch.manual_seed(0)  # the same layer everywhere
layer = MoE(Router.linear(H, E, K, renormalize=True), GroupedExperts(H, I, E, init_std=0.1))
single = copy.deepcopy(layer)
parallelize_experts(layer, mesh)

batches = torch.randn(processes, ROWS, H)
y, routing = layer(batches[rank])
y.square().sum().backward()
gradient = layer.experts.down_proj.grad.full_tensor()  # of the sum of the losses of all processes

expected, _ = single(batches)
expected.square().sum().backward()
difference = (y - expected[rank]).abs().max() / expected.abs().max()
gradient_difference = (gradient - single.experts.down_proj.grad).abs().max() / gradient.abs().max()

once = route_to_ranks(routing, processes).counts()  # rows to each process
choices = routing.counts().view(processes, -1).sum(1)
dist.all_reduce(arrived := once.clone())
elsewhere = torch.arange(processes) != rank
row = [arrived[rank], once[elsewhere].sum(), choices[elsewhere].sum(), difference, gradient_difference]
table = [torch.zeros(len(row), dtype=torch.float64) for _ in range(processes)]
dist.all_gather(table, torch.stack([value.double() for value in row]))

if rank == 0:
    print(f"{ROWS} rows a process, {E} experts of which {E // processes} on each, {K} chosen")
    print("rank  rows here    sent   kB sent   kB if once a choice   output differs by   gradient differs by")
    for number, (here, sent, chosen, forward, backward) in enumerate(table):
        kB_once, kB_choice = sent * (H + 2 * K) * 4 / 1000, chosen * H * 4 / 1000  # a row takes its choices along
        print(f"{number:4d} {here:10.0f} {sent:7.0f} {kB_once:9.1f} {kB_choice:21.1f} {forward:19.1e} {backward:21.1e}")
dist.barrier()  # holds no tensor of Python's: no thread of gloo needs the interpreter while it ends
dist.destroy_process_group()
