"""Objects of the engine that a test makes are closed at its end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Open = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Open]:
    """Make objects that are closed when the test ends."""
    made: list[Any] = []

    def make_one(kind: Open, *arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make_one
    for one in reversed(made):
        one.close()
