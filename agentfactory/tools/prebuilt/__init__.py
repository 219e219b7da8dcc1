"""The prebuilt tools, by their names in a recipe's `tools:` and `module:`."""

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.entry_points import WORLDS, registered

_OURS = {
    "calculator": "agentfactory.tools.prebuilt.calculator:calculator",
    "code_interpreter": "agentfactory.tools.prebuilt.code_interpreter:CodeInterpreter",
    "shell": "agentfactory.tools.prebuilt.shell:Shell",
}


def prebuilt() -> dict[str, str]:
    """Return name -> `package.module:NAME` of tools without a world, and of registered worlds. Raises SettingError."""
    worlds = registered(WORLDS)
    for name in worlds.keys() & _OURS.keys():
        problem = f"{worlds[name]} is registered as {name!r} in {WORLDS}, and AgentFactory has a tool of this name"
        raise SettingError("", problem, "uninstall its package")
    return dict(sorted({**worlds, **_OURS}.items()))
