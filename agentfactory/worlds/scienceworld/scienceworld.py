"""`ScienceWorld`: an environment with text-based science experiments at elementary-school level."""

from collections.abc import Sequence
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.scienceworld.jvm import Jvms, Play, Step, check_engine
from agentfactory.worlds.scienceworld.published_tasks import EASY, check_variation, instruction, named, resolved, rows
from agentfactory.worlds.shared import Shared

_LONGEST_ACTION = 1000
"""Maximum characters of an action; the engine's parser takes seconds for a text of several pages."""
_LISTED_ACTIONS = 100
"""Maximum actions that a filtered `valid_actions` lists."""
_WITH_TWO_OBJECTS = {
    "connect": (" to ", "connect OBJ to OBJ"),
    "dunk": (" into ", "dunk OBJ into OBJ"),
    "move": (" to ", "move OBJ to OBJ"),
    "pour": (" into ", "pour OBJ into OBJ"),
    "use": (" on ", "use OBJ on OBJ"),
}
"""Verb -> (word between two objects, summary line for all such actions): a room can have thousands."""

_pools: Shared[Jvms] = Shared()


class ScienceWorld(Environment):
    """ScienceWorld (Wang et al., 2022): the reward is the score at the end, divided by 100.

    A data row has `task` (name or number), `variation` (an integer) and optionally `simplifications`, which overrides
    the option. `scienceworld_tasks` makes such rows. All instances of a process share its Java processes.

    Args:
        simplifications: `easy`, or comma-separated names: teleportAction, openDoors, openContainers,
            selfWateringFlowerPots, noElectricalAction; "" for none.
        max_moves: the chain ends with the move that exceeds this limit.
        show_actions: whether each observation ends with the valid actions; those with two objects are summarized.
        heap_mb: heap size of a Java process in MiB; the process needs about 150 MiB in addition.
        games_per_jvm: chains that share a Java process, which serves one at a time.

    Raises:
        SettingError: an option is out of range, or Java or the engine is missing.
    """

    def __init__(
        self,
        simplifications: str = EASY,
        max_moves: int = 100,
        show_actions: bool = False,
        heap_mb: int = 384,
        games_per_jvm: int = 8,
    ) -> None:
        check_engine()
        resolved(simplifications)
        for name, count, least in (
            ("max_moves", max_moves, 1),
            ("heap_mb", heap_mb, 128),
            ("games_per_jvm", games_per_jvm, 1),
        ):
            if type(count) is not int or count < least:
                raise SettingError(name, f"got {short(count)}", f"give a whole number from {least}")
        self._simplifications = simplifications
        self._max_moves = max_moves
        self._show_actions = show_actions
        self._key = (heap_mb, games_per_jvm)
        self._jvms = _pools.acquire(self._key, lambda: Jvms(heap_mb, games_per_jvm))
        self._play: Play | None = None
        self._last = Step("", 0, False, 0)
        self._seen = ""

    @classmethod
    def check_machine(cls) -> None:
        check_engine()

    def reset(self, task: str, variation: int, simplifications: str | None = None, **row: Any) -> str:
        """Begin a variation of a task; return the task description and the first observation. Raises SettingError (an
        argument is invalid), ToolInfrastructureError (no Java process could be started)."""
        self.release()
        name = named(task)
        chosen = resolved(self._simplifications if simplifications is None else simplifications, name)
        self._play = self._jvms.play(name, check_variation(name, variation), chosen)
        game = self._play.game
        self._seen = game.look()
        return f"{game.description()}\n\n{self._shown(self._seen)}"

    @tool
    def act(self, action: str) -> Any:
        """Take an action in the environment. Returns what you observe then.

        Args:
            action: The action, such as look around, open door to kitchen or pick up thermometer.
        """
        game = self._here().game
        before = self._last
        # Java's texts have no lone surrogates
        text = action[:_LONGEST_ACTION].encode("utf-8", "replace").decode()
        last = self._last = game.step(text)
        self._seen = last.observation
        info = {"score": last.score, "moves": last.moves, "reward": (last.score - before.score) / 100}
        if last.completed or last.moves > self._max_moves:
            return finish({"observation": last.observation, **info})
        return {"observation": self._shown(last.observation), **info}

    @tool
    def valid_actions(self, about: str = "") -> str:
        """List actions that would do something here. This takes no time in the environment.

        Args:
            about: Words that the actions have to contain, such as the name of an object; empty for all, with those of
                two objects in brief.
        """
        valid, words = self._here().game.valid_actions(), about.lower().split()
        if not words:
            return "\n".join(in_brief(valid))
        found = [one for one in valid if all(word in one.lower() for word in words)]
        if not found:
            return f"No valid action contains {about}."
        rest = len(found) - _LISTED_ACTIONS
        more = [f"({rest} more; give more words)"] if rest > 0 else []
        return "\n".join([*found[:_LISTED_ACTIONS], *more])

    def reward(self) -> dict[str, float]:
        """Return `reward` (the final score divided by 100, or -1 if the task has failed), `score` (0 to 100; 0 if
        failed), `success` (1.0 if the score is 100), `failed` and `moves`."""
        self._here()
        last = self._last
        return {
            "reward": last.score / 100,
            "success": float(last.score == 100),
            "score": float(max(0, last.score)),
            "failed": float(last.score < 0),
            "moves": float(last.moves),
        }

    def anchor(self) -> tuple[str, int] | None:
        """Return the last observation and the score, because the engine takes milliseconds to export its full state.
        None once the task is done or has failed."""
        last = self._last
        return None if last.completed else (self._seen, last.score)

    def release(self) -> None:
        play, self._play = self._play, None
        self._last = Step("", 0, False, 0)
        if play is not None:
            play.end()

    def gauges(self) -> dict[str, float]:
        """Return the numbers of Java processes and of their games, and of processes lost and replaced."""
        return self._jvms.gauges()

    def close(self) -> None:
        self.release()
        if (jvms := _pools.release(self._key)) is not None:
            jvms.close()

    def _here(self) -> Play:
        if self._play is None:
            raise ToolInfrastructureError("reset() begins a game")
        return self._play

    def _shown(self, observation: str) -> str:
        if not self._show_actions:
            return observation
        return f"{observation}\nValid actions: {', '.join(in_brief(self._here().game.valid_actions()))}"


def in_brief(actions: Sequence[str]) -> list[str]:
    """Summarize the two-object actions of each verb in one line; keep the order."""
    found = ((action, *_WITH_TWO_OBJECTS.get(action.split(" ")[0], ("", ""))) for action in actions)
    return list(dict.fromkeys(brief if brief and between in action else action for action, between, brief in found))


def scienceworld_tasks(
    split: str, tasks: Sequence[str] | None = None, per_task: int | None = None, simplifications: str = EASY
) -> list[dict[str, Any]]:
    """Return the data rows of an official split: `question` (the published instruction), `task`, `variation` and
    `simplifications`.

    Args:
        split: `train`, `dev` or `test`.
        tasks: names or numbers of tasks; null: all 30.
        per_task: number of first variations per task in the split; null: all. Published results often use ten.

    Raises SettingError if an argument is invalid, or if Java or the engine is missing.
    """
    check_engine()
    return rows(split, instruction(simplifications), tasks, per_task, simplifications)
