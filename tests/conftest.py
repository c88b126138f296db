"""Fixtures used by every area of the tests."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Real and synthetic traces with known answers; they live beside the checkout and may be absent."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip("the shared traces are not beside this checkout")
    return folder
