"""Models that the GPU tests share."""

from pathlib import Path

import pytest

from tests.gpu.models import make_model


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 million parameters."""
    return make_model(tmp_path_factory.mktemp("small") / "model", width=256, layers=4)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.1 billion parameters: enough for speed and memory to mean something."""
    return make_model(tmp_path_factory.mktemp("large") / "model", width=1024, layers=8)
