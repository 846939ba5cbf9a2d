"""Fixtures and profiles that every member's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_ROOT = Path(__file__).resolve().parent

settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data beside the repository; tests that use it skip when it is absent."""
    folder = Path(os.environ.get("MOE_SHARED_DATA", _ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data are not here: {folder} does not exist (set MOE_SHARED_DATA to their folder)")
    return folder
