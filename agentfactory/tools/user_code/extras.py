"""Extras: optional packages of AgentFactory, such as `pip install 'agentfactory[search]'`."""

from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code.import_path import is_installed

EXTRAS = {
    "viewer": ("plotly", "matplotlib"),
    "rewards": ("math_verify", "rapidfuzz"),
    "search": ("tantivy",),
    "browse": ("html_to_markdown", "pypdf", "protego"),
    "webshop": ("ijson", "rapidfuzz", "tantivy"),
    "dense": ("sentence_transformers", "usearch"),
    "screens": ("playwright",),
    "scienceworld": ("scienceworld", "py4j"),
}
"""Extra -> the packages that it installs, by the names that `import` takes. setup.py has their versions."""


def check_extra(extra: str) -> None:
    """Raise SettingError, with the command that installs it, if a package of `extra` is missing."""
    missing = [package for package in EXTRAS[extra] if not is_installed(package)]
    if missing:
        raise _not_installed(extra, missing)


def missing_extra(error: ImportError, place: str) -> SettingError | None:
    """Return the error for an import that failed in `package.module:NAME`; None if no extra has the package. Several
    may have it: the extra that `place` names comes first."""
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in EXTRAS.items() if package in packages]
    return _not_installed(max(extras, key=lambda extra: extra in place), [package]) if extras else None


def _not_installed(extra: str, packages: list[str]) -> SettingError:
    *others, last = packages
    missing = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return SettingError("", f"{missing} not installed", f"pip install 'agentfactory[{extra}]'")
