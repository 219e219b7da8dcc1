"""Tests of the key that a server stores for clients of its own user."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.http import server_keys
from agentfactory.base.http.server_keys import find_key, key_file, key_folder, pinned, published_key
from agentfactory.rollout.inference.http_transport import authorization, lacking_key
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.trainers.sync.server_control import ServerControl
from tests.rollout.test_server_contract import make_model


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
        assert (runtime.stat().st_mode & 0o777, key_file("127.0.0.1", 4001).stat().st_mode & 0o777) == (0o700, 0o600)
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


def test_what_a_client_without_the_key_is_told(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{runtime} has none for its address; fix: set server.api_key_env to" in lacking_key("http://a", None)
    assert "it refuses the key in OTHERS; fix: server.api_key_env must name" in lacking_key("http://a", "OTHERS")


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


READ = ("/v1/models", "/metrics", "/weight_info", "/openapi.json")
CHANGED = (
    *("/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/resume", "/sleep", "/wake_up", "/inference/v1/generate", "/v1/load_lora_adapter", "/reset_prefix_cache"),
    "/nowhere",
)


@pytest.mark.extended
@pytest.mark.processes
def test_another_user_of_the_machine_finds_every_door_locked(tmp_path: Path) -> None:
    # as `nobody` if we are root; else any process without the key is a stranger
    stranger = "nobody" if os.geteuid() == 0 else None

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, user=stranger, cwd="/")

    def ask(path: str) -> str:
        given = [] if path in (*READ, "/health") else ["--data", "{}"]
        return run("curl", "--silent", "--noproxy", "*", "--write-out", "%{http_code}", *given, url + path).stdout

    # a subprocess rather than a fork, because the test inspects its arguments
    command = [
        sys.executable,
        "-m",
        "agentfactory.rollout.inference.embedded",
        str(make_model(tmp_path / "model", tied=True)),
    ]
    command += ["--port", "0", "--max-model-len", "64", "--max-num-seqs", "2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().removeprefix("ready ").split()[0]
    try:
        assert ask("/health") == "{}200"
        assert {path: ask(path) for path in (*READ, *CHANGED)} == dict.fromkeys(
            (*READ, *CHANGED), '{"error": "Unauthorized"}401'
        )
        file = key_file("127.0.0.1", int(url.rpartition(":")[2]))
        key = file.read_text()
        assert find_key(url) == key
        if stranger is not None:
            assert "Permission denied" in run("cat", str(file)).stderr
        assert key not in run("ps", "-eww", "-o", "args").stdout
    finally:
        server.terminate()
        assert server.wait(10) == 0
    assert not file.exists()
