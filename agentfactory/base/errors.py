"""The error for invalid settings, and interruptions that look like errors."""

from collections.abc import Collection, Iterable
from typing import Any


class SettingError(ValueError):
    """An invalid `field` (dotted; "" if `problem` names it), with the `fix` and its `source`: a file or command."""

    def __init__(self, field: str, problem: str, fix: str = "", source: str = "") -> None:
        self.field, self.problem, self.fix, self.source = field, problem, fix, source
        super().__init__(self.without_fix + (f"; fix: {fix}" if fix else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # by default, only the message of an exception is pickled
        return SettingError, (self.field, self.problem, self.fix, self.source)

    @property
    def without_fix(self) -> str:
        return ": ".join(part for part in (self.source, self.field, self.problem) if part)

    def at(self, field: str | None = None, source: str | None = None) -> "SettingError":
        field = self.field if field is None else field
        return SettingError(field, self.problem, self.fix, self.source if source is None else source)


Fault = tuple[str, str, str]
"""The arguments of a SettingError: field, problem and fix."""


def refuse(faults: Iterable[Fault]) -> None:
    for fault in faults:
        raise SettingError(*fault)


class CommandFailed(Exception):
    """A command found a fault, which the message tells; `status` is the command's exit status."""

    status = 1


def some(names: Collection[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_interruption(error: BaseException | None) -> bool:
    """Return whether KeyboardInterrupt caused `error`; pydantic raises SchemaError instead, with its text."""
    while error is not None:
        of_pydantic = type(error).__name__ == "SchemaError" and "KeyboardInterrupt: " in str(error)
        if isinstance(error, KeyboardInterrupt) or of_pydantic:
            return True
        error = error.__cause__ or error.__context__
    return False
