"""`GameWorld`: the base of environments whose game runs in a process of its own."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.user_code.extras import check_extra
from agentfactory.tools.environments.environment import Environment
from agentfactory.worlds.game_processes.game_process import GameProcess
from agentfactory.worlds.game_processes.refused import Refused


class GameWorld(Environment):
    """A game in a process of its own, which is kept for the next chain.

    Subclasses clear their state in `release`, begin by `_begin`, and set `_anchor` after each move.
    """

    package: ClassVar[str]
    place: ClassVar[str]
    _anchor: str | None

    def __init__(self) -> None:
        check_extra(self.package)
        self._process = GameProcess(self.place, self.package)
        self.release()

    @classmethod
    def check_machine(cls) -> None:
        check_extra(cls.package)

    @classmethod
    @contextmanager
    def checks(cls, section: str, field: str, value: str) -> Iterator[GameProcess]:
        """Yield a process to check settings of `section`; a failure is a SettingError about `value` of `field`."""
        check_extra(cls.package)
        with closing(GameProcess(cls.place, cls.package)) as process:
            try:
                yield process
            except Refused as refused:
                name, problem, fix = refused.args
                raise SettingError(f"{section}.{name}", problem, fix) from None
            except ToolInfrastructureError as error:
                problem = f"got {value!r}: {error}"
                raise SettingError(f"{section}.{field}", problem, "correct it, or its options") from error

    def _begin(self, *arguments: Any) -> Any:
        self.release()
        try:
            begun = self._process.call("reset", *arguments)
        except Refused as refused:
            raise SettingError(*refused.args) from None
        self._anchor = begun["anchor"]
        return begun

    def anchor(self) -> str | None:
        """Return a digest of the game's state; None once it is over."""
        return self._anchor

    def release(self) -> None:
        self._anchor = None

    def close(self) -> None:
        self._process.close()
