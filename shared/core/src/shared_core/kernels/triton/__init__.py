"""Triton kernels: routing and experts on a CUDA device, or on the CPU under ``TRITON_INTERPRET=1`` (slow, for tests).

Importing this package does not import Triton; its modules do, and are imported where something is launched. One
operation a file: ``gating``; ``plan`` (assignments sorted by expert), ``up``, ``project``, ``combine`` (forward);
``hidden_gradient``, ``weight_gradient``, ``bias_gradient``, ``routing_gradient`` (backward). ``tiles`` is the device
code that they share, ``configs`` the tile shapes they may be launched with, ``experts`` launches them in order.
"""
