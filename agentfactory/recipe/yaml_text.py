"""Parse untrusted YAML, with bounds on size, depth and alias expansion."""

import re
from typing import Any

import yaml

from agentfactory.base.errors import short

RECIPE_BYTES = 1 << 20
_DEPTH = 64
_NODES = 100_000
"""Maximum number of values; an alias counts as the values that it stands for."""


class YamlBoundsError(ValueError):
    """The YAML text exceeds a bound, which the message names."""


class _Bounded(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, before = self.peek_event().start_mark, self._nodes
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEPTH:
            raise YamlBoundsError(f"more than {_DEPTH} levels deep, line {mark.line + 1}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._sizes:
            raise YamlBoundsError(f"a value contains itself, line {mark.line + 1}")
        self._nodes += self._sizes[node] if node is not None and is_alias else 1
        if self._nodes > _NODES:
            raise YamlBoundsError(f"more than {_NODES:,} values with aliases resolved, line {mark.line + 1}")
        if node is not None:
            self._sizes[node] = self._nodes - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. Raises YamlBoundsError, and ConstructorError if the text does not fit its tag."""
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > 400:  # numbers of base 60 take quadratic time
            raise YamlBoundsError(f"a number of {len(node.value):,} characters, line {node.start_mark.line + 1}")
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, YamlBoundsError):
            raise
        except Exception as error:  # boundary: pyyaml raises anything for a text that does not fit its tag
            what = short(node.value) if isinstance(node, yaml.ScalarNode) else "the value"
            raise yaml.constructor.ConstructorError(
                None, None, f"{what} is no {kind}: {error}", node.start_mark
            ) from None


def _unique_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            problem = "a key is a list or a mapping; put quotes around a text that begins with [ or {"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return {str(loader.construct_object(key)): loader.construct_object(value, deep=True) for key, value in node.value}


class _Loader(_Bounded):
    """A loader of hand-written recipes: duplicate keys are errors, and 1e-5 is a number."""


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse hand-written YAML. Raises YamlBoundsError, or ValueError if it is not YAML."""
    return _parse(text, _Loader)


def parse_saved(text: str) -> Any:
    """Parse the output of yaml.safe_dump, in which the text "1e-5" stays text. Raises errors like `parse_yaml`."""
    return _parse(text, _Bounded)


def _parse(text: str, kind: type[_Bounded]) -> Any:
    try:
        loader = kind(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: character U+{error.character:04X} is not allowed") from None
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        problem = " ".join((error.problem or error.context or "").split())
        if error.problem and error.context and error.context_mark:
            problem = f"{error.context} ({_position(error.context_mark)}): {problem}"
        mark = error.problem_mark or error.context_mark
        # without the name of the stream, which pyyaml does not know
        raise ValueError(f"{_position(mark)}: {problem}" if mark else problem) from None
    except YamlBoundsError:
        raise
    except Exception as error:  # boundary: pyyaml's scanner raises anything for an escape or version out of range
        raise ValueError(f"{_position(loader.get_mark())}: {error}") from None
    finally:
        loader.dispose()


def _position(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
