"""The error of a setting that cannot work."""

from typing import Any


class SettingError(ValueError):
    """A field of a recipe, or an option of a command, that cannot work.

    Attributes:
        field: The dotted field, such as train.learning_rate, or the option; "" where it is told by the problem.
        problem: What is wrong with its value.
        fix: What to do; "" where nothing is known.
        source: The file or command line that set it; "" where whoever raised it does not know.
    """

    def __init__(self, field: str, problem: str, fix: str = "", source: str = "") -> None:
        self.field, self.problem, self.fix, self.source = field, problem, fix, source
        super().__init__(self.told + (f"; fix: {fix}" if fix else ""))

    @property
    def told(self) -> str:
        """All of it but the fix."""
        return ": ".join(part for part in (self.source, self.field, self.problem) if part)

    def at(self, field: str | None = None, source: str | None = None) -> "SettingError":
        """The same of another field, or set by another source."""
        field = self.field if field is None else field
        return SettingError(field, self.problem, self.fix, self.source if source is None else source)


def short(value: Any) -> str:
    """`value` for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
