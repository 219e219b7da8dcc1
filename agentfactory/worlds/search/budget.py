"""`Budget`: a limit on a run's calls to a paid engine, shared by all its processes."""

import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.run_notices import notify
from agentfactory.worlds.search.database import Database

logger = logging.getLogger(__name__)

_TABLES = "CREATE TABLE IF NOT EXISTS spending (name TEXT PRIMARY KEY, calls INTEGER, cost REAL)"


class BudgetUsedUp(ToolInfrastructureError):
    """The budget allows no further call. The model did not cause this, so its chain is not scored."""


@dataclass(frozen=True)
class Spending:
    """The amounts spent: `calls`, and `cost` in dollars."""

    calls: int
    cost: float


class Budget:
    """A persistent count of calls to an engine, shared by all processes and kept across resumed runs.

    Args:
        folder: Folder of the counter file, `spending.sqlite`. Remove the file to reset the count.
        name: Name of the engine.
        calls: Maximum number of calls; None: no limit.
        cost: Maximum cost in dollars; None: no limit.
        price: Dollars per call.
    """

    def __init__(
        self, folder: Path, name: str, calls: int | None = None, cost: float | None = None, price: float = 0.0
    ) -> None:
        self._database = Database(folder / "spending.sqlite", _TABLES)
        self._name, self._calls, self._cost, self._price = name, calls, cost, price

    def spend(self) -> None:
        """Count a call before it is made. Raises BudgetUsedUp if it would exceed the budget."""
        with self._database.transaction() as connection:
            spent = self._read(connection)
            calls, cost = spent.calls + 1, spent.cost + self._price
            if reached := self._reached(calls, cost):
                told = f"{self._name}: the budget of {reached} is used up ({self._database.path})"
                notify(logger, f"budget of {self._name}", f"{told}; fix: raise the search's budget")
                raise BudgetUsedUp(told)
            connection.execute("INSERT OR REPLACE INTO spending VALUES (?, ?, ?)", (self._name, calls, cost))

    def spent(self) -> Spending:
        """Return the calls and the cost so far."""
        with self._database.reading() as connection:
            return self._read(connection)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _read(self, connection: sqlite3.Connection) -> Spending:
        row = connection.execute("SELECT calls, cost FROM spending WHERE name = ?", (self._name,)).fetchone()
        return Spending(*row) if row else Spending(0, 0.0)

    def _reached(self, calls: int, cost: float) -> str:
        if self._calls is not None and calls > self._calls:
            return f"{self._calls:,} calls"
        # costs are summed as floats: 3 x 0.1 must not exceed 0.3
        if self._cost is not None and cost > self._cost * (1 + 1e-9):
            return f"{self._cost:g} dollars"
        return ""
