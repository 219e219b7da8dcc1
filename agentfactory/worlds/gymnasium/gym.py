"""`Gym`: an environment that plays one of gymnasium's."""

from typing import Any

from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.game_processes.game_world import GameWorld
from agentfactory.worlds.game_processes.refused import Refused


class Gym(GameWorld):
    """An episode of a gymnasium environment: the reward is its return, the sum of its rewards.

    A data row has `gym` (the settings of its source) and `seed`; `data.gym` makes such rows.
    """

    package = "gymnasium"
    place = "agentfactory.worlds.gymnasium.episode:Episode"
    _ended: bool
    _threshold: float | None

    def reset(self, gym: dict[str, Any], seed: int, **task: Any) -> Any:
        """Begin an episode. Return the actions, and the first observation. Raises SettingError (a setting is invalid),
        ToolInfrastructureError (the environment failed, or took too long)."""
        begun = self._begin(gym, seed)
        self._threshold = gym["success_return"]
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

    def release(self) -> None:
        super().release()
        self._return, self._steps, self._ended = 0.0, 0, False


def _parts(shown: dict[str, Any], text: str = "") -> Any:
    if "image" not in shown:
        return "\n".join(filter(None, (text, shown["text"])))
    from PIL import Image

    height, width, pixels = shown["image"]
    picture = Image.frombytes("RGB", (width, height), pixels)
    return [text, picture] if text else picture
