"""Tests of the addresses of our HTTP servers."""

import re
import socket

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.http.key_guard import listen


def test_a_free_port_is_taken() -> None:
    with listen("127.0.0.1", 0, "--http") as listener, socket.create_connection(listener.getsockname()):
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_port_that_cannot_be_used_is_named_with_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = "{}:{}".format(*other.getsockname())
        with pytest.raises(
            SettingError, match=rf"--http: {re.escape(address)} cannot be used: .*; fix: choose another"
        ):
            listen("127.0.0.1", other.getsockname()[1], "--http")
    with pytest.raises(SettingError, match=r"--port: 127\.0\.0\.1:99999 cannot be used"):
        listen("127.0.0.1", 99999, "--port")
