"""Extras: optional packages of AgentFactory, such as `pip install 'agentfactory[search]'`."""

import re
from functools import cache
from importlib.metadata import requires

from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code.import_path import is_installed

_REQUIREMENT = re.compile(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]")


@cache
def extras() -> dict[str, list[str]]:
    """Return the packages of each extra for users, as setup.py has them, by their names in `import`."""
    found: dict[str, list[str]] = {}
    for requirement in requires("agentfactory") or ():
        if (match := _REQUIREMENT.match(requirement)) and match[2] != "dev":
            found.setdefault(match[2], []).append(match[1].replace("-", "_"))
    return found


def check_extra(extra: str) -> None:
    """Raise SettingError, with the command that installs it, if a package of `extra` is missing."""
    missing = [package for package in extras().get(extra, ()) if not is_installed(package)]
    if missing:
        raise _not_installed(extra, missing)


def missing_extra(error: ImportError, place: str) -> SettingError | None:
    """Return the error for an import that failed in `package.module:NAME`; None if no extra has the package. Several
    may have it: the extra that `place` names comes first."""
    package = (error.name or "").partition(".")[0]
    having = [extra for extra, packages in extras().items() if package in packages]
    return _not_installed(max(having, key=lambda extra: extra in place), [package]) if having else None


def _not_installed(extra: str, packages: list[str]) -> SettingError:
    *others, last = packages
    missing = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return SettingError("", f"{missing} not installed", f"pip install 'agentfactory[{extra}]'")
