"""Helpers of the loader's tests, as fixtures: the slow reference and a comparison with it."""

import gzip
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from z3trace.analyzers.load import load
from z3trace.analyzers.trace import Trace


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"load_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def slow() -> ModuleType:
    """The module with the slow reference reader and the comparison."""
    return _module("reference")


@pytest.fixture(scope="session")
def fuzz() -> ModuleType:
    """The module that mutates traces and checks what is loaded from them."""
    return _module("fuzz")


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Trace]:
    """Loads a trace from bytes."""

    def load_bytes(data: bytes, name: str = "trace.json", **options: Any) -> Trace:
        path = tmp_path / name
        path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
        return load(path, **options)

    return load_bytes
