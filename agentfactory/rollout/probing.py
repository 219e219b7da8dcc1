"""Judges a chat template at start-up by its renders of a set of conversations; no model or family is known by name.

A chain appends what the template puts after a sampled turn, and never renders that turn again. This matches the
template's own format only if the template leaves earlier turns unchanged. The probes check that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentfactory.rollout.images.parts import for_template, image_part, show_in_user_turns
from agentfactory.rollout.parsers import PARSERS, Call, Parser, load_parser
from agentfactory.rollout.templates import ChatTemplate, RenderError, Tools, shared_length, split_reasoning
from agentfactory.tools.messages import Message, ToolCall, ToolSpec

_TEMPLATES = Path(__file__).parent / "chat_templates"
"""Templates of ours."""


class Use(StrEnum):
    """How a chain uses its template."""

    APPEND = "append"
    TRAINING_VARIANT = "training variant"
    FORK = "fork"


@dataclass
class Behaviour:
    """The findings of the probes.

    `rewrites` says how the template rewrites history (None: it appends); `notes` are harmless findings.
    """

    before_end: str
    """Text that the template puts between an assistant's text and its end-of-turn token."""
    end: str
    """The end-of-turn token; empty if the template closes turns with plain text, which is then in `after_end`."""
    after_end: str
    generation_prompt: str
    reasoning: bool
    """Whether it renders `reasoning_content`; otherwise reasoning stays in the content."""
    system: bool
    """Whether it renders system messages."""
    frame: str
    """A rendered question, answer and question, which contain the tokens that frame turns."""
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
    def closing(self) -> str:
        """Everything that the template puts after an assistant's text at the end of a conversation."""
        return self.before_end + self.end + self.after_end

    @property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt opens the reasoning, so that the sampled text contains only its end."""
        return self.generation_prompt.rstrip().endswith("<think>")


PROBE_TOOLS = [
    ToolSpec(
        name,
        f"{name} does a thing",
        {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}},
    )
    for name in ("probelook", "probemove")
]


def probe(template: ChatTemplate, tools: bool, parser: Parser, image: str | None = None) -> Behaviour:
    """Judge a template by its renders of the probe conversations.

    `tools`: the chains call tools, in the format of `parser`; the template must support them only if the format is
    native. `image` is the token that stands for an image; None: the model sees none. Raises RenderError with the reason
    if the template cannot be used.
    """
    tools = tools and parser.native
    specs: Tools = [spec.to_openai() for spec in PROBE_TOOLS] if tools else None
    question: list[Message] = [{"role": "user", "content": "wordask"}]
    answer: Message = {"role": "assistant", "content": "wordanswer"}

    def rendered(messages: list[Message], prompt: bool = False) -> str:
        return template.render(messages, specs, prompt)

    closed = rendered([*question, answer])
    before, opened = rendered(question), rendered(question, prompt=True)
    if closed != rendered([*question, answer]):
        raise RenderError("the chat template gives another text each time it renders a conversation")
    for word in ("wordask", "wordanswer"):
        if word not in closed:
            raise RenderError(f"the chat template drops text from a message ({word!r} is not in {closed!r})")
    header = closed[len(before) :].split("wordanswer")[0] if closed.startswith(before) else ""
    if opened == before and header.strip():
        raise RenderError("the chat template has no generation prompt: it ignores add_generation_prompt")
    behaviour = Behaviour(
        *template.split_closing(closed.rpartition("wordanswer")[2]),
        generation_prompt=opened[len(before) :] if opened.startswith(before) else "",
        reasoning="wordreason" in rendered([*question, {**answer, "reasoning_content": "wordreason"}]),
        system=_shows(template, [{"role": "system", "content": "wordsystem"}, *question], specs, "wordsystem"),
        frame=template.render([*question, answer, *question], prompt=True),
    )
    if not behaviour.system:
        behaviour.notes.append("has no system messages: a conversation with one is refused")
    if tools:
        _check_tools(rendered, opened, behaviour, parser)
    if image is not None:
        _probe_images(rendered, behaviour, image, tools)
    behaviour.conversations = _conversations(behaviour, tools)
    if _shows(template, [*question, {"role": "user", "content": "wordagain"}], specs, "wordagain"):
        behaviour.conversations.append([*question, answer, *question, {"role": "user", "content": "wordagain"}, answer])
    else:
        behaviour.notes.append("refuses two user messages in a row")
    for conversation in behaviour.conversations:
        behaviour.rewrites = behaviour.rewrites or _rewrites(
            template, behaviour.after_end, for_template(conversation), specs
        )
    return behaviour


def _shows(template: ChatTemplate, messages: list[Message], specs: Tools, word: str) -> bool:
    try:
        return word in template.render(messages, specs, prompt=True)
    except RenderError:
        return False


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return ToolCall(f"call_{name}", name, arguments).to_openai()


def _check_tools(
    rendered: Callable[[list[Message]], str],
    opened: str,
    behaviour: Behaviour,
    parser: Parser,
) -> None:
    """Raise RenderError if the template cannot show tools, calls or results, or writes calls that the parser cannot
    read."""
    if not all(spec.name in opened for spec in PROBE_TOOLS):
        raise RenderError(f"the chat template ignores `tools`: the model would not know of them; {_plain_text()}")
    calls = [_call("probelook", zeta="wordzeta", alpha=3), _call("probemove", alpha=4, zeta="wordeta")]
    expected: list[Call] = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]

    def turn_of(number: int, words: str = "") -> list[Message]:
        turn: Message = {"role": "assistant", "content": words, "tool_calls": calls[:number]}
        return [{"role": "user", "content": "wordask"}, turn]

    def said(text: str) -> str:
        turn = text[shared_length(opened, text) :].removesuffix(behaviour.closing)
        return split_reasoning(turn, behaviour.opens_reasoning)[2]

    for number in (1, 2):
        what = "a tool call" if number == 1 else "two tool calls in one turn"
        try:
            text = rendered(turn_of(number))
        except RenderError as error:
            if number == 2:  # many say so: "This model only supports single tool-calls at once!"
                behaviour.parallel_calls = False
                behaviour.notes.append("refuses two tool calls in one turn: a turn with several is malformed")
                break
            raise RenderError(f"the chat template cannot render {what}: {error}") from error
        turn = text.rpartition("wordask")[2]
        if not all(name in turn for name, _ in expected[:number]):
            raise RenderError(f"the chat template cannot render {what}: it leaves them out")
        if parser.parse(said(text), PROBE_TOOLS).calls != expected[:number]:
            raise RenderError(
                f"the chat template writes tool calls in a format that rollout.parser does not read: {turn!r}; "
                f"{_formats_that_read(said(text), expected[:number])}"
            )
        if not turn.endswith(behaviour.closing):
            raise RenderError(f"the chat template closes a turn with calls otherwise than a turn of text: {turn!r}")
        results: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": f"call_{name}", "content": f"wordresult{n}"}
            for n, (name, _) in enumerate(expected[:number])
        ]
        what = "a tool message" if number == 1 else "two tool messages in a row"
        try:
            after = rendered([*turn_of(number), *results])
        except RenderError as error:
            raise RenderError(f"the chat template cannot render {what}: {error}") from error
        if not all(f"wordresult{n}" in after for n in range(number)):
            raise RenderError(f"the chat template cannot render {what}: it leaves them out")
    if parser.write(expected[:1], PROBE_TOOLS) not in rendered(turn_of(1)):
        behaviour.notes.append("re-serialises tool calls: sampled ids are kept")
    try:
        found = parser.parse(said(rendered(turn_of(1, "wordbeside"))), PROBE_TOOLS)
    except RenderError:
        found = None
    if found is None or found.calls != expected[:1] or "wordbeside" not in found.content:
        behaviour.words_with_calls = False
        behaviour.notes.append("has no words beside a tool call")


def _probe_images(rendered: Callable[[list[Message]], str], behaviour: Behaviour, image: str, tools: bool) -> None:
    """Find out whether the template renders images of people and of tools, each as one token."""
    parts = [{"type": "text", "text": "wordbefore"}, {"type": "image"}, {"type": "text", "text": "wordafter"}]

    def shows(*messages: Message) -> bool:
        try:
            text = rendered(list(messages))
        except RenderError:
            return False
        before, _, after = text.partition(image)
        return text.count(image) == 1 and "wordbefore" in before and "wordafter" in after

    behaviour.images = shows({"role": "user", "content": parts})
    if not behaviour.images:
        behaviour.notes.append("has no images: the model gets them as text")
    elif tools:
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [_call("probelook", zeta="z", alpha=3)]}
        told: Message = {"role": "tool", "name": "probelook", "tool_call_id": "call_probelook", "content": parts}
        behaviour.images_of_tools = shows({"role": "user", "content": "wordask"}, turn, told)
        if not behaviour.images_of_tools:
            behaviour.notes.append("has no images in tool messages: they follow in a user message")


def _formats_that_read(text: str, calls: list[Call]) -> str:
    """Suggest formats for a template whose calls the chosen parser cannot read."""
    native = {name: parser for name in PARSERS if (parser := load_parser(name)).native}
    fit = [name for name, parser in native.items() if parser.parse(text, PROBE_TOOLS).calls == calls]
    return f"use rollout.parser={' or '.join(fit)}" if fit else f"none of {', '.join(native)} does; {_plain_text()}"


def _plain_text() -> str:
    """Suggest plain-text formats for a template that supports no native one."""
    return f"act in plain text: rollout.parser={' or '.join(n for n in PARSERS if not load_parser(n).native)}"


def _conversations(behaviour: Behaviour, tools: bool) -> list[list[Message]]:
    """Return conversations of the kinds that chains have, with the reasoning where the parser would put it.

    Turns end with full stops because many tokenizers would merge their last letters with a newline of the template.
    """

    def said(word: str, reason: str = "", calls: list[dict[str, Any]] | None = None) -> Message:
        message: Message = {"role": "assistant", "content": word}
        if reason and behaviour.reasoning:
            message["reasoning_content"] = reason
        elif reason:
            message["content"] = f"<think>\n{reason}\n</think>\n\n{word}"
        if calls:
            message["tool_calls"] = calls if behaviour.parallel_calls else calls[-1:]
            message["content"] = message["content"] if behaviour.words_with_calls else ""
        return message

    def asked(word: str) -> Message:
        return {"role": "user", "content": word}

    def result(name: str, word: str) -> Message:
        return {"role": "tool", "name": name, "tool_call_id": f"call_{name}", "content": word}

    look, move = _call("probelook", zeta="wordzeta", alpha=3), _call("probemove", alpha=4, zeta="wordeta")
    conversations = [
        [
            asked("wordone"),
            said("wordtwo."),
            asked("wordthree"),
            said("wordfour."),
            asked("wordfive"),
            said("wordsix."),
        ],
        [asked("wordone"), said("wordtwo", "wordwhy"), asked("wordthree"), said("wordfour", "wordwherefore")],
    ]
    if tools:
        conversations += [
            [
                asked("wordone"),
                said("wordtwo", calls=[look]),
                result("probelook", "wordthree"),
                said("", calls=[move, look]),
                *([result("probemove", "wordfour")] if behaviour.parallel_calls else []),
                result("probelook", "wordfive"),
                said("wordsix"),
                asked("wordseven"),
                said("", calls=[move]),
                result("probemove", "wordeight"),
                said("wordnine"),
            ],
            [
                asked("wordone"),
                said("", "wordwhy", [look]),
                result("probelook", "wordtwo"),
                said("wordthree", "wordwherefore", [move]),
                result("probemove", "wordfour"),
                asked("wordfive"),
                said("wordsix", "wordhence"),
                asked("wordseven"),
                said("wordeight", "wordthus"),
            ],
            # the answer to a malformed call has no call to refer to
            [asked("wordone"), said("wordtwo"), {"role": "tool", "content": "wordthree"}, said("wordfour")],
        ]
    if behaviour.images:
        image = image_part("image")
        seen = [{"type": "text", "text": "wordsee"}, image]
        conversations.append(
            [{"role": "user", "content": seen}, said("wordtwo."), asked("wordthree"), said("wordfour.")]
        )
        if tools:
            told = [{**result("probelook", ""), "content": seen}]
            told = told if behaviour.images_of_tools else show_in_user_turns(told)
            conversations.append(
                [{"role": "user", "content": [image]}, said("wordtwo", calls=[look]), *told, said("wordfour.")]
            )
    if behaviour.system:
        conversations += [[{"role": "system", "content": "wordsystem"}, *c] for c in conversations]
    return conversations


def _rewrites(template: ChatTemplate, after_end: str, conversation: list[Message], specs: Tools) -> str | None:
    """Return how the template breaks an append-only chain on this conversation; None if it does not."""
    turns = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    prompts = {i: template.render(conversation[:i], specs, prompt=True) for i in turns}
    whole = template.render(conversation, specs)
    for i, following in zip(turns, [*turns[1:], None], strict=True):
        ended = template.render(conversation[: i + 1], specs).removesuffix(after_end)
        if not ended.startswith(prompts[i]):
            return f"rewrites history: an assistant turn does not begin with the generation prompt {prompts[i][-40:]!r}"
        turn = conversation[i]
        said = [*turn["content"].replace("<think>", "").replace("</think>", "").split(), turn.get("reasoning_content")]
        if lost := [word for word in said if word and word not in ended[len(prompts[i]) :]]:
            return f"rewrites history: drops {lost[0]!r} (reasoning) from an assistant turn"
        for later in (*(prompts[j] for j in turns if j > i), whole):
            if not later.startswith(ended):
                at = shared_length(ended, later)
                return (
                    f"rewrites history: {ended[at : at + 40]!r} of an assistant turn becomes {later[at : at + 40]!r} "
                    "once messages follow"
                )
        if following is not None:
            new = conversation[i + 1 : following]
            if template.continuation(new, specs, after_end) != prompts[following][len(ended) :]:
                return "rewrites history: what follows a turn depends on the turns before it"
    return None


def training_variant(source: str) -> tuple[str, str] | None:
    """Return TRL's prefix-preserving variant of a template as (name, template), if TRL ships one.

    Reads TRL's files and compares them as `trl.chat_template_utils.get_training_chat_template` does, but without the
    import, which loads torch.
    """
    package = find_spec("trl")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "chat_templates"
    for file in sorted(folder.glob("*_training.jinja")):
        original = file.with_name(file.name.replace("_training", ""))
        if original.exists() and original.read_text(encoding="utf-8") == source:
            return file.stem, file.read_text(encoding="utf-8")
    return None


def tools_variant(template: ChatTemplate, parser: Parser, image: str | None) -> tuple[str, ChatTemplate] | None:
    """Return one of our templates, and its name, that writes the conversations without tools as `template` does; None
    if there is none."""
    try:
        conversations = [for_template(c) for c in probe(template, False, parser, image).conversations]
    except RenderError:
        return None
    for file in sorted(_TEMPLATES.glob("*.jinja")):
        ours = ChatTemplate(template.tokenizer, file.read_text(encoding="utf-8"))
        pairs = ((c, prompt) for c in conversations for prompt in (False, True))
        if all(ours.render(c, None, prompt) == template.render(c, None, prompt) for c, prompt in pairs):
            return f"agentfactory:{file.stem}", ours
    return None


@dataclass
class Choice:
    """The template that a chain uses, and the reason. `variant` is the name of a variant that is used instead of the
    model's own: TRL's, or ours."""

    use: Use
    template: ChatTemplate
    behaviour: Behaviour
    reasons: list[str]
    variant: str | None = None


def choose_template(
    tokenizer: PreTrainedTokenizerBase, source: str, tools: bool, parser: Parser, image: str | None = None
) -> Choice:
    """Judge a template and, if it rewrites history or cannot be used, TRL's training variant of it; see `probe`. One
    that ignores tools is replaced by ours that writes the same otherwise.

    Raises RenderError with every reason if none can be used.
    """
    template = ChatTemplate(tokenizer, source)
    reasons: list[str] = []
    behaviour, variant = None, None
    try:
        behaviour = probe(template, tools, parser, image)
    except RenderError as error:
        reasons.append(str(error))
        if tools and (found := tools_variant(template, parser, image)):
            variant, template = found
            behaviour = probe(template, tools, parser, image)
            reasons = [f"the chat template has no tools, and {variant} adds them"]
    if behaviour is not None:
        if behaviour.rewrites is None:
            reasons.append("leaves earlier turns as they were on every probe")
            return Choice(Use.APPEND, template, behaviour, reasons, variant)
        reasons.append(behaviour.rewrites)
    if training := training_variant(source):
        name, variant_source = training
        better = ChatTemplate(tokenizer, variant_source)
        try:
            found_better = probe(better, tools, parser, image)
        except RenderError as error:
            if str(error) not in reasons:
                reasons.append(f"TRL's {name}: {error}")
        else:
            if found_better.rewrites is None:
                reasons.append(f"TRL's {name} leaves earlier turns as they were on every probe")
                return Choice(Use.TRAINING_VARIANT, better, found_better, reasons, f"trl:{name}")
            reasons.append(f"TRL's {name} {found_better.rewrites}")
    if behaviour is None:
        raise RenderError("; ".join(reasons) + ". Set model.chat_template to a file with a template that can serve")
    reasons.append("each rewritten prompt begins a new row")
    return Choice(Use.FORK, template, behaviour, reasons, variant)
