"""The main probe of a chat template, which renders the probe conversations."""

from datetime import timedelta

from agentfactory.base.messages import Message
from agentfactory.rollout.images.parts import for_template, text_part
from agentfactory.rollout.text.parsers import Parser
from agentfactory.rollout.text.parsers.parser import reasoning_tags
from agentfactory.rollout.text.probing import conversations, tool_probe
from agentfactory.rollout.text.probing.conversations import ANSWER, QUESTION, asked
from agentfactory.rollout.text.probing.tool_probe import shows, turn_start
from agentfactory.rollout.text.templates import Behaviour, ChatTemplate, Closings, RenderError, Tools, shared_length

_RENDERS = 5


def probe(template: ChatTemplate, tools: bool, parser: Parser, image: str | None = None) -> Behaviour:
    """Return a template's behaviour, derived from its renders of the probe conversations. `tools`: the chains call
    tools, in the format of `parser`; the template must support them only if the format is native. `image` is the image
    token; None if the model does not accept images. Raises RenderError if it cannot be used."""
    tools = tools and parser.native
    specs: Tools = [spec.to_openai() for spec in conversations.PROBE_TOOLS] if tools else None
    closed = _steady(template, specs)
    if tools and not tool_probe.shows_tools(closed) and tool_probe.fit_tools(template, specs):
        closed = template.render([QUESTION, ANSWER], specs)
    before, opened = template.render([QUESTION], specs), template.render([QUESTION], specs, prompt=True)
    for word in ("wordask", "wordanswer"):
        if word not in closed:
            raise RenderError(f"the chat template drops text from a message ({word!r} is not in {closed!r})")
    header = closed[len(before) :].split("wordanswer")[0] if closed.startswith(before) else ""
    if opened == before and header.strip():
        raise RenderError("the chat template has no generation prompt: it ignores add_generation_prompt")
    reasoned = tool_probe.find_reasoning(template, specs)
    words = tool_probe.closing_of_words(template, closed, specs)
    behaviour = Behaviour(
        Closings(words, words),
        generation_prompt=opened[len(before) :] if opened.startswith(before) else "",
        reasoning=reasoned is not None,
        tags=reasoning_tags(template.source if reasoned is None else reasoned),
        system=shows(template, [{"role": "system", "content": "wordsystem"}, QUESTION], specs, "wordsystem"),
        frame=_frame(template, specs),
        turns=closed[turn_start(opened, closed) :] + (reasoned or closed)[turn_start(opened, closed) :],
    )
    behaviour.whole_frame = behaviour.frame
    if _writes_clock(template, specs):
        behaviour.notes.append("writes the date or the time: all prompts of this process have its start time")
    if template.tools_in_system:
        behaviour.notes.append("reads the tools from the system message's field `tools`")
    if not behaviour.system:
        behaviour.notes.append("has no system messages: a conversation with one is refused")
    if tools:
        tool_probe.check_tools(template, opened, behaviour, parser, specs)
    caller = parser if tools else None
    if image is not None:
        _probe_images(template, specs, behaviour, image, caller)
    behaviour.conversations = conversations.short_conversations(behaviour, caller)
    if shows(template, [QUESTION, asked("wordagain")], specs, "wordagain"):
        behaviour.conversations.append([QUESTION, ANSWER, QUESTION, asked("wordagain"), ANSWER])
    else:
        behaviour.notes.append("refuses two user messages in a row")
    behaviour.conversations += conversations.long_conversations(caller)
    found = (_rewrites(template, behaviour.closings, for_template(c), specs) for c in behaviour.conversations)
    behaviour.rewrites = next(filter(None, found), None)
    return behaviour


def _steady(template: ChatTemplate, specs: Tools) -> str:
    """Return the text of a question and an answer. Raises RenderError if it is not deterministic."""
    text = template.render([QUESTION, ANSWER], specs)
    for _ in range(_RENDERS):
        if (other := template.render([QUESTION, ANSWER], specs)) != text:
            at = max(0, shared_length(text, other) - 20)
            raise RenderError(
                "the chat template renders the same conversation differently each time: "
                f"{text[at : at + 60]!r}, then {other[at : at + 60]!r}"
            )
    return text


def _frame(template: ChatTemplate, specs: Tools) -> str:
    """Return text with everything that the template writes around turns, without its description of the tools."""
    try:
        return template.render([QUESTION, ANSWER, QUESTION], prompt=True)
    except RenderError:
        if specs is None:
            raise
        # Hermes 2's template requires tools, and describes them before the first turn
        return template.render([QUESTION, ANSWER, QUESTION], specs, prompt=True).partition("wordask")[2]


def _writes_clock(template: ChatTemplate, specs: Tools) -> bool:
    text, clock = template.render([QUESTION], specs), template.clock
    template.clock = clock + timedelta(days=399, hours=5, minutes=7, seconds=11)
    try:
        return template.render([QUESTION], specs) != text
    finally:
        template.clock = clock


def _probe_images(
    template: ChatTemplate, specs: Tools, behaviour: Behaviour, image: str, parser: Parser | None
) -> None:
    """Probe whether the template renders images in user and tool messages, each as one token."""
    parts = [text_part("wordbefore"), {"type": "image"}, text_part("wordafter")]

    def shows_image(*messages: Message) -> bool:
        try:
            text = template.render(list(messages), specs)
        except RenderError:
            return False
        before, _, after = text.partition(image)
        return text.count(image) == 1 and "wordbefore" in before and "wordafter" in after

    behaviour.images = shows_image(asked(parts))
    if not behaviour.images:
        behaviour.notes.append("has no images: the model gets them as text")
    elif parser is not None:
        call = conversations.make_call(parser, "probelook", zeta="z", alpha=3)
        told = conversations.result_of(call, parts)
        behaviour.images_of_tools = shows_image(QUESTION, conversations.answered("", [call]), told)
        if not behaviour.images_of_tools:
            behaviour.notes.append("has no images in tool messages: they follow in a user message")


def _rewrites(template: ChatTemplate, closings: Closings, conversation: list[Message], specs: Tools) -> str | None:
    """Return how the template breaks an append-only chain on this conversation; None if it does not."""
    turns = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    prompts = {i: template.render(conversation[:i], specs, prompt=True) for i in turns}
    whole = template.render(conversation, specs)
    for i, following in zip(turns, [*turns[1:], None], strict=True):
        ended = template.render(conversation[: i + 1], specs)
        ended = ended.removesuffix(closings.of(conversation[i].get("tool_calls")).after)
        if not ended.startswith(prompts[i]):
            return f"rewrites history: an assistant turn does not begin with the generation prompt {prompts[i][-40:]!r}"
        turn = conversation[i]
        said = dict.fromkeys([*turn["content"].split(), turn.get("reasoning_content") or ""])
        if lost := [word for word in said if word.startswith("word") and word not in ended[len(prompts[i]) :]]:
            return f"rewrites history: drops {lost[0]!r} (reasoning) from an assistant turn"
        for later in (*(prompts[j] for j in turns if j > i), whole):
            if not later.startswith(ended):
                at = shared_length(ended, later)
                change = f"{ended[at : at + 40]!r} of an assistant turn becomes {later[at : at + 40]!r}"
                return f"rewrites history: {change} once messages follow"
        if following is not None:
            new = conversation[i + 1 : following]
            if template.continuation(new, specs, closings) != prompts[following][len(ended) :]:
                return "rewrites history: the text after a turn depends on the turns before it"
    return None
