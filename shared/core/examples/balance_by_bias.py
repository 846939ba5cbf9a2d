"""Watch a bias even out the load of a router, without any auxiliary loss. Needs the extra ``torch``.

Token states of real models share a strong common direction, which makes a fresh router badly unbalanced.
"""

import torch

from shared_core import BiasBalancer, Router, load_stats

generator = torch.Generator().manual_seed(0)
states = 2 * torch.randn(64, generator=generator) + torch.randn(8192, 64, generator=generator)

torch.manual_seed(0)
balancer = BiasBalancer(32, update_rate=0.002)
router = Router.linear(64, 32, top_k=4, score="sigmoid", balancer=balancer)
with torch.no_grad():
    router.gate.weight.normal_(0, 64**-0.5)
    print(" updates  load of all rows")
    for update in range(601):
        if update % 100 == 0:
            router.eval()  # nothing is counted
            print(f"{update:8d}  {load_stats(router(states).counts())}")
            router.train()
        router(states[torch.randint(len(states), (1024,), generator=generator)])
        balancer.update()
