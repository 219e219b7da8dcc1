"""Missing packages: AgentFactory's extras, such as `pip install 'agentfactory-rl[search]'`, and unmet requirements."""

import re
from functools import cache
from importlib import metadata

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed

DISTRIBUTION = "agentfactory-rl"
"""AgentFactory's name for pip, as in setup.py; `agentfactory` is another project."""
OWN_ENVIRONMENT = (
    "give it a virtual environment of its own: start an agent as a program (rollout.agent.command), and tools as an "
    "MCP server (mcp_servers.NAME.command)"
)


@cache
def extras(distribution: str = DISTRIBUTION) -> dict[str, list[str]]:
    """Return the packages of each extra for users, as setup.py has them, by their names in `import`."""
    found: dict[str, list[str]] = {}
    for requirement in metadata.requires(distribution) or ():
        if (match := re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]", requirement)) and match[2] != "dev":
            found.setdefault(match[2], []).append(match[1].replace("-", "_"))
    return found


def check_extra(extra: str, distribution: str = DISTRIBUTION) -> None:
    """Raise SettingError, with the command that installs it, if a package of `extra` is missing."""
    missing = [package for package in extras(distribution).get(extra, ()) if not _is_there(package)]
    if missing:
        raise _not_installed(extra, missing, distribution)


def _is_there(package: str) -> bool:
    """Return whether a package can be imported, by its own name or by another that its metadata tells."""
    if is_installed(package):
        return True
    try:
        names = (metadata.distribution(package).read_text("top_level.txt") or "").split()
    except metadata.PackageNotFoundError:
        return False
    return package not in names and any(map(is_installed, names))


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
