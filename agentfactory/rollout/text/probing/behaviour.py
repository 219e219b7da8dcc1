"""The findings of the probes."""

from dataclasses import dataclass, field

from agentfactory.base.messages import Message
from agentfactory.rollout.text.templates import Closings


@dataclass
class Behaviour:
    """A template's behaviour, as found by the probes.

    `rewrites` describes how the template rewrites history (None: it appends); `notes` are harmless findings.
    """

    closings: Closings
    generation_prompt: str
    reasoning: bool
    """True if it renders reasoning from a separate message field; otherwise reasoning stays in the content."""
    tags: tuple[str, str]
    """The tags that open and close reasoning in a turn."""
    system: bool
    """True if it renders system messages."""
    frame: str
    """A rendered question, answer and question, with the tokens that frame turns."""
    whole_frame: str = ""
    """Text with all tokens that frame turns, including system and tool messages."""
    turns: str = ""
    """Rendered assistant turns, with the tokens that the assistant may write."""
    shows_tools: bool = True
    """True if it describes the tools; otherwise the system message must."""
    complains_as_tool: bool = True
    """True if it renders a tool message without a call; otherwise a user message reports a malformed call."""
    questions_after_results: bool = True
    """True if it renders a user message directly after a tool result."""
    parallel_calls: bool = True
    """True if it renders several calls in one turn."""
    words_with_calls: bool = True
    """True if it renders text next to tool calls."""
    images: bool = False
    """True if it renders images in user messages."""
    images_of_tools: bool = True
    """True if it renders images in tool messages, or never gets any."""
    misprint: str | None = None
    """The beginning of a call as the instructions show it, if the template's own calls begin differently."""
    rewrites: str | None = None
    notes: list[str] = field(default_factory=list)
    conversations: list[list[Message]] = field(default_factory=list)
    """The probe conversations that the template rendered."""

    @property
    def end(self) -> str:
        """The token that ends a text turn; empty if the template closes turns with plain text."""
        return self.closings.words.end

    @property
    def opens_reasoning(self) -> bool:
        """True if the generation prompt opens the reasoning, so the sampled text contains only its end."""
        return self.generation_prompt.rstrip().endswith(self.tags[0].rstrip())
