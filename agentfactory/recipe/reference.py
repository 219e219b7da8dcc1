"""Generates pages of docs/: every field of a recipe, and every metric.

`python -m agentfactory.recipe.reference DOCS` writes the generated parts below the hand-written ones.
"""

import ast
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentfactory.recipe.schema import Recipe, StagedRecipe
from agentfactory.rollout.config import source_of
from agentfactory.rollout.metrics import CHAIN_METRICS, EVAL_METRICS, Metric
from agentfactory.tools.config import Choice
from agentfactory.tools.user_code.entry_points import SOURCES, registered
from agentfactory.trainers.config import ALGORITHMS
from agentfactory.trainers.metrics import METRICS

_WHOLE = "The whole recipe"
MARKER = "<!-- What follows is made by `python -m agentfactory.recipe.reference docs`: change it there. -->"
_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Any: "anything"}
_OF_A_CHAIN = """\
Trajectories contain these metrics under their plain names. `metrics.jsonl` contains their means: over a step's batch as
`trajectory/<name>` (`success` without the prefix), over the held-out tasks as `eval/sampled/<name>` and
`eval/greedy/<name>`, and over the tasks of `agentfactory rollout` as `rollout/<name>`; the last two also have `reward`.
Rewards and environments choose the names of the metrics that they add.
"""
_OF_AN_EVALUATION = """\
An evaluation logs these in addition to the metrics of chains, as `eval/sampled/<name>`. Those that one chain per task
determines are also logged as `eval/greedy/<name>`.
"""
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def sections(model: type[BaseModel]) -> dict[type[BaseModel], list[str]]:
    """Return `model`'s sections, outermost first, each with its keys, such as `train.loss`; entries of a mapping or a
    list are `<name>` or `<n>`. The options of a choice are sections too."""
    found: dict[type[BaseModel], list[str]] = {}
    for section, path in _sections(model, ""):
        found.setdefault(section, []).append(path)
    return found


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    yield model, path
    for kind in dict.fromkeys(model.kinds.values()) if issubclass(model, Choice) else ():
        yield kind, f"{path}.options"
    for name, field in model.model_fields.items():
        for below, key in models_in(field.annotation):
            yield from _sections(below, ".".join(filter(None, (path, name, key))))


def title(section: type[BaseModel], paths: list[str]) -> str:
    """Return the heading of a section that stands at `paths`."""
    return ", ".join(f"`{path}`" for path in paths) + "".join(_condition(section)) if paths != [""] else _WHOLE


def _condition(options: type[BaseModel]) -> Iterator[str]:
    """Yield what a recipe chooses to have these options."""
    for section in sections(Recipe):
        if issubclass(section, Choice):
            choices = [choice for choice, kind in section.kinds.items() if kind is options]
            if choices:
                yield " with " + " or ".join(_chosen(section, choice) for choice in choices)


def _chosen(section: type[Choice], choice: str) -> str:
    return f"`{choice}`" if choice in section.model_fields else f"`{section.chooser}: {choice}`"


def models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the sections in a type, each with the key suffix that leads to it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    origin = get_origin(annotation)
    key = "<name>" if origin is dict else "<n>" if origin is list else ""
    for part in get_args(annotation):
        for model, below in models_in(part):
            yield model, ".".join(filter(None, (key, below)))


def type_words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """Describe a type for readers of YAML, such as `integer > 0 or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        first, *bounds = parts
        return type_words(first, [limit for each in bounds for limit in getattr(each, "metadata", [each])])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_words(part, metadata) for part in parts)
    if origin is Literal:
        return _one_of([str(part).lower() if isinstance(part, bool) else str(part) for part in parts])
    if origin is list:
        return f"list of {type_words(parts[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_words(part) for part in parts) + "]"
    if origin is dict:
        return f"mapping of {type_words(parts[0])} to {type_words(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _one_of([member.value for member in annotation])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return " ".join([_WORDS[annotation], *_bounds(metadata or [])])


def _one_of(values: list[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _bounds(metadata: list[Any]) -> list[str]:
    limits = [(sign, getattr(limit, key, None)) for limit in metadata for key, sign in _BOUNDS.items()]
    found = [f"{sign} {value:g}" for sign, value in limits if value is not None]
    return [", ".join(found)] if found else []


def default_words(field: FieldInfo) -> str:
    """Return a field's default as YAML, or that it is required. Empty for a section, whose fields have their own
    defaults, and for fields that are filled in when a recipe is loaded, as their description says."""
    if field.is_required():
        return "" if "default:" in (field.description or "") else "**required**"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`" if value != "" else "empty"


def _cell(text: str) -> str:
    """Escape `text` for a table cell: keep code, and escape everything else that Markdown or HTML would interpret."""
    parts = " ".join(text.split()).split("`")
    plain = [part.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|") for part in parts[::2]]
    code = [part.replace("|", "\\|") for part in parts[1::2]]
    mixed = [part for pair in zip(plain, [*code, ""], strict=True) for part in pair][:-1]
    return "`".join(mixed)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def recipe_reference() -> str:
    """Return the fields of the whole recipe, the recipe of stages, and the defaults of algorithms."""
    return "\n".join([_part(()), _stages(), _presets()])


def _part(names: tuple[str, ...]) -> str:
    """Return the sections of a recipe below the fields `names`, with their fields (type, default, meaning), and the
    described values; without names, the recipe itself."""
    parts: list[str] = []
    enums: dict[type[StrEnum], None] = {}
    documented = sections(Recipe)
    for name, place in itertools.product(registered(SOURCES), ("data", "eval.data")):
        source = source_of(name)
        for section, path in _sections(source, f"{place}.{name}") if source else ():
            documented.setdefault(section, []).append(path)
    for section, paths in documented.items():
        if paths[0].partition(".")[0] not in (names or ("",)):
            continue
        rows = []
        for name, field in section.model_fields.items():
            typed = name == "options" and issubclass(section, Choice)
            kind = "section" if typed else type_words(field.annotation, field.metadata)
            rows.append([f"`{name}`", _cell(kind), "" if typed else default_words(field), _cell(meaning(field))])
            enums |= dict.fromkeys(_enums_in(field.annotation))
        parts.append(
            f"## {title(section, paths)}\n\n{_about(section)}\n\n" + _table(["field", "type", "default", "is"], rows)
        )
    parts += [text for enum in enums if (text := _values(enum))]
    return "\n".join(parts)


def _about(documented: type) -> str:
    return " ".join(inspect.cleandoc(documented.__doc__ or "").split())


def meaning(field: FieldInfo) -> str:
    """Return a field's docstring, or else that of its section."""
    below = next((model for model, _ in models_in(field.annotation)), None)
    return field.description or (_about(below) if below is not None else "")


def _enums_in(annotation: Any) -> Iterator[type[StrEnum]]:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        yield annotation
    for part in get_args(annotation):
        yield from _enums_in(part)


def _stages() -> str:
    rows = [
        [f"`{name}`", default_words(field), _cell(field.description or "")]
        for name, field in StagedRecipe.model_fields.items()
    ]
    return f"## A recipe of stages\n\n{_about(StagedRecipe)}\n\n" + _table(["field", "default", "is"], rows)


def _presets() -> str:
    rows = [
        [f"`{name}`", ", ".join(f"`{field}: {_plain(value)}`" for field, value in fields.items()) or "as above"]
        for name, fields in ALGORITHMS.items()
    ]
    about = (
        "`train.algorithm` sets these defaults for fields that the recipe leaves out. For the formulas, see "
        "[Algorithms](algorithms.md)."
    )
    return f"## Defaults by algorithm\n\n{about}\n\n" + _table(["algorithm", "sets"], rows)


def _plain(value: Any) -> str:
    return value.value if isinstance(value, StrEnum) else str(value)


def _values(enum: type[StrEnum]) -> str:
    """Return a table of an enumeration's values, if its class describes them."""
    notes = _member_notes(enum)
    if not notes:
        return ""
    rows = [[f"`{member.value}`", _cell(notes.get(member.name, ""))] for member in enum]
    return f"## Values: {enum.__name__}\n\n{_about(enum)}\n\n" + _table(["value", "is"], rows)


def _member_notes(enum: type[StrEnum]) -> dict[str, str]:
    """Return the docstrings below the members of an enumeration, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(enum))).body[0].body  # type: ignore[attr-defined]
    notes = {}
    for member, note in pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            notes[member.targets[0].id] = str(note.value.value)  # type: ignore[attr-defined]
    return notes


def metrics_reference() -> str:
    """Return the packages' own tables of metrics."""
    return (
        f"## Metrics of a step\n\n{_metrics(METRICS)}\n"
        f"## Metrics of a chain\n\n{_OF_A_CHAIN}\n{_metrics(CHAIN_METRICS)}\n"
        f"## Metrics of an evaluation\n\n{_OF_AN_EVALUATION}\n{_metrics(EVAL_METRICS)}"
    )


def _metrics(metrics: list[Metric]) -> str:
    rows = [[f"`{metric.name}`", _cell(metric.unit), _cell(metric.meaning)] for metric in metrics]
    return _table(["metric", "unit", "is"], rows)


PAGES: dict[str, Callable[[], str]] = {
    "recipe-reference.md": recipe_reference,
    "recipe/model-and-data.md": partial(_part, ("model", "data", "rewards", "eval")),
    "recipe/tools.md": partial(_part, ("mcp_servers", "limits")),
    "recipe/rollout.md": partial(_part, ("rollout",)),
    "recipe/server.md": partial(_part, ("server", "sync", "placement")),
    "recipe/training.md": partial(_part, ("train", "track")),
    "metrics.md": metrics_reference,
}
"""Page -> function that generates it."""


def renewed(page: str, text: str) -> str:
    """Replace the part of the page below the marker with generated text. Raises ValueError if the page has no
    marker."""
    head, marker, _ = text.partition(MARKER)
    if not marker:
        raise ValueError(f"{page}: there is no line {MARKER!r}, below which the tables go; fix: add it")
    return f"{head}{MARKER}\n\n{PAGES[page]()}"


def main(folder: Path) -> None:
    """Regenerate the pages in `folder`."""
    for page in PAGES:
        path = folder / page
        path.write_text(renewed(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
