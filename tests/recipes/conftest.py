"""What the tests of recipes begin with."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `prepare`, a function of the test's module, has filled."""
    folder = tmp_path_factory.mktemp("prepared")
    request.module.prepare(folder, 0)
    return folder
