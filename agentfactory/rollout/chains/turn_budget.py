"""The number of tokens that a turn may still sample."""

from dataclasses import dataclass

from agentfactory.rollout.inference.http_transport import ContextOverflowError


@dataclass(frozen=True)
class TurnBudget:
    """Token limits: `turn` for the sampled tokens of a turn, `row` for the whole sequence, prompt included."""

    turn: int
    row: int

    def left(self, length: int, sampled: int = 0) -> int:
        """Return how many tokens a turn with `sampled` tokens may still sample after a sequence of `length` tokens.
        Raise ContextOverflowError if none."""
        if (left := min(self.turn - sampled, self.row - length)) < 1:
            raise ContextOverflowError(f"no token is left after {length}; the row limit is {self.row}")
        return left
