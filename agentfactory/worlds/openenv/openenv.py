"""`OpenEnv`: an environment that acts on one of an OpenEnv server."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.user_code.extras import check_extra
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.openenv.server import RefusedAction, Server, ServerFault, Session
from agentfactory.worlds.openenv.words import digest, shown


@dataclass
class _Episode:
    session: Session
    settings: dict[str, Any]
    anchor: str | None = None
    steps: int = 0
    total: float = 0.0
    ended: bool = False
    order: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenEnv(Environment):
    """An episode of an OpenEnv server's environment: the reward is its return, the sum of the rewards of its steps.

    A data row has `openenv` (the settings of its source) and `seed`; `data.openenv` makes such rows.
    """

    def __init__(self) -> None:
        check_extra("openenv")
        self._episode: _Episode | None = None

    @classmethod
    def check_machine(cls) -> None:
        check_extra("openenv")

    async def reset(self, openenv: dict[str, Any], seed: int, **task: Any) -> Any:
        """Begin an episode in a session of its own; return the actions, and the first observation. Raises SettingError
        (the key's variable is not set), ToolInfrastructureError (no session, a refused reset, or the time limit)."""
        await self.release()
        server = Server(openenv["url"], openenv["api_key_env"])
        episode = self._episode = _Episode(await server.connect(openenv["seconds"]), openenv)
        try:
            begun = await episode.session.reset({"seed": seed, **openenv["reset"]})
        except RefusedAction as error:
            raise ToolInfrastructureError(f"{server} refused the reset with seed {seed}: {error}") from None
        episode.ended = begun.done
        episode.anchor = digest(begun.observation)
        return _with_text(openenv["actions"], shown(begun.observation, openenv["observation"]))

    @tool
    async def act(self, action: dict[str, Any]) -> Any:
        """Take an action. Returns what you observe then.

        Args:
            action: An object with the fields that the first message names.
        """
        assert self._episode is not None
        # a call that is given up does not undo its step: the next one waits for the answer
        step = asyncio.ensure_future(_step(self._episode, action))
        step.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(step)

    def reward(self) -> dict[str, float]:
        """Return `reward` (the sum of the rewards of the steps so far), `steps`, `ended` (1.0 if the environment ended
        the episode), and with a threshold `success` (1.0 if it has ended with at least this return)."""
        episode = self._episode
        assert episode is not None
        found = {"reward": episode.total, "steps": float(episode.steps), "ended": float(episode.ended)}
        if (threshold := episode.settings["success_return"]) is not None:
            found["success"] = float(episode.ended and episode.total >= threshold)
        return found

    def anchor(self) -> str | None:
        """Return a digest of the last observation; None once the episode has ended."""
        return None if self._episode is None or self._episode.ended else self._episode.anchor

    async def release(self) -> None:
        if self._episode is not None:
            session, self._episode = self._episode.session, None
            await session.close()

    async def close(self) -> None:
        await self.release()


async def _step(episode: _Episode, action: dict[str, Any]) -> Any:
    """Take an action; return what the tool does. Raises ValueError with a text for the model if it is refused."""
    async with episode.order:
        if episode.ended:
            raise ValueError("the episode has ended")
        calls = episode.settings["tools"]
        try:
            step = await episode.session.step({"type": "call_tool", **action} if calls else action)
        except RefusedAction as error:
            raise ValueError(str(error)) from None
        fault = _fault_of_call(step.observation) if calls else None
        if fault is not None and fault[0] == "transport_error":  # no model causes it
            told = f"{episode.session.name}: a tool could not be called: {fault[1]}"
            raise ServerFault(told, "look at the server's log")
        episode.steps += 1
        episode.total += step.reward or 0.0
        episode.ended = step.done
        episode.anchor = digest(step.observation)
        if fault is not None and not step.done:
            raise ValueError(fault[1])
        seen = shown(step.observation, episode.settings["observation"], calls)
        info = {"reward": step.reward, "done": step.done}
        if metadata := step.observation.get("metadata"):
            info["metadata"] = metadata
        if not step.done:
            return {"observation": seen, **info}
        if fault is not None:
            seen = _with_text(fault[1], seen)
        return finish({"observation": _with_text(f"The episode has ended. Return: {episode.total:g}.", seen), **info})


def _fault_of_call(observation: dict[str, Any]) -> tuple[str, str] | None:
    """Return the kind and message of the error in a tool's result; None if there is none."""
    match observation:
        case {"error": {"error_type": str(kind), "message": str(message)}}:
            return kind, message
        case {"result": {"is_error": True, **result}}:
            return "execution_error", str(shown({"result": result}, None, True))
    return None


def _with_text(text: str, seen: Any) -> Any:
    if isinstance(seen, str):
        return "\n\n".join(filter(None, (text, seen)))
    return [text, *(seen if isinstance(seen, list) else [seen])]
