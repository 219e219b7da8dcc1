"""Answers of judges and what they cost, in a database that several processes and a resumed run share."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentfactory.rollout.rewards.reward_spec import RewardError

MOST_ANSWERS = 100_000
"""Answers that are kept; the oldest go first."""
MOST_CHARACTERS = 16_384
"""Characters of an answer that is kept."""
_WAIT_SECONDS = 30.0
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY, key TEXT UNIQUE, nonce TEXT, answer TEXT);
CREATE TABLE IF NOT EXISTS spent (judge TEXT PRIMARY KEY, calls INTEGER, cost REAL);
"""


class BudgetError(RewardError):
    """A request that would exceed a judge's budget."""


def _unusable(path: Path | None, error: sqlite3.Error) -> RewardError:
    return RewardError(f"the judges' cache {path} cannot be used: {error}; name another file, or remove it")


class Store:
    """The answers and costs in the file `path`; without one, the costs of this process only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._base = sqlite3.connect(
                path or ":memory:", timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._base.executescript(_TABLES)
        except sqlite3.Error as error:
            raise _unusable(path, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._base.execute("BEGIN IMMEDIATE")
                with self._base:
                    yield self._base
            except sqlite3.Error as error:
                raise _unusable(self._path, error) from error

    def find(self, key: str) -> tuple[str, str] | None:
        """Return the nonce and the text of a kept answer, unless it is damaged."""
        texts = "typeof(nonce) = 'text' AND typeof(answer) = 'text' AND length(answer) <= ?"
        with self._transaction() as base:
            found = base.execute(f"SELECT nonce, answer FROM answers WHERE key = ? AND {texts}", (key, MOST_CHARACTERS))
            return next(found, None)

    def keep(self, key: str, nonce: str, answer: str) -> None:
        if self._path is None or len(answer) > MOST_CHARACTERS:
            return
        answer = answer.encode("utf-8", "replace").decode()
        with self._transaction() as base:
            base.execute("INSERT OR REPLACE INTO answers (key, nonce, answer) VALUES (?, ?, ?)", (key, nonce, answer))
            base.execute("DELETE FROM answers WHERE id <= (SELECT max(id) FROM answers) - ?", (MOST_ANSWERS,))

    def begin_call(self, judge: str, max_calls: int | None, max_cost: float | None) -> None:
        """Count a request of `judge`. Raise BudgetError if its budget is used up."""
        with self._transaction() as base:
            row = base.execute("SELECT calls, cost FROM spent WHERE judge = ?", (judge,)).fetchone()
            calls, cost = row or (0, 0.0)
            for name, limit, spent in (("max_calls", max_calls, calls), ("max_cost", max_cost, cost)):
                if limit is not None and spent >= limit:
                    used = f"{calls:,} calls, cost {cost:.4g}"
                    raise BudgetError(f"the judge's budget {name}={limit:g} is used up ({used}); raise it to go on")
            base.execute("INSERT OR REPLACE INTO spent VALUES (?, ?, ?)", (judge, calls + 1, cost))

    def pay(self, judge: str, cost: float) -> None:
        with self._transaction() as base:
            base.execute("UPDATE spent SET cost = cost + ? WHERE judge = ?", (cost, judge))

    def close(self) -> None:
        with self._lock:
            self._base.close()
