"""What several learning tests start from."""

from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, train


@pytest.fixture(scope="session")
def habit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the quickstart's first stage."""
    return Path(train("sft.yaml", SEEDS[0], tmp_path_factory.mktemp("habit"))["checkpoint"])
