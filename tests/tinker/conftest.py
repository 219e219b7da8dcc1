"""Fixtures of the Tinker tests: the hub's stand-in, and a service that the files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import shared_folder
from tests.tinker.offline_hub import offline_hub
from tests.tinker.service import Service, service


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return offline_hub(shared_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def running(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(hub, tmp_path_factory.mktemp("service")) as found:
        yield found
