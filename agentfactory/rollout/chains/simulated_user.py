"""`rollout.user`: who speaks between the agent's turns."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from agentfactory.base.messages import Message
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.config import UserConfig
from agentfactory.rollout.data import Task
from agentfactory.tools.sessions.tool_session import ToolSession

SPEAKER = "speaker"
"""Key of a message that a simulated user wrote."""


class UserError(Exception):
    """A fault of a simulated user: it raised, was too slow, or said nothing. The chain ends as user_error."""


class User(Protocol):
    """The user of one chain."""

    async def speak(self, said: str | None) -> tuple[list[Message], bool]:
        """Return the user's messages, at most one, after the agent's words (None: the chain begins), and whether the
        conversation is over. Raise UserError."""

    async def aclose(self) -> None:
        """End the user's part."""


class Users(Protocol):
    """The users of all chains of a recipe."""

    def takes(self, field: str) -> bool: ...

    def check_rows(self, tasks: Sequence[Task], section: str) -> None:
        """Raise SettingError if the user cannot play a row of `section`."""

    def begin(self, episode: Episode, runner: Any, session: ToolSession) -> User:
        """Begin the part of a chain of `runner`, a Runner."""


BeginUser = Callable[[ToolSession], User]


def open_users(config: UserConfig | None, base: Path) -> Any:
    """Open the Users of `rollout.user`, or None, as a context manager. Raise SettingError if they cannot be used."""
    return nullcontext() if config is None else load_named("agentfactory.people.users.scripts:Scripts")(config, base)
