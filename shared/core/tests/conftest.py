"""Real data and generators that several test files of shared-core use."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

# Without a device, kernels written in Triton are interpreted: slow, but the same programs. Triton reads the variable
# when it decorates a kernel, so it is set before any test imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def token_states(shared_data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``[6144, 384]`` (float32) of a small language model over four domains, and each row's sequence."""
    path = shared_data / "core" / "minilm_token_states.npz"
    if not path.is_file():
        pytest.skip(f"real token states are not here: {path} does not exist")
    with np.load(path, allow_pickle=False) as file:
        hidden = torch.from_numpy(file["hidden"].astype(np.float32))
        sequence = torch.from_numpy(file["sequence"].astype(np.int64))
    return hidden, sequence


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of random numbers."""
    return torch.Generator().manual_seed(20)
