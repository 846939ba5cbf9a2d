"""Experts spread over processes: each process holds a share of them, and rows travel to the experts they chose.

=================  ===================================================================================================
``exchange``       which rows go to which process, what the processes agree on beforehand, and the way there and back
``layer``          :class:`ExpertParallel`, the experts of one layer
``model``          :func:`parallelize_experts`, all layers of a model in place
``shards``         parameters as shards: cutting, filling and drawing them
=================  ===================================================================================================

Processes are started by ``torchrun``, checkpoints are written by ``torch.distributed.checkpoint``; nothing of this is
repeated here.
"""

from shared_core.parallel.exchange import route_to_ranks
from shared_core.parallel.layer import ExpertParallel
from shared_core.parallel.model import parallelize_experts

__all__ = ["ExpertParallel", "parallelize_experts", "route_to_ranks"]
