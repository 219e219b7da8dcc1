"""Cut connections and killed processes: no request is lost or done twice, and a saved state goes on bit-equal."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tinker.cutting_proxy import KINDS, cutting_proxy
from tests.tinker.service import CLIENTS, Service, service
from tests.waiting import wait_for

CUTS = 200


def test_cut_connections_change_nothing(running: Service) -> None:
    expected = running.cases("many.py")("everything")
    assert expected["models"] == [12, 12]
    with cutting_proxy(int(running.url.rpartition(":")[2]), CUTS) as proxy:
        found = running.cases("many.py", TINKER_BASE_URL=f"http://127.0.0.1:{proxy.port}")("everything")
    print("cuts:", proxy.cuts)
    assert proxy.cuts.total() == CUTS
    assert min(proxy.cuts[kind] for kind in KINDS) > 20
    assert found == expected


def test_a_killed_service_goes_on_from_a_saved_state(hub: Path, tmp_path: Path) -> None:
    """The live client's own losses after the save are those of an uninterrupted run."""
    killed = Service(hub, tmp_path)
    printed = tmp_path / "losses"
    with printed.open("wb") as file:
        client = killed.start(str(CLIENTS / "resumable.py"), stdout=file)
    try:
        wait_for(lambda: len(printed.read_text().splitlines()) >= 6, 60)
    finally:
        killed.kill()
        client.kill()
        client.wait()
    path, *losses = printed.read_text().splitlines()
    with service(hub, tmp_path) as again:
        ended = again.program(str(CLIENTS / "resumable.py"), path, "4")
        assert ended.stdout.splitlines() == losses[:4], ended.stderr
