"""Chooses the template that a chain uses, the tool-call format, and how history is kept."""

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agentfactory.rollout.images.parts import for_template
from agentfactory.rollout.text.parsers import PARSERS, NativeParser, Parser, load_parser
from agentfactory.rollout.text.probing.behaviour import Behaviour
from agentfactory.rollout.text.probing.conversations import PROBE_TOOLS
from agentfactory.rollout.text.probing.probe import probe
from agentfactory.rollout.text.probing.tool_probe import reads_call
from agentfactory.rollout.text.templates import ChatTemplate, RenderError

_TEMPLATES = Path(__file__).parent / "chat_templates"
"""Templates of ours."""


class Use(StrEnum):
    """How a chain uses its template."""

    APPEND = "append"
    TRAINING_VARIANT = "training variant"
    KEEP = "keep"
    FORK = "fork"
    DROP = "drop"


class Reasoning(StrEnum):
    """What becomes of the reasoning of earlier turns (`rollout.reasoning`)."""

    AUTO = "auto"
    """Keep it if the template, or TRL's training variant of it, does; otherwise as the template has it."""
    KEEP = "keep"
    """One row, in which every turn stays as it was sampled, whatever the template would make of it."""
    DROP = "drop"
    """No earlier turn has its reasoning: a new row wherever there was some."""
    TEMPLATE = "template"
    """As the model's own template has it: a new row wherever it changes an earlier turn."""


def recognise(tokenizer: PreTrainedTokenizerBase, source: str) -> tuple[str, Parser] | None:
    """Return the native format, and its name in PARSERS, in which a template writes calls; None if no parser reads
    them.

    If several parsers read them, it is the first that writes them as the template does.
    """
    sources = [source]
    if training := training_variant(source):  # DeepSeek's own cannot render a call
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
            # a format whose tokens the template leaves to the model is known by more of them than another
            name, parser, *_ = max(exact or readers, key=lambda reader: len(reader[1].marks))
            return name, parser
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

    @property
    def trained(self) -> str:
        """What rows hold, and what a deployed model sees, in words."""
        return _TRAINED[self.use]


_TRAINED = {
    Use.APPEND: "one row per chain, all turns as they were sampled; a deployed model sees the same history",
    Use.TRAINING_VARIANT: (
        "one row per chain, all turns as they were sampled; a deployed model sees the same history with the template "
        "of the checkpoint, and with the original one a history without earlier reasoning"
    ),
    Use.KEEP: (
        "one row per chain, all turns as they were sampled (rollout.reasoning=keep); a deployed model sees what the "
        "template makes of its history, which is something else"
    ),
    Use.FORK: "history as the template has it, a new row where it changes; a deployed model sees the same history",
    Use.DROP: (
        "history without the reasoning of earlier turns, a new row where there was some (rollout.reasoning=drop); a "
        "deployed model sees the same if the client sends no reasoning back, or if the template drops it"
    ),
}


def choose_template(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    tools: bool,
    parser: Parser,
    image: str | None = None,
    reasoning: Reasoning = Reasoning.AUTO,
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
    if behaviour is not None and reasoning is Reasoning.DROP:
        reasons.append(behaviour.rewrites or "leaves earlier turns as they were on every probe")
        return Choice(Use.DROP, template, behaviour, reasons, variant)
    if behaviour is not None:
        if behaviour.rewrites is None:
            reasons.append("leaves earlier turns as they were on every probe")
            return Choice(Use.APPEND, template, behaviour, reasons, variant)
        reasons.append(behaviour.rewrites)
    if (behaviour is None or reasoning is not Reasoning.TEMPLATE) and (training := training_variant(source)):
        name, variant_source = training
        better = ChatTemplate(tokenizer, variant_source)
        try:
            found_better = probe(better, tools, parser, image)
        except RenderError as error:
            if str(error) not in reasons:
                reasons.append(f"TRL's {name}: {error}")
        else:
            if found_better.rewrites is None and reasoning is not Reasoning.DROP:
                reasons.append(f"TRL's {name} leaves earlier turns as they were on every probe")
                return Choice(Use.TRAINING_VARIANT, better, found_better, reasons, f"trl:{name}")
            reasons.append(f"TRL's {name} {found_better.rewrites or 'leaves earlier turns as they were'}")
            if behaviour is None:  # the model's own cannot be used at all
                template, behaviour, variant = better, found_better, f"trl:{name}"
    if behaviour is None:
        told = "; ".join(reasons)
        if "use rollout.parser=" not in told:
            told += ". Set model.chat_template to a file with a template that can serve"
        raise RenderError(told)
    if reasoning is Reasoning.DROP:
        return Choice(Use.DROP, template, behaviour, reasons, variant)
    if reasoning is Reasoning.KEEP:
        reasons.append("rollout.reasoning=keep: sampled turns are kept all the same")
        return Choice(Use.KEEP, template, behaviour, reasons, variant)
    reasons.append("each rewritten prompt begins a new row")
    return Choice(Use.FORK, template, behaviour, reasons, variant)
