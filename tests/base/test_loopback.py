"""Tests of the identity of a loopback connection's peer."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.http.loopback import (
    has_foreign_peer,
    is_loopback,
    listeners_users,
    loopback_interface,
    own_sockets,
)

AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
mine = socket.socket()
mine.connect(("127.0.0.1", int(sys.argv[1])))
mine.send(b"x")
if sys.argv[2] == "stays":
    sys.stdin.read()
"""
LISTENS_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
mine = socket.socket()
mine.bind(("127.0.0.1", 0))
mine.listen()
print(mine.getsockname()[1], flush=True)
sys.stdin.read()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "::ffff:127.0.0.1"))
    assert not any(map(is_loopback, ("::ffff:192.0.2.1", "0.0.0.0", "192.0.2.1", "example.com", "")))
    assert Path("/sys/class/net", str(loopback_interface())).exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_to_oneself_is_no_strangers(host: str) -> None:
    earlier = own_sockets()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert listeners_users(port) == {os.geteuid()}
        with socket.create_connection((host, port)), server.accept()[0]:
            assert len(own_sockets() - earlier) == 3
            assert not has_foreign_peer(earlier)
    assert listeners_users(port) == set()


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize("way", ["stays", "has sent and left"])
def test_another_users_connection_is_found(way: str) -> None:
    earlier = own_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        command = [sys.executable, "-c", AS_NOBODY, str(server.getsockname()[1]), way]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as stranger:
            with server.accept()[0] as accepted:
                assert accepted.recv(1) == b"x"
                if way != "stays":
                    stranger.wait()
                assert has_foreign_peer(earlier)
                assert not has_foreign_peer(own_sockets()), "what was there before is not this one's concern"
            stranger.communicate()


@needs_root
@pytest.mark.processes
def test_another_users_listener_is_found() -> None:
    command = [sys.executable, "-c", LISTENS_AS_NOBODY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as thief:
        assert listeners_users(int(thief.stdout.readline())) == {65534}
        thief.communicate()
