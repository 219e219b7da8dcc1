"""Names registered by entry points, of this package and of other installed packages."""

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.extras import missing_extra

WORLDS = "agentfactory.worlds"
"""Group of environments and tools, by their names in a recipe's `tools:` and `module:`."""
SOURCES = "agentfactory.sources"
"""Group of sources of tasks (`agentfactory.TaskSource`), by their names below `data`."""
REWARDS = "agentfactory.rewards"
"""Group of rewards, by their names in a recipe's `rewards:`."""
COMMANDS = "agentfactory.commands"
"""Group of modules, each a command: `ABOUT`, `EXAMPLES`, `add_options(parser)` and `run(options, say)`."""
SERVICES = "agentfactory.services"
"""Group of modules for `serve --as NAME`: `prepared` and `serve`, as in agentfactory/tinker/serve.py."""


@cache
def registered(group: str) -> dict[str, str]:
    """Return a group's entry points: name -> `package.module:NAME`. Raises SettingError if two have one name."""
    found: dict[str, str] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        # a checkout on the import path repeats the entry points of its installed package
        if found.setdefault(point.name, point.value) != point.value:
            problem = f"two packages register {point.name!r} in {group}: {found[point.name]} and {point.value}"
            raise SettingError("", problem, "uninstall one of them")
    return found


def load_named(place: str) -> Any:
    """Return the object at `package.module:NAME`, or a module. Raises SettingError if it cannot be imported."""
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and (lacking := missing_extra(error, place)):
            raise lacking from error
        fix = "install what it needs, or the package that registers it again"
        raise SettingError("", f"{place} cannot be loaded: {error}", fix) from error
