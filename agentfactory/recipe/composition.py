"""Composition of recipe files and overrides into one mapping: YAML, `extends:`, dotted overrides, absolute paths."""

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.config import leaves
from agentfactory.base.errors import SettingError, short
from agentfactory.base.files.untrusted_files import read_file
from agentfactory.recipe.choices import CHOICES, chosen, places, value_at
from agentfactory.recipe.removed_fields import complete_saved
from agentfactory.recipe.server_blocks import take_server_blocks
from agentfactory.recipe.yaml_text import RECIPE_BYTES, parse_yaml
from agentfactory.rollout.config import source_of

COMMAND_LINE = "command line"
RECIPES = Path(__file__).parents[1] / "recipes"
HERE = "${here}"
"""Placeholder for the folder of the file that contains it; on the command line, the current folder."""


@dataclass
class Composed:
    """A recipe's mapping before validation. `origins` contains, per dotted leaf, the file or command line that set it;
    `folders` are the folders of its files. All are equal, so that two files can hold equal recipes."""

    source: str = field(default="", compare=False)
    data: dict[str, Any] = field(default_factory=dict, compare=False)
    origins: dict[str, str] = field(default_factory=dict, compare=False)
    folders: list[Path] = field(default_factory=list, compare=False)

    def merge(self, data: dict[str, Any], source: str) -> None:
        """Merge `data` into this mapping: mappings merge, everything else replaces. If a choice changes, drop options
        that the new choice does not have, except those that `source` itself sets."""
        before = {path: chosen(self.data, path) for path in CHOICES}
        _merge(self.data, data)
        for leaf in leaves(data):
            # keep the leaves in the order in which they were set
            self.origins.pop(leaf, None)
            self.origins[leaf] = source
        for path, choice in before.items():
            if chosen(self.data, path) != choice:
                self._drop_options(path, choice, source)

    def _drop_options(self, path: str, before: str, source: str) -> None:
        options, types = value_at(self.data, f"{path}.options"), CHOICES[path].options_type
        kind = types(chosen(self.data, path))  # None: a user's own component
        if (types(before) is None and kind is None) or not isinstance(options, dict):
            return
        for name in [*options]:
            mine = any(
                self.origins[leaf] == source
                for leaf in self.origins
                if f"{leaf}.".startswith(f"{path}.options.{name}.")
            )
            if not mine and (kind is None or name not in kind.model_fields):
                del options[name]

    def origin(self, name: str) -> str:
        """Return the source that set the field `name`, or a field in or around it; else the recipe's own file."""
        while name:
            for leaf, source in self.origins.items():
                if leaf == name or leaf.startswith(f"{name}."):
                    return source
            name = name.rpartition(".")[0]
        return self.source

    @contextmanager
    def located(self) -> Iterator[None]:
        """Give errors without a source the one that set their field."""
        try:
            yield
        except SettingError as error:
            raise error.at(source=error.source or self.origin(error.field)) from error.__cause__

    @contextmanager
    def stage_named(self, stage: str) -> Iterator[None]:
        """Give errors about fields that this recipe or the command line sets the stage's name, too."""
        try:
            yield
        except SettingError as error:
            if error.source not in (COMMAND_LINE, self.source):
                raise
            raise error.at(".".join(filter(None, (stage, error.field))), error.source) from error.__cause__


def display(path: Path) -> str:
    """Return `path` relative to the current folder, or unchanged if it is outside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def recipe_file(name: str | Path, base: Path) -> Path:
    """Return the file `name`, relative to `base`; if there is none, AgentFactory's own recipe of that name."""
    path, own = (base / Path(name).expanduser()).resolve(), RECIPES.parent / name
    return own.resolve() if Path(name).parts[:1] == (RECIPES.name,) and own.exists() and not path.exists() else path


def read_mapping(path: Path, source: str, name: str) -> dict[str, Any]:
    """Read the YAML mapping in the file `path`; `source` and `name` identify the request in errors."""
    try:
        text = read_file(path, RECIPE_BYTES).decode()
    except FileNotFoundError:
        raise SettingError(name, f"{display(path)}: no such file", "name an existing recipe", source=source) from None
    except (OSError, UnicodeDecodeError) as error:
        if not path.is_dir():
            problem = f"{display(path)}: cannot be read: {error}"
            raise SettingError(name, problem, "name a YAML file", source=source) from None
        inside = [file for file in (path / "recipe.yaml", path / f"{path.name}.yaml") if file.is_file()]
        fix = f"name {display(inside[0])}" if inside else "name a YAML file"
        raise SettingError(name, f"{display(path)}: is a folder", fix, source=source) from None
    if path.suffix == ".py":
        fix = f"name a recipe, which is YAML, such as one with `tools: [{path.name}:NAME]`"
        raise SettingError(name, f"{display(path)} is a Python file", fix, source=source)
    try:
        data = parse_yaml(text)
    except ValueError as error:
        fix = "correct it; indent with spaces, not with tabs, and write comments with #, not //"
        # JSON among lines of YAML, and not alone
        if re.search(r"^[{}]", text, re.MULTILINE) and not re.fullmatch(r"\{.*\}", text.strip(), re.DOTALL):
            fix = f"indent pasted braces below a line `mcp_servers:`, or leave out the outermost two; {fix}"
        raise SettingError("", f"not YAML: {error}", fix, source=display(path)) from None
    if not isinstance(data, dict):
        fix = "write `key: value` lines, such as `model: ...`"
        raise SettingError("", f"holds {short(data)}, not a mapping", fix, source=display(path))
    return data


def compose(data: dict[str, Any], file: Path, ancestors: tuple[Path, ...] = ()) -> Composed:
    """Merge `data`, the contents of `file`, into the recipe that it extends; paths are relative to their file."""
    source, data = display(file), dict(data)
    composed = Composed(source)
    parent = data.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise SettingError("extends", f"got {short(parent)}", "name one recipe file", source=source)
        path = recipe_file(parent, file.parent)
        if path in (file, *ancestors):
            raise SettingError("extends", f"{parent} extends this file in turn", "break the cycle", source=source)
        inherited = compose(read_mapping(path, source, "extends"), path, (file, *ancestors))
        inherited.data.pop("name", None)
        composed.data, composed.origins, composed.folders = inherited.data, inherited.origins, inherited.folders
    composed.folders.insert(0, file.parent)
    try:
        data = take_server_blocks(data)
    except SettingError as error:
        raise error.at(source=source) from None
    composed.merge(anchor(_from_here(data, file.parent), file.parent), source)
    return composed


def parse_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """`train.learning_rate=1e-5` -> ("train.learning_rate", 1e-5); values are YAML."""
    parsed = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise SettingError("", f"got {text!r}", "write key=value, such as train.steps=100", source=COMMAND_LINE)
        if name.split(".")[0] in ("extends", "stages"):
            raise SettingError(name, "cannot be overridden", "write it in a recipe file", source=COMMAND_LINE)
        try:
            parsed.append((name, parse_yaml(value)))
        except ValueError as error:
            fix = f"correct it; a text needs quotes inside quotes: '{name}=\"TEXT\"'"
            raise SettingError(name, f"{short(value)} is not YAML: {error}", fix, source=COMMAND_LINE) from None
    return parsed


def override(composed: Composed, name: str, value: Any) -> None:
    *parents, last = name.split(".")
    section: Any = composed.data
    for depth, key in enumerate(parents, 1):
        section = section.get(key)
        if section is None:
            break
        above = ".".join(parents[:depth])
        if above in _LISTS and isinstance(section, list):
            _override_entry(composed, above, [*parents, last][depth:], value)
            return
        if not isinstance(section, dict):
            problem = f"{above} is {short(section)}, not a section"
            raise SettingError(name, problem, f"set {above} itself", source=COMMAND_LINE)
    nested = _nested([*parents, last], value)
    composed.merge(anchor(_from_here(nested, Path.cwd()), Path.cwd()), COMMAND_LINE)


def _nested(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


_LISTS = ("data.sources", "eval.data.sources")
"""Lists of sections, of which the command line may set a field by the number or the name of the entry."""


def _override_entry(composed: Composed, above: str, keys: list[str], value: Any) -> None:
    entries = value_at(composed.data, above)
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    asked, *inner = keys
    number = int(asked) if asked.isdecimal() else names.index(asked) if asked in names else len(entries)
    if number >= len(entries) or not inner:
        known = ", ".join(f"{place} ({name})" for place, name in enumerate(names))
        raise SettingError(f"{above}.{asked}", f"the entries are {known}", "set a field of one", source=COMMAND_LINE)
    root = _nested(above.split("."), [_nested(inner, value)])
    (given,) = value_at(anchor(_from_here(root, Path.cwd()), Path.cwd()), above)
    changed = copy.deepcopy(entries)
    _merge(changed[number], given)
    composed.merge(_nested(above.split("."), changed), COMMAND_LINE)


def anchor(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make the paths in every known field of `data` absolute, relative to `base`; expand `agent` and `user: NAME`."""
    rollout = data.get("rollout")
    for who in ("agent", "user"):
        if isinstance(rollout, dict) and isinstance(rollout.get(who), str):
            rollout[who] = {"name": rollout[who]}
    for name, convert in _PATH_FIELDS.items():
        _convert(data, name.split("."), partial(convert, base=base))
    _anchor_servers(data, base)
    for path in _LISTS:
        _anchor_registered(value_at(data, path.removesuffix(".sources")), base)
        entries = value_at(data, path)
        for entry in entries if isinstance(entries, list) else ():
            for name, convert in _OF_A_SOURCE.items():
                _convert(entry, name.split("."), partial(convert, base=base))
            _anchor_servers(entry, base)
            _anchor_registered(entry, base)
    return data


def _anchor_servers(data: Any, base: Path) -> None:
    """Run the programs of a section's `mcp_servers` in `base`, unless they have a folder."""
    servers = data.get("mcp_servers") if isinstance(data, dict) else None
    for server in servers.values() if isinstance(servers, dict) else ():
        if isinstance(server, dict) and server.get("command") and not server.get("cwd"):
            server["cwd"] = str(base)


def _anchor_registered(rows: Any, base: Path) -> None:
    for name in sorted(rows) if isinstance(rows, dict) else ():
        source = source_of(name)
        for path in source.paths if source else ():
            _convert(rows, [name, *filter(None, path.split("."))], partial(_absolute, base=base))


def _absolute(value: str, base: Path) -> str:
    if value.startswith(("${prepared}", "${output}", "${chain}")):
        return value
    # not Path.resolve, which raises RuntimeError for a circular link
    return os.path.realpath(base / Path(value).expanduser())


def _hub_or_absolute(value: str, base: Path) -> str:
    path = _absolute(value, base)
    # Qwen2.5-0.5B is a name, tasks.csv is not
    is_hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", value) and not Path(value).suffix[1:].isalpha()
    return value if is_hub_name and not Path(path).exists() else path


def _reference(value: str, base: Path) -> str:
    file, colon, name = value.rpartition(":")
    return f"{_absolute(file, base)}:{name}" if colon else value


_PATH_FIELDS: dict[str, Callable[..., str]] = {
    "import_path.*": _absolute,
    "prepare": _reference,
    "tools.*": _reference,
    "rewards.*": _reference,
    "rewards.*.reward": _reference,
    "rollout.agent.name": _reference,
    "rollout.agent.options.workspace": _absolute,
    "rollout.agent.options.files": _absolute,
    "rollout.agent.options.readable.*": _absolute,
    "rollout.user.name": _reference,
    "rollout.parser": _reference,
    "train.advantage.estimator": _reference,
    "train.loss.policy": _reference,
    "sync.backend": _reference,
    "data.source": _reference,
    "eval.data.source": _reference,
    "mcp_servers.*.module": _reference,
    "mcp_servers.*.cwd": _absolute,
    "mcp_servers.*.workspace": _absolute,
    # keeps links: a virtual environment's Python is one, and the environment is found through it
    "server.options.python": lambda value, base: os.path.abspath(base / Path(value).expanduser()),
    "model.path": _hub_or_absolute,
    "model.lora.from": _absolute,
    "server.model": _hub_or_absolute,
    "teacher.model": _hub_or_absolute,
    "teacher.context": _reference,
    "model.chat_template": _absolute,
    "data.path": _hub_or_absolute,
    "eval.data.path": _hub_or_absolute,
    "train.from_trajectories": _absolute,
}
_OF_A_SOURCE = {
    "agent": _reference,
    "user": _reference,
    **{
        name.removeprefix("data.").removeprefix("rollout."): convert
        for name, convert in _PATH_FIELDS.items()
        if name.startswith(("data.", "rollout.", "tools.", "rewards.", "mcp_servers."))
    },
}
"""The same for an entry of `data.sources`."""


def _convert(data: Any, keys: list[str], convert: Callable[[str], str]) -> None:
    """Apply `convert` in place to the strings that `keys` reach ('*' is every entry); others fail validation later."""
    for place, key in places(data, keys):
        if isinstance(place[key], str):
            place[key] = convert(place[key])


def replace_prefixes(value: Any, prefixes: dict[str, str]) -> Any:
    """Replace each key of `prefixes` at the beginning of a string in `value` with its value."""

    def replaced(text: str) -> str:
        for old, new in prefixes.items():
            if text.startswith(old) and text[len(old) :][:1] in ("", "/", ":"):
                return new + text[len(old) :]
        return text

    return _map_texts(value, replaced)


def resolve_saved(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    output = {"${prepared}": f"{folder}/prepared", "${output}": str(folder)}
    resolved: dict[str, Any] = replace_prefixes(_from_here(recipe, folder), output)
    stages = resolved.get("stages")
    for stage in [resolved, *(stages if isinstance(stages, list) else ())]:
        complete_saved(stage)
    return resolved


def _from_here(value: Any, folder: Path) -> Any:

    def absolute(text: str) -> str:
        after = text.removeprefix(HERE)
        return os.path.normpath(f"{folder}{after}") if after != text and after[:1] in ("", "/", ":") else text

    return _map_texts(value, absolute)


def _map_texts(value: Any, convert: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _map_texts(item, convert) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, convert) for item in value]
    return convert(value) if isinstance(value, str) else value


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value
