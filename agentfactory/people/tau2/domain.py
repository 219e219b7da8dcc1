"""`Tau2`: an environment that is a domain of tau2-bench, and its reward."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec, text_of
from agentfactory.rollout.rewards import reward
from agentfactory.rollout.trajectory import StopReason, Trajectory
from agentfactory.worlds.game_processes.game_world import GameWorld

Domain = Literal["mock", "airline", "retail", "telecom"]


class Tau2(GameWorld):
    """A domain of tau2-bench: its database, its tools, and the state that a task must end in.

    A data row has `tau2`; `data.tau2` makes such rows.
    """

    package = "tau2"
    place = "agentfactory.people.tau2.play:Play"

    def __init__(self, domain: Domain, user_tools: bool = False) -> None:
        """Offer the agent's tools of a domain.

        Args:
            domain: mock, airline, retail or telecom, as in `data.tau2`.
            user_tools: True: also the tools of the user's side, which `rollout.user.options.tools` must then take
                from the agent. Only telecom has any.
        """
        super().__init__()
        self.domain = domain

    @classmethod
    def further_tools(cls, domain: Domain, user_tools: bool = False) -> Sequence[ToolSpec]:
        """Return the domain's tools, with tau2's schemas."""
        found = _schemas(domain)
        schemas = [*found["agent"], *(found["user"] if user_tools else [])]
        return [ToolSpec(each["name"], each["description"], each["parameters"]) for each in schemas]

    @classmethod
    def check_data_row(cls, row: dict[str, Any], has_rewards: bool) -> None:
        if row["tau2"]["communicate"] and not has_rewards:
            raise ValueError("the agent must communicate something, which only the messages show: set rewards: [tau2]")

    def reset(self, tau2: dict[str, Any], **task: Any) -> None:
        """Begin a task. Raises SettingError (it is another domain's), ToolInfrastructureError (tau2 failed)."""
        if tau2["domain"] != self.domain:
            problem = f"got {self.domain!r}, and a row is of {tau2['domain']}"
            raise SettingError("options.domain", problem, "name the domain of data.tau2")
        self._begin(tau2["domain"], tau2["folder"], tau2["task"])

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; return the text that tau2's agent or user reads, also of an error."""
        found: str = self._process.call("call", name, arguments)
        return found

    def reward(self) -> dict[str, float]:
        """Return the `reward` (1 or 0) for all but what the agent must communicate, its parts that the task has (`db`,
        `env_assertion`, `action`), and the number of failed calls (`errors`)."""
        found: dict[str, float] = self._process.call("reward")
        return found

    def release(self) -> None:
        """End the process, which has imported the domain with the task's folder."""
        super().release()
        self._process.end()


@cache
def _schemas(domain: Domain) -> dict[str, list[dict[str, Any]]]:
    with Tau2.checks("options", "domain", domain) as process:
        found: dict[str, list[dict[str, Any]]] = process.call("tools", domain)
    return found


@reward
def conversation(trajectory: Trajectory, environment: Any, tau2: dict[str, Any]) -> dict[str, float]:
    """Return tau2's reward of a conversation: that of the environment if the user ended it, and an assistant message
    contains each text that the agent must communicate."""
    said = [text_of(message["content"]) for message in trajectory.messages if message["role"] == "assistant"]
    texts = [text.lower().replace(",", "") for text in said]
    told = float(all(any(needed.lower() in text for text in texts) for needed in tau2["communicate"]))
    ended = float(trajectory.stop_reason == StopReason.USER_DONE)
    value = environment.reward * told * ended
    found = {"reward": value, "success": value, "ended_by_user": ended}
    return found | ({"communicate": told} if tau2["communicate"] else {})
