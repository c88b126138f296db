"""Simulated trainings, as a fixture."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """The module that simulates trainings and writes their traces."""
    spec = importlib.util.spec_from_file_location(
        "findings_training", Path(__file__).with_name("training.py")
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
