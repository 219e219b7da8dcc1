"""`Episode`: gymnasium's side of a chain, in a process of its own (`game_processes`)."""

import difflib
import inspect
import json
import os
import random
import re
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentfactory.worlds.game_processes.refused import Refused
from agentfactory.worlds.gymnasium.spaces import UnsupportedSpace, action_reader, check_describable, described

_LONGEST_TEXT = 4000
_MARKUP = (
    (re.compile(r"```.*?```", re.DOTALL), ""),  # citations
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[<a href[^\]]*</a>\]|<a href[^>]*>|</a>|</?su[bp]>"), ""),
    (re.compile(r"\[([^\]]+)\]\(https?:[^)]*\)"), r"\1"),
    (re.compile(r"\n{3,}"), "\n\n"),
)
_ITEM = re.compile(r"^(?:-\s*(\d+):\s*(.+?)|\|\s*(\d+)\s*\|\s*([^|]+?)\s*\|.*)\s*$", re.MULTILINE)
"""A line of a list (`- 0: Move left`) or of a table (`| 0 | Cart Position | ...`)."""


def sections_of(environment: type) -> dict[str, str]:
    """Return heading -> text of a class's docstring, or its nearest base's outside of gymnasium; "": the beginning."""
    common = ("gymnasium.core", "typing", "builtins")
    own = [kind for kind in environment.__mro__ if kind.__module__ not in common]
    text = inspect.cleandoc(next(filter(None, (kind.__doc__ for kind in own)), ""))
    found: dict[str, str] = {}
    parts = re.split(r"^[ ]*##\s+(.+?)\s*$", text, flags=re.MULTILINE)
    for heading, body in zip(["", *parts[1::2]], parts[::2], strict=True):
        lines = [line.strip() for line in body.strip().splitlines()]
        found[heading] = "\n".join(lines)
    return found


def question_of(sections: dict[str, str], observations: bool) -> str:
    """Return the task in the environment's own words, if wished with its `observations`; empty if it has none."""
    shown = ("Description", *(["Observation Space"] if observations else []), "Rewards", "Episode End")
    texts = [sections.get(heading, "") for heading in shown]
    if not texts[0]:
        texts[0] = sections[""]
    for pattern, replacement in _MARKUP:
        texts = [pattern.sub(replacement, text).strip() for text in texts]
    return "\n\n".join(filter(None, texts))[:_LONGEST_TEXT]


def names_in(section: str, numbers: Sequence[int]) -> list[str]:
    """Return the names that a section gives to `numbers`; empty unless it has exactly one for each."""
    found = [(int(a or c), re.sub(r"[`*]", "", b or d)) for a, b, c, d in _ITEM.findall(section)]
    return [name for _, name in found] if [number for number, _ in found] == [*numbers] else []


_STYLED = re.compile(r"((?:\x1b\[[\d;]+m)+)(.*?)(?:\x1b\[0m)+", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_MODES = ("ansi", "rgb_array")


class Episode:
    """The environments of one process: one at a time, kept while its settings stay the same."""

    def __init__(self) -> None:
        # such as that a version is not the newest: for programmers, and from every process
        warnings.simplefilter("ignore")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws in memory
        self._made: str | None = None
        self._environment: Any = None
        self._read: Callable[[Any], Any] = lambda given: given
        self._names: list[str] = []

    def check(self, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        """Begin an episode. Return `question` (the environment's text), `threshold` (the return from which it counts as
        solved, or None) and `limit` (of steps, or None). Raises Refused with the field, the problem and the fix."""
        try:
            self.reset(settings, seed)
        except gymnasium.error.DependencyNotInstalled as error:  # of drawing
            raise Refused("id", f"{settings['id']} needs a package: {error}", "install it") from error
        spec = self._environment.spec
        in_words = self._mode is None and not self._names
        return {
            "question": question_of(sections_of(type(self._environment.unwrapped)), in_words),
            "threshold": spec.reward_threshold,
            "limit": spec.max_episode_steps,
        }

    def reset(self, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        options = {**settings["options"]}
        if settings["random_map"] is not None:
            options["desc"] = _random_map(settings, seed)
        wanted = json.dumps({**settings, "options": options}, sort_keys=True, default=str)
        if wanted != self._made:
            self._make(settings, options)
            self._made = wanted
        observation, _ = self._environment.reset(seed=seed)
        return {"actions": self._actions, **self._shown(observation)}

    def act(self, action: Any) -> dict[str, Any]:
        """Take an action. Raises Refused with a text for the model if it is not one."""
        try:
            read = self._read(action)
        except ValueError as error:
            raise Refused(str(error)) from None
        observation, reward, terminated, truncated, _ = self._environment.step(read)
        ended = {"reward": float(reward), "terminated": bool(terminated), "truncated": bool(truncated)}
        return {**ended, **self._shown(observation)}

    def _make(self, settings: dict[str, Any], options: dict[str, Any]) -> None:
        if self._environment is not None:
            self._environment.close()
        self._made = self._environment = None
        spec = _spec(settings["id"])
        self._mode = settings["render_mode"] or ("ansi" if "ansi" in _render_modes(spec) else None)
        limit: dict[str, Any] = {} if settings["max_steps"] is None else {"max_episode_steps": settings["max_steps"]}
        mode: dict[str, Any] = {} if self._mode is None else {"render_mode": self._mode}
        try:
            self._environment = gymnasium.make(settings["id"], disable_env_checker=True, **limit, **mode, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            raise Refused("id", f"{settings['id']} needs a package: {error}", "install it") from error
        except Exception as error:  # boundary: the constructor of any package
            given = settings["options"]
            problem = f"{settings['id']} cannot be made with {given}: {type(error).__name__}: {error}"
            raise Refused("options" if given else "id", problem, "correct it") from error
        bare = self._environment.unwrapped
        offered = [name for name in bare.metadata.get("render_modes", ()) if name in _MODES]
        if self._mode is not None and self._mode not in offered:
            problem = f"got {self._mode!r}; {settings['id']} offers {' and '.join(offered) or 'neither of ours'}"
            raise Refused("render_mode", problem, f"set {' or '.join([*offered, 'null'])}")
        self._describe(settings, sections_of(type(bare)))

    def _describe(self, settings: dict[str, Any], sections: dict[str, str]) -> None:
        action_space, observation_space = (self._environment.action_space, self._environment.observation_space)
        names = settings["actions"]
        if names and len(names) != (count := _numbers(action_space)):
            problem = f"got {len(names)} names, and the action space {action_space} has {count}"
            raise Refused("actions", problem, "give a name for each, in order")
        try:
            known = names or _action_names(self._environment.unwrapped, action_space, sections)
            self._actions, self._read = action_reader(action_space, known)
            if self._mode is None:
                check_describable(observation_space)
        except UnsupportedSpace as error:
            fix = "use an environment with discrete, text, multi-discrete or small box spaces"
            if self._mode is None and "rgb_array" in self._environment.metadata.get("render_modes", ()):
                fix += ", or set render_mode: rgb_array if only its observations are too large"
            raise Refused("id", f"{settings['id']}: {error}", fix) from error
        self._names = names_in(sections.get("Observation Space", ""), range(_numbers(observation_space)))

    def _shown(self, observation: Any) -> dict[str, Any]:
        """Return `text` or `image` (height, width, RGB) for the model, and `anchor`."""
        anchor = blake2b(_bytes(observation), digest_size=16).hexdigest()
        if self._mode is None:
            return {"text": described(observation, self._names), "anchor": anchor}
        frame = self._environment.render()
        if self._mode == "ansi":
            return {"text": _without_colours(str(frame)).strip("\n"), "anchor": anchor}
        pixels = np.ascontiguousarray(frame, dtype=np.uint8)
        return {"image": (*pixels.shape[:2], pixels[..., :3].tobytes()), "anchor": anchor}


def _spec(name: str) -> Any:
    try:
        return gymnasium.spec(name) if ":" not in name else _imported(name)
    except gymnasium.error.Error as error:
        known = [*gymnasium.registry]
        near = difflib.get_close_matches(name, known, 3, cutoff=0.8)
        fix = f"did you mean {' or '.join(near)}?" if near else "write MODULE:ID for one that MODULE registers"
        raise Refused("id", f"got {name!r}: {error}", fix) from error


def _imported(name: str) -> Any:
    """Return the specification of `MODULE:ID`, after importing the module, which registers it."""
    module, _, own = name.partition(":")
    try:
        __import__(module)
    except ImportError as error:
        raise Refused("id", f"got {name!r}: {error}", f"install the package of {module}") from error
    return _spec(own)


def _render_modes(spec: Any) -> list[str]:
    entry = spec.entry_point
    made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return list((getattr(made, "metadata", None) or {}).get("render_modes", ()))


def _random_map(settings: dict[str, Any], seed: int) -> list[str]:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

    entry = _spec(settings["id"]).entry_point
    made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    if made is not FrozenLakeEnv:
        problem = f"got {settings['random_map']} with {settings['id']}; only FrozenLake has maps"
        raise Refused("random_map", problem, "set it to null")
    return generate_random_map(**settings["random_map"], seed=seed)


def _numbers(space: Any) -> int:
    match space:
        case spaces.Discrete():
            return int(space.n)
        case spaces.Tuple():
            return len(space.spaces)
    return int(np.prod(space.shape)) if space.shape else 0


def _action_names(bare: Any, space: Any, sections: dict[str, str]) -> list[str]:
    """Return the names of a Discrete space's actions, or of another one's numbers; empty if none are known."""
    count = _numbers(space)
    if isinstance(space, spaces.Discrete):
        if callable(meanings := getattr(bare, "get_action_meanings", None)):  # of the Atari games
            return [str(name).lower() for name in meanings()]
        if isinstance(kinds := getattr(bare, "actions", None), type) and issubclass(kinds, Enum):  # of MiniGrid
            members = {member.value: name for name, member in kinds.__members__.items()}
            if all(number in members for number in range(count)):
                return [members[number] for number in range(count)]
        numbers = range(int(space.start), int(space.start) + count)
    else:
        numbers = range(count)
    return names_in(sections.get("Action Space", ""), numbers)


def _without_colours(text: str) -> str:
    """Write a terminal's colours as text: [S] for a highlighted S, <blue>R</blue> for a blue R."""

    def plain(match: re.Match[str]) -> str:
        codes = [int(code) for code in re.findall(r"\d+", match[1])]
        colour = next((_COLOURS[code % 10] for code in codes if code // 10 in (3, 9) and code % 10 < 8), None)
        text = f"<{colour}>{match[2]}</{colour}>" if colour else match[2]
        return f"[{text}]" if any(code // 10 in (4, 10) for code in codes) else text

    return _STYLED.sub(plain, text)


def _bytes(observation: Any) -> bytes:
    match observation:
        case np.ndarray():
            return observation.tobytes()
        case dict():
            return b";".join(_bytes(key) + _bytes(value) for key, value in observation.items())
        case tuple() | list():
            return b",".join(map(_bytes, observation))
    return repr(observation).encode("utf-8", "replace")
