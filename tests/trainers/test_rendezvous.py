"""Connections of ranks: private on one machine, and a warning where that is impossible."""

import os
from pathlib import Path

import pytest

from agentfactory.trainers.processes.accelerator import LaunchError, init_method


@pytest.fixture(autouse=True)
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """The environment of rank 0 of two on one machine, under torchrun."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        # set first, so that the variable is removed again after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**given, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return monkeypatch


def file_of(method: str | None) -> Path:
    return Path(method.removeprefix("agentfactory://"))


def test_ranks_of_a_launcher_share_a_private_file(launch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(init_method([]))
    assert file.parent.stat().st_mode & 0o777 == 0o700
    launch.setenv("RANK", "1")
    assert file_of(init_method([])) == file
    assert not caplog.records
    # files of this launcher, and of one that has ended
    stale = file.with_name("999999999-1-0")
    for made in (file, stale):
        made.touch()
    init_method([])
    assert (file.exists(), stale.exists()) == (True, False)


def test_a_folder_that_others_can_enter_is_refused() -> None:
    folder = file_of(init_method([])).parent
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match=f"{folder}: another user could read or change"):
        init_method([])
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(LaunchError):
        init_method([])


@pytest.mark.parametrize(
    ("urls", "nccl"),
    [([], "=lo"), (["http://127.0.0.1:8000", "http://localhost:1"], "=lo"), (["http://gpu-2:8000"], None)],
)
def test_nccl_is_on_loopback_unless_it_must_reach_servers_elsewhere(urls: list[str], nccl: str | None) -> None:
    init_method(urls)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME")) == ("lo", nccl)


def test_several_machines_are_warned_once_why(launch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    launch.setenv("WORLD_SIZE", "4")
    for rank in range(4):
        launch.setenv("RANK", str(rank))
        assert init_method([]) is None
    (record,) = caplog.records
    assert "10.0.0.1:29500" in record.message
    assert "anyone who reaches these ports can run code as you" in record.message
    assert "docs/multi-node.md" in record.message
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_launcher_that_listens_is_told_the_fix(launch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    launch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert file_of(init_method([])).name
    (record,) = caplog.records
    assert "listens on all interfaces, port 29500" in record.message
    assert "--rdzv_conf store_type=file" in record.message
