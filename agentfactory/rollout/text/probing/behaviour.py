"""The findings of the probes."""

from dataclasses import dataclass, field

from agentfactory.rollout.text.templates import Closings
from agentfactory.tools.messages import Message


@dataclass
class Behaviour:
    """The findings of the probes.

    `rewrites` says how the template rewrites history (None: it appends); `notes` are harmless findings.
    """

    closings: Closings
    generation_prompt: str
    reasoning: bool
    """Whether it renders the reasoning that a message has in a field of its own; otherwise reasoning stays in the
    content."""
    tags: tuple[str, str]
    """What opens and closes reasoning in a turn."""
    system: bool
    """Whether it renders system messages."""
    frame: str
    """A rendered question, answer and question, which contain the tokens that frame turns."""
    whole_frame: str = ""
    """All tokens that frame turns: also those of system and tool messages."""
    turns: str = ""
    """Rendered turns of the assistant: the tokens in them are its own to write."""
    shows_tools: bool = True
    """Whether it describes the tools; otherwise the system message has to."""
    complains_as_tool: bool = True
    """Whether it renders a tool message that answers no call; otherwise a user message tells of a malformed call."""
    questions_after_results: bool = True
    """Whether it renders a user message right after a result."""
    parallel_calls: bool = True
    """Whether it renders several calls in one turn."""
    words_with_calls: bool = True
    """Whether it renders an assistant's text next to its calls."""
    images: bool = False
    """Whether it renders images in user messages."""
    images_of_tools: bool = True
    """Whether it renders images in tool messages; also if it is never given any."""
    rewrites: str | None = None
    notes: list[str] = field(default_factory=list)
    conversations: list[list[Message]] = field(default_factory=list)
    """The probe conversations that the template rendered."""

    @property
    def end(self) -> str:
        """The token that ends a turn of words; empty if the template closes turns with plain text."""
        return self.closings.words.end

    @property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt opens the reasoning, so that the sampled text contains only its end."""
        return self.generation_prompt.rstrip().endswith(self.tags[0].rstrip())
