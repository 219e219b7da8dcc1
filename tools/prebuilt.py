"""The tools that come with AgentFactory, by the names under which a recipe's `tools:` and `module:` know them."""

PREBUILT = {
    "calculator": "tools.calculator:calculator",
    "code_interpreter": "tools.code_interpreter:CodeInterpreter",
}
"""Name -> `package.module:NAME`; loaded when it is asked for."""
