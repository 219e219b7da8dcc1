"""Extras: what setup.py installs for each is what the errors name."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code import extras
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.commands import main

WEBSHOP = "agentfactory.worlds.webshop.webshop:WebShop"


def test_the_packages_of_an_extra_are_known_by_their_names_in_python() -> None:
    having = packages_distributions()
    for extra in ("viewer", "rewards", "search", "browse", "webshop", "dense", "screens", "scienceworld"):
        assert extras.extras()[extra]
        assert {*extras.extras()[extra]} <= {*having}, extra


def test_an_import_that_fails_names_the_extra_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("agentfactory.worlds.webshop")]:
        monkeypatch.delitem(sys.modules, module)
    # None in sys.modules is an import that fails as that of a package that is not installed does
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    with pytest.raises(SettingError, match=r"rapidfuzz is not .*; fix: pip install 'agentfactory-rl\[webshop\]'"):
        load_named(WEBSHOP)


def test_a_package_that_has_another_version_than_ours_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip installs a framework that needs mcp<2 over AgentFactory's mcp, with no more than a warning."""
    (tmp_path / "mcp-1.26.0.dist-info").mkdir()
    (tmp_path / "mcp-1.26.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mcp\nVersion: 1.26.0\n")
    assert extras.unmet(extras.DISTRIBUTION) is None
    monkeypatch.syspath_prepend(tmp_path)

    def fail(options: object) -> int:
        raise ImportError("cannot import name 'MCPError' from 'mcp'")

    monkeypatch.setitem(main._COMMANDS, "doctor", fail)
    assert main.main(["doctor"]) == main.FAILED
    message = capsys.readouterr().err
    assert "'mcp'; agentfactory" in message
    assert ", and mcp 1.26.0 is installed; fix: reinstall AgentFactory, and install the package that needs" in message
