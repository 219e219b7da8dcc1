"""The text format in which most figures on ALFWorld are reported (GiGPO: Feng et al., 2025, arXiv:2505.10978)."""

from collections.abc import Sequence

from agentfactory.rollout.text.parsers.formats.tags import Tags
from agentfactory.rollout.text.parsers.parser import tell
from agentfactory.tools.messages import Message, ToolCall, ToolResult, ToolSpec


class ThinkAndAct(Tags):
    """`<think>...</think><action>go to desk 1</action>`: the recipe's system prompt says so, and nothing is added to
    it. What a room shows stands in the next message as it is."""

    def instructions(self, specs: Sequence[ToolSpec]) -> None:
        """Return None: the prompt says it."""
        return None

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """Say how to act."""
        return "Reason within <think> </think> tags, then write one action within <action> </action> tags."

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """See Parser: the results alone."""
        return [tell([("", result, "") for result in results])]
