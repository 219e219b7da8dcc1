"""The quickstart's environment: find a treasure on a grid by following compass hints."""

from typing import Any, Literal

from agentfactory import Environment, tool

SIZE = 7
STEPS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
"""Direction -> change of (row, column); row 1 is the northern edge, column 1 the western edge."""

Cell = tuple[int, int]


def distance(here: Cell, there: Cell) -> int:
    """Return the number of moves between two cells."""
    return abs(here[0] - there[0]) + abs(here[1] - there[1])


def compass(here: Cell, there: Cell) -> str:
    """Return the direction of `there` from `here`: one of eight, such as `north-east`."""
    rows, columns = there[0] - here[0], there[1] - here[1]
    return "-".join(
        ["north"] * (rows < 0) + ["south"] * (rows > 0) + ["east"] * (columns > 0) + ["west"] * (columns < 0)
    )


def move_limit(start: Cell, treasure: Cell) -> int:
    """Return the number of moves that a hunt allows: enough for one wrong step and the step back."""
    return distance(start, treasure) + 2


def opening(start: Cell, treasure: Cell) -> str:
    """Return the first message of a hunt."""
    return (
        f"The treasure lies {compass(start, treasure)}.\n"
        f"You stand in row {start[0]}, column {start[1]} and have {move_limit(start, treasure)} moves."
    )


class TreasureHunt(Environment):
    """One hunt. Reward: 0.5 x progress (covered share of the initial distance, at least 0) + 0.5 x success."""

    def reset(self, start: list[int], treasure: list[int], **task: Any) -> None:
        """Begin at cell `start` ([row, column]) with the treasure at cell `treasure`; the task's question is the
        opening message."""
        self.start = self.here = (start[0], start[1])
        self.treasure = (treasure[0], treasure[1])
        self.moves_left = move_limit(self.start, self.treasure)

    @tool
    def move(self, direction: Literal["north", "east", "south", "west"]) -> str:
        """Take one step."""
        if self.moves_left == 0:
            return "You have no moves left."
        self.moves_left -= 1
        rows, columns = STEPS[direction]
        # the grid ends in walls: a step against a wall uses a move without changing the cell
        self.here = (min(max(self.here[0] + rows, 1), SIZE), min(max(self.here[1] + columns, 1), SIZE))
        if self.here == self.treasure:
            return "You found the treasure."
        if self.moves_left == 0:
            return "You have no moves left."
        return f"The treasure lies {compass(self.here, self.treasure)}."

    def anchor(self) -> Cell | None:
        """Return the agent's cell, so that `gigpo` compares moves from the same cell; None once the hunt is over."""
        return None if self.here == self.treasure or self.moves_left == 0 else self.here

    def reward(self) -> dict[str, float]:
        """Return `reward` and `success`: whether the treasure was found."""
        success = float(self.here == self.treasure)
        progress = max(0.0, 1 - distance(self.here, self.treasure) / distance(self.start, self.treasure))
        return {"reward": 0.5 * progress + 0.5 * success, "success": success}
