"""Extras: what setup.py installs for each is what the errors name."""

import sys
from importlib.metadata import packages_distributions

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code import extras
from agentfactory.base.user_code.entry_points import load_named

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


def test_a_package_may_have_another_name_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyYAML's metadata name yaml
    monkeypatch.setattr(extras, "extras", lambda distribution: {"x": ["pyyaml"], "y": ["no_such_package"]})
    extras.check_extra("x")
    with pytest.raises(SettingError, match="no_such_package is not installed"):
        extras.check_extra("y")
