"""The tool-call format: turns that could not be read, over the run."""

from collections.abc import Iterator

from agentfactory.audit.check import Check, Parts
from agentfactory.audit.finding import Evidence, Finding
from agentfactory.audit.record import MALFORMED, Record, Seen

PARTS = 4
RISE, MOST = 0.15, 0.5
"""Rise of the share of unreadable turns from the first quarter to the last; share of them, beyond which there is a
warning."""
ENOUGH_TURNS = 200


class FormatCheck(Check):
    """The share of turns that the tool-call format cannot read must not rise."""

    topic = "format"
    needs = (MALFORMED,)

    def __init__(self, record: Record, parts: Parts) -> None:
        super().__init__(record, parts)
        self._turns: list[tuple[int, int]] = []
        self._last: Evidence | None = None

    async def note(self, seen: Seen) -> None:
        """See Check."""
        if seen.held_out:
            return
        turns = sum(chain.turns for chain in seen.group.trajectories)
        malformed = sum(len(chain.malformed_turns) for chain in seen.group.trajectories)
        self._turns.append((turns, malformed))
        for chain in seen.group.trajectories:
            if chain.malformed_turns:
                text = f"turn {chain.malformed_turns[0] + 1}: {chain.errors[0] if chain.errors else ''}"
                self._last = Evidence(text[:200], seen.group.id, chain.id, file=seen.file)

    def findings(self) -> Iterator[Finding]:
        """See Check."""
        size = len(self._turns) // PARTS
        shares = []
        for part in (self._turns[:size], self._turns[-size:]) if size else ():
            turns, malformed = (sum(column) for column in zip(*part, strict=True))
            if turns < ENOUGH_TURNS:
                return
            shares.append(malformed / turns)
        if not shares:
            return
        places = [self._last] if self._last is not None else []
        if shares[1] - shares[0] > RISE:
            text = f"unreadable turns rose from {shares[0]:.0%} of the first quarter to {shares[1]:.0%} of the last"
            yield self.warning(text, "set train.advantage.malformed_turns, or lower the learning rate", places)
        elif min(shares) > MOST:
            text = f"most turns cannot be read: {shares[0]:.0%} in the first quarter, {shares[1]:.0%} in the last"
            yield self.warning(text, "set another rollout.parser, or begin with an sft stage", places)

    @property
    def looked_at(self) -> str:
        """See Check."""
        return f"{sum(turns for turns, _ in self._turns):,} turns" if self._turns else ""
