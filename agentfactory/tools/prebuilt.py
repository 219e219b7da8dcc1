"""The tools that come with AgentFactory, by the names under which a recipe's `tools:` and `module:` know them."""

PREBUILT = {
    "calculator": "agentfactory.tools.calculator:calculator",
    "code_interpreter": "agentfactory.tools.code_interpreter:CodeInterpreter",
}
"""Name -> `package.module:NAME`; loaded when it is asked for."""
