"""Extras: what setup.py installs for each is what the errors name."""

import sys
from importlib.metadata import packages_distributions

import pytest

from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code import extras
from agentfactory.tools.user_code.entry_points import load_named
from agentfactory.tools.user_code.extras import check_extra

WEBSHOP = "agentfactory.worlds.webshop.webshop:WebShop"


OPTIONAL = ("viewer", "rewards", "search", "browse", "webshop", "dense", "screens", "scienceworld")


@pytest.mark.parametrize("extra", OPTIONAL)
def test_the_packages_of_an_extra_are_known_by_their_names_in_python(extra: str) -> None:
    assert extras.extras()[extra]
    for package in extras.extras()[extra]:
        assert package in packages_distributions(), package


def test_an_import_that_fails_names_the_extra_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("agentfactory.worlds.webshop")]:
        monkeypatch.delitem(sys.modules, module)
    # None in sys.modules is an import that fails as that of a package that is not installed does
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    with pytest.raises(SettingError, match=r"rapidfuzz is not installed; fix: pip install 'agentfactory\[webshop\]'"):
        load_named(WEBSHOP)


def test_all_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "pypdf")
    with pytest.raises(SettingError, match=r"^pypdf is not installed; fix: pip install 'agentfactory\[browse\]'$"):
        check_extra("browse")
    check_extra("search")
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    with pytest.raises(SettingError, match=r"^html_to_markdown, pypdf and protego are not installed; fix:"):
        check_extra("browse")
