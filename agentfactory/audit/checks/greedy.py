"""Greedy chains: equal prompts must have equal answers."""

from collections.abc import Iterator

import numpy as np

from agentfactory.audit.check import Check, Parts
from agentfactory.audit.finding import Evidence, Finding, Places
from agentfactory.audit.record import HELD_OUT, TOKENS, Record, Seen


class GreedyCheck(Check):
    """Greedy chains of one evaluation with the same prompt must begin with the same turn."""

    topic = "greedy chains"
    needs = (HELD_OUT, TOKENS)

    def __init__(self, record: Record, parts: Parts) -> None:
        super().__init__(record, parts)
        self._first: dict[tuple[str, bytes], tuple[bytes, str]] = {}
        self._differ = Places()
        self._chains = self._compared = 0

    async def note(self, seen: Seen) -> None:
        """See Check."""
        for chain in seen.group.trajectories if seen.held_out == "greedy" else ():
            if not chain.rows or not chain.turns:
                continue
            self._chains += 1
            row = chain.rows[0]
            start, end = row.turn_spans()[0]
            ids = np.asarray(row.token_ids, dtype=np.int64)
            prompt, turn = ids[:start].tobytes(), ids[start:end].tobytes()
            before = self._first.setdefault((seen.file, prompt), (turn, chain.id))
            self._compared += before[1] != chain.id
            if before[0] != turn:
                text = f"it answers the prompt of chain {before[1]} in another way"
                self._differ.add(Evidence(text, seen.group.id, chain.id, 0, start, seen.file))

    def findings(self) -> Iterator[Finding]:
        """See Check."""
        if places := self._differ:
            text = f"{places.total} of {self._compared} greedy turns differ from others with the same prompt"
            fix = "set temperature 0; in half precision, a server's batches also change which token is the likeliest"
            yield self.warning(text, fix, places.kept)

    @property
    def looked_at(self) -> str:
        """See Check."""
        return f"{self._chains:,} chains, {self._compared:,} with a prompt of another" if self._chains else ""
