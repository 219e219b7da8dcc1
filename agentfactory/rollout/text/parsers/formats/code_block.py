"""Code as actions (Wang et al., 2024, arXiv:2402.01030): the recipe's code tool runs a turn's Python blocks."""

from collections.abc import Sequence

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec, properties_of, required_of
from agentfactory.rollout.text.parsers.blocks import fenced_blocks, join_parts
from agentfactory.rollout.text.parsers.parser import Call, FormatError, Parser, Reading

CODE = "code"


class CodeBlock(Parser):
    """A Python block between a line of three backquotes with `python` and a line of three backquotes. Several blocks of
    a turn run as one program, in order; blocks in other languages are ordinary text. Without one, it is an answer."""

    around_result = "Output:\n", ""
    stops = ("```\nOutput:\n", "```\n\nOutput:\n")

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        outside: list[str] = []
        blocks: list[str] = []
        position = 0
        for block in fenced_blocks(text):
            if block.language not in ("python", "py"):
                continue
            if block.stop == block.end:
                raise FormatError("The turn has a Python block without its closing line ```")
            outside.append(text[position : block.begin])
            blocks.append(text[block.code + 1 : max(block.code + 1, block.stop - 1)])
            position = block.end
        outside.append(text[position:])
        return Reading(join_parts(outside), [(_code_tool(specs), {CODE: "\n\n".join(blocks)})] if blocks else [])

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        name = _code_tool(specs)
        if len(calls) != 1 or calls[0][0] != name or list(calls[0][1]) != [CODE]:
            raise ValueError(f"code_block has one call of {name}({CODE}) a turn, not {list(calls)}")
        return f"```python\n{calls[0][1][CODE]}\n```"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return "To run code, write\n```python\nprint(6 * 7)\n```"

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        if not specs:
            return None
        name = _code_tool(specs)
        about = next(spec.description for spec in specs if spec.name == name)
        return (
            f"You can run Python. {about}\n\n{self.form(specs)}\nThen wait: you are told its output. A turn without "
            "such a block is your last word."
        )


def _code_tool(specs: Sequence[ToolSpec]) -> str:
    """Return the tool that runs code: the only one with a parameter `code` and no other required parameter."""
    fit = [s.name for s in specs if CODE in properties_of(s.parameters) and set(required_of(s.parameters)) <= {CODE}]
    if specs and len(fit) != 1:
        among = f"{', '.join(fit) or 'none'} among {', '.join(spec.name for spec in specs)}"
        problem = f"code_block needs one tool with a parameter `{CODE}`, and the recipe has {among}"
        raise SettingError("rollout.parser", problem, "use tools: [code_interpreter], or another format")
    return fit[0] if fit else "python"
