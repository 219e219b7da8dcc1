"""The error for settings that cannot work."""

from typing import Any


class SettingError(ValueError):
    """A field of a recipe, or an option of a command, that cannot work.

    Attributes:
        field: The dotted field, such as train.learning_rate, or the option; "" if the problem names it.
        problem: What is wrong with its value.
        fix: What to do; "" if unknown.
        source: The file or command line that set it; "" if unknown where it is raised.
    """

    def __init__(self, field: str, problem: str, fix: str = "", source: str = "") -> None:
        self.field, self.problem, self.fix, self.source = field, problem, fix, source
        super().__init__(self.told + (f"; fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # exceptions are pickled as their message alone
        return SettingError, (self.field, self.problem, self.fix, self.source)

    @property
    def told(self) -> str:
        """The whole message except the fix."""
        return ": ".join(part for part in (self.source, self.field, self.problem) if part)

    def at(self, field: str | None = None, source: str | None = None) -> "SettingError":
        """Return a copy for another field or source."""
        field = self.field if field is None else field
        return SettingError(field, self.problem, self.fix, self.source if source is None else source)


def short(value: Any) -> str:
    """Format `value` for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
