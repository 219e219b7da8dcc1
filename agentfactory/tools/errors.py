"""The error for invalid settings."""

from typing import Any


class SettingError(ValueError):
    """An invalid field of a recipe or option of a command.

    Attributes:
        field: The dotted field, such as train.learning_rate, or the option; "" if the problem names it.
        problem: The fault of its value.
        fix: The remedy; "" if unknown.
        source: The file or command line that set it; "" if the raising code does not know it.
    """

    def __init__(self, field: str, problem: str, fix: str = "", source: str = "") -> None:
        self.field, self.problem, self.fix, self.source = field, problem, fix, source
        super().__init__(self.without_fix + (f"; fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # by default, only the message of an exception is pickled
        return SettingError, (self.field, self.problem, self.fix, self.source)

    @property
    def without_fix(self) -> str:
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
