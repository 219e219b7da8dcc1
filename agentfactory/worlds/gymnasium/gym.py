"""`Gym`: an environment that plays one of gymnasium's."""

from typing import Any

from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.errors import SettingError
from agentfactory.tools.tool import finish, tool
from agentfactory.tools.user_code.extras import check_extra
from agentfactory.worlds.game_processes.game_process import GameProcess
from agentfactory.worlds.game_processes.refused import Refused

EPISODE = "agentfactory.worlds.gymnasium.episode:Episode"


class Gym(Environment):
    """An episode of a gymnasium environment: the reward is its return, the sum of its rewards.

    A data row has `gym` (the settings of its source) and `seed`; `data.gym` makes such rows.
    """

    def __init__(self) -> None:
        check_extra("gymnasium")
        self._process = GameProcess(EPISODE, "gym")
        self._ended = False
        self._threshold: float | None = None
        self._anchor: str | None = None
        self._clear()

    @classmethod
    def check_machine(cls) -> None:
        """Raise SettingError if a package is missing."""
        check_extra("gymnasium")

    def reset(self, gym: dict[str, Any], seed: int, **task: Any) -> Any:
        """Begin an episode. Return the actions, and the first observation.

        Raises:
            SettingError: a setting is invalid.
            ToolInfrastructureError: the environment failed, or took too long.
        """
        self._clear()
        try:
            begun = self._process.call("reset", gym, seed)
        except Refused as refused:
            raise SettingError(*refused.args) from None
        self._threshold = gym["success_return"]
        self._anchor = begun["anchor"]
        return _parts(begun, begun["actions"])

    @tool
    def act(self, action: int | float | str | list[int | float]) -> Any:
        """Take an action. Returns what you observe then.

        Args:
            action: One of the actions that the first message names: the number or name of one, a text, or a list of
                numbers.
        """
        if self._ended:
            raise ValueError("the episode has ended")
        try:
            step = self._process.call("act", action)
        except Refused as refused:
            raise ValueError(*refused.args) from None
        self._steps += 1
        self._return += step["reward"]
        self._ended = step["terminated"] or step["truncated"]
        self._anchor = None if self._ended else step["anchor"]
        info = {name: step[name] for name in ("reward", "terminated", "truncated")}
        if not self._ended:
            return {"observation": _parts(step), **info}
        why = "The episode has ended" if step["terminated"] else "The limit of steps has ended the episode"
        return finish({"observation": _parts(step, f"{why}. Return: {self._return:g}."), **info})

    def reward(self) -> dict[str, float]:
        """Return `reward` (the return so far), `steps`, `ended` (1.0 if the environment ended the episode), and with a
        threshold `success` (1.0 if it has ended with at least this return)."""
        found = {"reward": self._return, "steps": float(self._steps), "ended": float(self._ended)}
        if self._threshold is not None:
            found["success"] = float(self._ended and self._return >= self._threshold)
        return found

    def anchor(self) -> str | None:
        """Return a digest of the last observation; None once the episode has ended."""
        return self._anchor

    def release(self) -> None:
        """Forget the episode. The process is kept for the next one."""
        self._clear()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _clear(self) -> None:
        self._return, self._steps, self._ended = 0.0, 0, False
        self._threshold = None
        self._anchor = None


def _parts(shown: dict[str, Any], text: str = "") -> Any:
    """Return an observation for the model, with a text before it."""
    if "image" not in shown:
        return "\n".join(filter(None, (text, shown["text"])))
    from PIL import Image

    height, width, pixels = shown["image"]
    picture = Image.frombytes("RGB", (width, height), pixels)
    return [text, picture] if text else picture
