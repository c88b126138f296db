"""Fixtures used by every area of the tests."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Speed is measured in benchmarks; a busy machine must not fail a test of what is right.
settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("project")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Real and synthetic traces with known answers; they live beside the checkout and may be absent."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip("the shared traces are not beside this checkout")
    return folder
