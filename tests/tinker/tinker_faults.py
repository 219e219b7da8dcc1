"""Cut connections and killed processes: no request is lost or repeated, and a saved state is resumed bit for bit."""

from pathlib import Path

from tests.tinker.cutting_proxy import KINDS, cutting_proxy
from tests.tinker.service import CLIENTS, Service, service
from tests.waiting import wait_for

CUTS, ENGINE = 200, "agentfactory.rollout.inference.embedded"


def test_cut_connections_change_nothing(running: Service) -> None:
    expected = running.cases("many.py")("everything")
    assert expected["models"] == [6, 6]
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


def test_a_killed_inference_server_ends_the_service(hub: Path, tmp_path: Path) -> None:
    """The service says which process ended, and where its log is; a new one takes the same folder."""
    running = Service(hub, tmp_path)
    try:
        next(each for each in running.family() if ENGINE in each.cmdline()).kill()
        status = running.process.wait(60)
    finally:
        if running.process.poll() is None:
            running.kill()
    last = running.log.read_text().splitlines()[-1]
    print(status, last)
    assert status == 1
    assert "server" in last
    assert str(tmp_path) in last
    with service(hub, tmp_path) as again:
        assert again.url
