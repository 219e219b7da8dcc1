"""The construction of a model's renderer, with a template and format chosen by probes, and the tokens they need."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notify
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.images.image_intake import ShownImages
from agentfactory.rollout.images.store import ImageStore
from agentfactory.rollout.text.parsers import AUTO, load_parser
from agentfactory.rollout.text.probing.conversations import PROBE_TOOLS
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.template_and_format import ROWS, Reasoning, Use, choose_template, recognise
from agentfactory.rollout.text.templates import RenderError
from agentfactory.rollout.text.tokenizer import load_tokenizer, stop_ids


@dataclass(frozen=True)
class FormatTokens:
    """Added tokens (special ones and tags such as `<tool_call>`) by text."""

    written: dict[str, int]
    """Tokens of calls, reasoning tags, and tokens that end turns."""
    ends: list[int]
    """Ids of the tokens that end turns."""
    read: dict[str, int] = field(default_factory=dict)
    """Tokens that frame the messages of others."""

    def check(self, rows: int) -> None:
        """Raise SettingError if a token is beyond the `rows` of a network's embedding."""
        beyond = [f"{text} ({number})" for text, number in (self.written | self.read).items() if number >= rows]
        if beyond:
            problem = f"the chat template needs {', '.join(beyond[:5])}, and the network has {rows} tokens"
            fix = "resize its embeddings and save it, or set model.chat_template to a template without them"
            raise SettingError("model.path", problem, fix)

    @classmethod
    def of_info(cls, info: dict[str, Any]) -> "FormatTokens | None":
        """Return the tokens in a renderer's `info`; None in checkpoints of earlier versions."""
        return cls(**info["tokens"]) if "tokens" in info else None


def format_tokens(renderer: Renderer) -> FormatTokens:
    tokenizer, behaviour = renderer.tokenizer, renderer.behaviour
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    ends = sorted({end for end in renderer.ends if end is not None})
    written = {text: number for text, number in added.items() if text in behaviour.turns}
    written |= {str(tokenizer.convert_ids_to_tokens(end)): end for end in ends}
    read = {text: number for text, number in added.items() if text in behaviour.whole_frame + behaviour.frame}
    return FormatTokens(written, ends, {text: number for text, number in read.items() if text not in written})


def pieces_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of an added token's text, written as ordinary tokens."""
    # without its first character, the text is no added token
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[:1], text[1:])]
    return [number for part in parts for number in part]


def token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the id of a token of model.lora.trainable_tokens. Raises SettingError if there is none."""
    found: Any = tokenizer.get_vocab().get(text)
    if found is None:
        known = ", ".join(sorted(tokenizer.get_added_vocab())[:5])
        problem, fix = f"got {text!r}, which is no token of the vocabulary", f"use auto, or tokens such as {known}"
        raise SettingError("model.lora.trainable_tokens", problem, fix)
    return int(found)


logger = logging.getLogger(__name__)
_PAGE = "docs/tool-call-formats.md"
Log = Callable[[dict[str, Any]], None]


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    *,
    parser: str = AUTO,
    reasoning: str = Reasoning.AUTO,
    tools: bool = True,
    eos_token_ids: Sequence[int] = (),
    base: Path = Path(),
    log: Log | None = None,
    images: ShownImages | None = None,
) -> Renderer:
    """Create a renderer for a tokenizer and a Jinja template (default: the tokenizer's own), after probing it. `parser`
    is `rollout.parser`, whose file is looked up in `base`, and `reasoning` is `rollout.reasoning`. Set `tools` if the
    chains call tools; otherwise the template need not render any. `eos_token_ids` end a turn in addition to the
    template's and the tokenizer's own tokens. `log` gets one record, `{"renderer": info}`. `images` prepares images for
    the model; None converts them to text. Raises RenderError (a ValueError) if the template cannot be used."""
    origin = "tokenizer" if chat_template is None else "model.chat_template"
    if chat_template is None and tokenizer.chat_template is None:
        raise RenderError("the tokenizer has no chat template: set model.chat_template to a file with one")
    named = None if parser == AUTO else load_parser(parser, base)
    native = named is None or named.native
    source = tokenizer.get_chat_template(chat_template, tools=[] if tools and native else None)
    reasons = []
    if named is None:
        # if there are tools and no format is recognised, the probes report the problem
        found = recognise(tokenizer, source)
        parser, named = found or ("hermes", load_parser("hermes"))
        reasons.append(
            f"rollout.parser=auto: {parser} reads the calls that the template writes"
            if found
            else "no native tool-call format is recognised: hermes"
        )
    image = None if images is None else str(tokenizer.convert_ids_to_tokens(images.vision.image_token_id))
    choice = choose_template(tokenizer, source, tools, named, image, Reasoning(reasoning))
    info: dict[str, Any] = {
        "choice": str(choice.use),
        "reasons": [*reasons, *choice.reasons, *choice.behaviour.notes],
        "rows": ROWS[choice.use],
        "template": origin if choice.variant is None else choice.variant,
        "template_sha256": hashlib.sha256(choice.template.source.encode()).hexdigest(),
        "parser": parser,
    }
    if images is not None:
        images.shows = choice.behaviour.images
    renderer = Renderer(tokenizer, choice.template, choice.behaviour, named, info, eos_token_ids, images, choice.use)
    info = renderer.info
    if not choice.behaviour.end:
        info["reasons"].append("closes turns with plain text: a turn ends with the tokenizer's end-of-sequence token")
    appends = choice.use in (Use.APPEND, Use.TRAINING_VARIANT)
    if appends and not renderer.tokens_agree(PROBE_TOOLS if tools else []):
        info["reasons"].append("tokens merge across the turn boundary: the boundary is tokenised separately")
    if misprint := choice.behaviour.misprint:
        fix = "set model.chat_template to a corrected one, or rollout.parser=json, which reads both"
        text = f"the chat template's instructions show calls as {misprint!r}, but it writes them otherwise"
        notify(logger, "misprint in the chat template", f"{text}: models copy what they are shown; {fix}", see=_PAGE)
    info["tokens"] = asdict(format_tokens(renderer))
    if log:
        log({"renderer": info})
    return renderer


def load_renderer(
    model: ModelConfig,
    parser: str,
    log: Log | None = None,
    *,
    reasoning: str = Reasoning.AUTO,
    tools: bool = True,
    base: Path = Path(),
    images: Path | None = None,
) -> Renderer:
    """Create the renderer of a recipe's model; see `make_renderer`. `images` is the folder for the run's images; None
    converts images to text. Raises ValueError if a file is missing or the template cannot be used."""
    source = None
    if model.chat_template is not None:
        file = Path(model.chat_template)
        if not file.is_file():
            raise SettingError("model.chat_template", f"there is no file {file}", "name a Jinja file")
        source = file.read_text(encoding="utf-8")
    return make_renderer(
        load_tokenizer(model.path),
        source,
        parser=parser,
        reasoning=reasoning,
        tools=tools,
        base=base,
        eos_token_ids=stop_ids(model.path),
        log=log,
        images=None if images is None else load_images(model, images),
    )


def load_images(model: ModelConfig, folder: Path) -> ShownImages | None:
    """Return the image handling of a recipe's model, with `folder` for the run's images; None for a text model."""
    file = cached_file(model.path, "config.json", _raise_exceptions_for_missing_entries=False)
    if file is None or "vision_config" not in json.loads(Path(file).read_text(encoding="utf-8")):
        return None
    vision = load_vision(model.path, model.min_image_pixels, model.max_image_pixels)
    return None if vision is None else ShownImages(vision, ImageStore(folder))
