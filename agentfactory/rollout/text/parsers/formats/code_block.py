"""Code as actions (Wang et al., 2024, arXiv:2402.01030): the recipe's code tool runs a turn's Python blocks."""

from collections.abc import Sequence

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Message, ToolCall, ToolResult, ToolSpec, required_of
from agentfactory.rollout.text.parsers.blocks import fenced_blocks
from agentfactory.rollout.text.parsers.parser import Call, FormatError, Parser, Reading, join_results, parameters

CODE = "code"


class CodeBlock(Parser):
    """A Python block between a line of three backquotes with `python` and a line of three backquotes.

    Several blocks in one turn run as one program, in order. A turn without a block is the final answer.
    """

    stops = ("```\nOutput:\n", "```\n\nOutput:\n")

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        """Blocks in other languages are ordinary text."""
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
        words = "\n".join(part.strip() for part in outside if part.strip())
        return Reading(words, [(_code_tool(specs), {CODE: "\n\n".join(blocks)})] if blocks else [])

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        """Raises ValueError unless there is one call, of the code tool."""
        name = _code_tool(specs)
        if len(calls) != 1 or calls[0][0] != name or list(calls[0][1]) != [CODE]:
            raise ValueError(f"code_block has one call of {name}({CODE}) a turn, not {list(calls)}")
        return f"```python\n{calls[0][1][CODE]}\n```"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        return "To run code, write\n```python\nprint(6 * 7)\n```"

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        """Raises ValueError if no tool runs code."""
        if not specs:
            return None
        name = _code_tool(specs)
        about = next(spec.description for spec in specs if spec.name == name)
        return (
            f"You can run Python. {about}\n\n{self.form(specs)}\nThen wait: you are told its output. A turn without "
            "such a block is your last word."
        )

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """`Output:` and the code's output."""
        return [join_results([("Output:\n", result, "") for result in results])]


def _code_tool(specs: Sequence[ToolSpec]) -> str:
    """Return the tool that runs code: the only one with a parameter `code` and no other required parameter."""
    fit = [s.name for s in specs if CODE in parameters(s) and set(required_of(s.parameters)) <= {CODE}]
    if specs and len(fit) != 1:
        among = f"{', '.join(fit) if fit else 'none'} among {', '.join(spec.name for spec in specs)}"
        raise SettingError(
            "rollout.parser",
            f"code_block needs one tool with a parameter `{CODE}`, and the recipe has {among}",
            "use tools: [code_interpreter], or another format",
        )
    return fit[0] if fit else "python"
