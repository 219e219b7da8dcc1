"""The prebuilt tools, by their names in a recipe's `tools:` and `module:`."""

from agentfactory.tools.user_code.entry_points import WORLDS, registered

_OURS = {
    "calculator": "agentfactory.tools.prebuilt.calculator:calculator",
    "code_interpreter": "agentfactory.tools.prebuilt.code_interpreter:CodeInterpreter",
    "shell": "agentfactory.tools.prebuilt.shell:Shell",
}


def prebuilt() -> dict[str, str]:
    """Return name -> `package.module:NAME`, loaded on first use: tools that belong to no world, and the worlds that
    installed packages register. Raises SettingError if two packages register one name."""
    return dict(sorted({**registered(WORLDS), **_OURS}.items()))
