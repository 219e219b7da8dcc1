"""Paths in options, with environment variables expanded."""

import os
import re
from pathlib import Path

from agentfactory.base.errors import SettingError

_VARIABLE = re.compile(r"\$\{?(\w+)")


def expanded_path(option: str, text: str) -> Path:
    """Return an absolute path with ~ and variables expanded; links are not resolved. Raises SettingError if a variable
    is not set."""
    for name in _VARIABLE.findall(text):
        if not os.environ.get(name):
            raise SettingError(
                option, f"{text}: the variable {name} is not set", f"set {name}, or give the path itself"
            )
    return Path(os.path.expandvars(text)).expanduser().absolute()
