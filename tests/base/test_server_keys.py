"""Tests of the key that a server stores for clients of its own user, and of its address."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.http import server_keys
from agentfactory.base.http.server_keys import find_key, key_file, key_folder, pinned, published_key
from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.trainers.sync.server_control import ServerControl


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return key_folder()


def test_a_key_is_there_while_its_server_runs(runtime: Path) -> None:
    with published_key("127.0.0.1", 4001) as key:
        assert len(key) >= 32
        assert find_key("http://127.0.0.1:4001/v1/models") == key
        assert authorization("http://127.0.0.1:4001", None) == {"Authorization": f"Bearer {key}"}
        assert find_key("http://127.0.0.1:4002") is None
        assert find_key("http://127.0.0.2:4001") is None
        file = key_file("127.0.0.1", 4001)
        assert (runtime.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert find_key("http://127.0.0.1:4001") is None
    assert not list(runtime.iterdir())


def test_a_server_that_took_the_address_keeps_its_key(runtime: Path) -> None:
    with published_key("::1", 4003) as first, published_key("::1", 4003) as second:
        assert first != second == find_key("http://[::1]:4003")
    first_ends = published_key("::1", 4003)
    first_ends.__enter__()
    with published_key("::1", 4003) as second:
        first_ends.__exit__(None, None, None)
        assert find_key("http://[::1]:4003") == second


def test_a_name_is_pinned_to_the_address_of_the_server(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that keys go only to the server's address: at another address of the name, another user may listen."""
    monkeypatch.setattr(server_keys, "_addresses", lambda url: (("::1", 4011), ("127.0.0.1", 4011)))
    assert pinned("http://localhost:4011/v1") == "http://localhost:4011/v1"
    with published_key("127.0.0.1", 4011):
        assert find_key("http://localhost:4011") is None
        assert pinned("http://localhost:4011/v1") == "http://127.0.0.1:4011/v1"
        assert InferenceClient("http://localhost:4011").urls == ["http://127.0.0.1:4011"]
        assert ServerControl("http://localhost:4011").url == "http://127.0.0.1:4011"
        assert pinned("http://127.0.0.2:4011") == "http://127.0.0.2:4011"


@pytest.mark.processes
def test_a_killed_server_leaves_nothing_for_long(runtime: Path) -> None:
    code = "import os\nfrom agentfactory.base.http.server_keys import published_key\n"
    code += "held = published_key('127.0.0.1', 4004)\nheld.__enter__()\nos._exit(1)"
    subprocess.run([sys.executable, "-c", code])
    alive = runtime / "127.0.0.1:4005"
    alive.write_text("a key")
    with alive.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert find_key("http://127.0.0.1:4004") is not None
        with published_key("127.0.0.1", 4006):
            assert {file.name for file in runtime.iterdir()} == {"127.0.0.1:4005", "127.0.0.1:4006"}


@pytest.mark.parametrize("how", ["open to others", "a link", "another user's"])
def test_a_folder_that_others_could_write_is_refused(runtime: Path, how: str) -> None:
    if how == "a link":
        runtime.parent.joinpath("theirs").mkdir(mode=0o700)
        runtime.symlink_to(runtime.parent / "theirs")
    else:
        runtime.mkdir(mode=0o700)
    (runtime / "127.0.0.1:4007").write_text("theirs")
    if how == "open to others":
        runtime.chmod(0o770)
    elif how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(runtime, 65534, 65534)
    with pytest.raises(SettingError, match=f"{runtime}.*another user; fix: remove it"):
        find_key("http://127.0.0.1:4007")
    with pytest.raises(SettingError, match="another user"), published_key("127.0.0.1", 4007):
        pass
