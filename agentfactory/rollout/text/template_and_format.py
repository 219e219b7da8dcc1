"""The choice of a chain's chat template, tool-call format and handling of history."""

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agentfactory.rollout.images.parts import for_template
from agentfactory.rollout.text.parsers import PARSERS, NativeParser, Parser, load_parser
from agentfactory.rollout.text.probing.conversations import PROBE_TOOLS
from agentfactory.rollout.text.probing.probe import probe
from agentfactory.rollout.text.probing.tool_probe import USE, reads_call
from agentfactory.rollout.text.templates import Behaviour, ChatTemplate, RenderError

_TEMPLATES = Path(__file__).parent / "chat_templates"


class Use(StrEnum):
    """A chain's use of its template."""

    APPEND = "append"
    TRAINING_VARIANT = "training variant"
    KEEP = "keep"
    FORK = "fork"
    DROP = "drop"


class Reasoning(StrEnum):
    """The handling of earlier turns' reasoning (`rollout.reasoning`)."""

    AUTO = "auto"
    """Keep it if the template, or TRL's training variant of it, does; otherwise follow the template."""
    KEEP = "keep"
    """Keep every turn as sampled, in one row, even if the template would rewrite it."""
    DROP = "drop"
    """Drop the reasoning of earlier turns; begin a new row wherever there was some."""
    TEMPLATE = "template"
    """Follow the model's own template; begin a new row wherever it changes an earlier turn."""


def recognise(tokenizer: PreTrainedTokenizerBase, source: str) -> tuple[str, Parser] | None:
    """Return the name in PARSERS and the parser of the native format in which a template writes calls: the first that
    writes them like the template, or else that reads them; None if none does."""
    sources = [source]
    if training := training_variant(source):  # DeepSeek's own template cannot render a call
        sources.append(training[1])
    native = {name: parser for name in PARSERS if isinstance(parser := load_parser(name), NativeParser)}
    for text in sources:
        readers = [
            (name, parser, *found)
            for name, parser in native.items()
            if (found := reads_call(ChatTemplate(tokenizer, text), parser)) is not None
        ]
        exact = [reader for reader in readers if reader[1].write(reader[3], PROBE_TOOLS) in reader[2]]
        if readers:
            # formats whose tokens the template leaves to the model are distinguished by the number of their marks
            name, parser, *_ = max(exact or readers, key=lambda reader: len(reader[1].marks))
            return name, parser
    return None


def training_variant(source: str) -> tuple[str, str] | None:
    """Return TRL's prefix-preserving variant of a template as (name, template), if TRL ships one."""
    # as trl.chat_template_utils.get_training_chat_template does, but without importing TRL, which loads torch
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
    """Return (name, template) of our template, if any, that renders conversations without tools like `template`."""
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
    """A chain's template, and the reasons for it. `variant` names TRL's or our variant that replaces the model's."""

    use: Use
    template: ChatTemplate
    behaviour: Behaviour
    reasons: list[str]
    variant: str | None = None


ROWS = {
    Use.APPEND: "one row per chain, all turns as sampled; a deployed model gets the same history",
    Use.TRAINING_VARIANT: (
        "one row per chain, all turns as sampled; a deployed model gets the same history with the checkpoint's "
        "template, and a history without earlier reasoning with the original template"
    ),
    Use.KEEP: (
        "one row per chain, all turns as sampled (rollout.reasoning=keep); a deployed model gets a different history, "
        "because its template rewrites earlier turns"
    ),
    Use.FORK: "history as rendered by the template, a new row where it changes; a deployed model gets the same history",
    Use.DROP: (
        "history without the reasoning of earlier turns, a new row where there was some (rollout.reasoning=drop); a "
        "deployed model gets the same history if the client sends no reasoning back, or if the template drops it"
    ),
}
"""The rows of each use, and a deployed model's history."""


def choose_template(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    tools: bool,
    parser: Parser,
    image: str | None = None,
    reasoning: Reasoning = Reasoning.AUTO,
) -> Choice:
    """Probe a template and, if it rewrites history or cannot be used, TRL's training variant of it; see `probe`. Ours
    replace equivalent templates that ignore tools. Raises RenderError."""
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
        reasons.append(behaviour.rewrites or "leaves earlier turns unchanged on every probe")
        if behaviour.rewrites is None and reasoning is not Reasoning.DROP:
            return Choice(Use.APPEND, template, behaviour, reasons, variant)
    follows = reasoning in (Reasoning.TEMPLATE, Reasoning.DROP)
    if (behaviour is None or not follows) and (training := training_variant(source)):
        name, better = training[0], ChatTemplate(tokenizer, training[1])
        try:
            found_better = probe(better, tools, parser, image)
        except RenderError as error:
            if str(error) not in reasons:
                reasons.append(f"TRL's {name}: {error}")
        else:
            reasons.append(f"TRL's {name} {found_better.rewrites or 'leaves earlier turns unchanged on every probe'}")
            if found_better.rewrites is None and reasoning is not Reasoning.DROP:
                return Choice(Use.TRAINING_VARIANT, better, found_better, reasons, f"trl:{name}")
            if behaviour is None:  # the model's own template cannot be used at all
                template, behaviour, variant = better, found_better, f"trl:{name}"
    if behaviour is None:
        told = "; ".join(reasons)
        raise RenderError(told if USE in told else f"{told}; {_fix(tokenizer, source, tools, parser, image)}")
    use, why = {
        Reasoning.DROP: (Use.DROP, []),
        Reasoning.KEEP: (Use.KEEP, ["rollout.reasoning=keep: sampled turns are kept anyway"]),
    }.get(reasoning, (Use.FORK, ["each rewritten prompt begins a new row"]))
    return Choice(use, template, behaviour, reasons + why, variant)


def _fix(tokenizer: PreTrainedTokenizerBase, source: str, tools: bool, parser: Parser, image: str | None) -> str:
    """Return the fix for a template that cannot be used: text formats, if it works without tools, or another one."""
    other = "set model.chat_template to a file with a suitable template"
    if not (tools and parser.native):
        return other
    named = tokenizer.chat_template
    if isinstance(named, dict) and source in named.values():  # text formats take the default template
        source = named.get("default", "")
    try:
        probe(ChatTemplate(tokenizer, source), False, parser, image)
    except RenderError:
        return other
    formats = " or ".join(name for name in PARSERS if not load_parser(name).native)
    return f"act in plain text: rollout.parser={formats}; or {other}"
