"""`Budget`: how many calls of an engine that costs money a run may make, over all its processes."""

import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from agentfactory.tools.calls.run_notices import tell
from agentfactory.tools.messages import ToolInfrastructureError
from agentfactory.worlds.search.database import Database

logger = logging.getLogger(__name__)

_TABLES = "CREATE TABLE IF NOT EXISTS spending (name TEXT PRIMARY KEY, calls INTEGER, cost REAL)"


class BudgetUsedUp(ToolInfrastructureError):
    """No further call may be made. The model did not cause this, so its chain is not scored."""


@dataclass(frozen=True)
class Spending:
    """What was spent: `calls`, and `cost` in dollars."""

    calls: int
    cost: float


class Budget:
    """Counts the calls of an engine in a folder, for all processes that use it and for runs that are resumed.

    Args:
        folder: Where it is counted: `spending.sqlite`. Removing the file begins anew.
        name: The engine.
        calls: The most calls; None: any number.
        cost: The most dollars; None: any sum.
        price: Dollars for one call.
    """

    def __init__(
        self, folder: Path, name: str, calls: int | None = None, cost: float | None = None, price: float = 0.0
    ) -> None:
        self._database = Database(folder / "spending.sqlite", _TABLES)
        self._name, self._calls, self._cost, self._price = name, calls, cost, price

    def spend(self) -> None:
        """Count a call that is about to be made. Raises BudgetUsedUp if it must not be made."""
        with self._database.transaction() as connection:
            spent = self._read(connection)
            calls, cost = spent.calls + 1, spent.cost + self._price
            if reached := self._reached(calls, cost):
                told = f"{self._name}: the budget of {reached} is used up ({self._database.path})"
                tell(logger, f"budget of {self._name}", f"{told}; fix: raise the search's budget")
                raise BudgetUsedUp(told)
            connection.execute("INSERT OR REPLACE INTO spending VALUES (?, ?, ?)", (self._name, calls, cost))

    def spent(self) -> Spending:
        """Return what was spent so far."""
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
        # prices are added up as floats: 3 x 0.1 has to fit into 0.3
        if self._cost is not None and cost > self._cost * (1 + 1e-9):
            return f"{self._cost:g} dollars"
        return ""
