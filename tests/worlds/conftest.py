"""Objects that are closed when a test ends, and OpenEnv's own package, which needs an environment of its own."""

import os
import subprocess
import venv

import pytest

from tests.worlds.opening import closing_all

OPENENV = "openenv==0.10.0"

opened = pytest.fixture(closing_all)


@pytest.fixture(scope="session")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with OpenEnv: AGENTFACTORY_OPENENV_PYTHON, or a new one."""
    if given := os.environ.get("AGENTFACTORY_OPENENV_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("openenv")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", OPENENV], check=True)
    return python
