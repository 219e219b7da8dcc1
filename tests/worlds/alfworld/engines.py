"""The Python that has ALFWorld's engine, for the tests that need it."""

import os

import pytest

from agentfactory.base.user_code.import_path import is_installed
from agentfactory.worlds.alfworld.engine import PACKAGES

PYTHON = os.environ.get("AGENTFACTORY_ALFWORLD_PYTHON")
"""Set by `make test-alfworld`; None: this Python."""
HAS_ENGINE = PYTHON is not None or all(map(is_installed, PACKAGES))

needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="alfworld is not installed: make test-alfworld")
