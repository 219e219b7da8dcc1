"""The text format in which most figures on ALFWorld are reported (GiGPO: Feng et al., 2025, arXiv:2505.10978)."""

from collections.abc import Sequence

from agentfactory.base.messages import Message, ToolCall, ToolResult, ToolSpec
from agentfactory.rollout.text.parsers.formats.tags import Tags
from agentfactory.rollout.text.parsers.parser import join_results


class ThinkAndAct(Tags):
    """The format `<think>...</think><action>go to desk 1</action>`, as in the recipe's system prompt, to which nothing
    is added. The next message is the room's unchanged description."""

    def instructions(self, specs: Sequence[ToolSpec]) -> None:
        """Return None: the prompt has the instructions."""
        return None

    def form(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the format."""
        return "Reason within <think> </think> tags, then write one action within <action> </action> tags."

    def answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """See Parser: the results alone."""
        return [join_results([("", result, "") for result in results])]
