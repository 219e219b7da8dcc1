"""`data.reasoning_gym`: tasks of reasoning-gym's data sets, as data rows."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from agentfactory.base.config import PositiveInt, Section
from agentfactory.base.errors import SettingError
from agentfactory.base.processes.killable import KillableProcess
from agentfactory.base.user_code.extras import check_extra
from agentfactory.rollout.config import TaskSource

PROCESS = "agentfactory.worlds.reasoning_gym.gym_process"
VARIABLES = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Environment of the process: a task must be the same in every process, but some depend on the order of sets."""
INSTRUCTION = "Give the final answer alone, between <answer> and </answer>."


class GymDataset(Section):
    """A data set of the mix."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the tasks, relative to the other weights."""
    level: int | None = Field(default=None, ge=0)
    """Level of the data set's curriculum, which sets its options. Null: the library's defaults."""
    options: dict[str, Any] = {}
    """Options of the data set. They take precedence over those of the level."""


class ReasoningGymTasks(TaskSource):
    """Tasks of reasoning-gym (docs/reasoning-gym.md): different questions, with `answer`, `metadata` and, as `source`,
    the name of the data set."""

    world = "reasoning_gym"

    datasets: Annotated[dict[str, GymDataset], Field(min_length=1)]
    """Names of data sets, or name -> {weight, level, options}."""
    size: PositiveInt = 500
    """Number of tasks."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tasks."""
    skip: int = Field(default=0, ge=0)
    """Number of tasks to leave out at the start. Held-out tasks: the training tasks' datasets and seed, and their size
    as skip."""
    instruction: str | None = INSTRUCTION
    """Text at the end of each question. The reward reads the last <answer>...</answer>. Null: none, for recipes whose
    system prompt asks for it."""

    @field_validator("datasets", mode="before")
    @classmethod
    def _names_alone(cls, datasets: Any) -> Any:
        if isinstance(datasets, str):
            datasets = [datasets]
        if isinstance(datasets, list) and all(isinstance(name, str) for name in datasets):
            if twice := [name for number, name in enumerate(datasets) if name in datasets[:number]]:
                raise SettingError("", f"it has {twice[0]!r} twice", f"give it a weight: {{{twice[0]}: {{weight: 2}}}}")
            datasets = dict.fromkeys(datasets)
        if isinstance(datasets, dict):
            return {name: {} if settings is None else settings for name, settings in datasets.items()}
        return datasets

    def rows(self) -> list[dict[str, Any]]:
        check_extra("reasoning-gym")
        skips, ends = self._shares(self.skip), self._shares(self.skip + self.size)
        specs = [
            {
                **each.model_dump(include={"level", "options"}),
                "name": name,
                "seed": self.seed,
                "skip": skips[name],
                "count": ends[name] - skips[name],
            }
            for name, each in self.datasets.items()
        ]
        tasks = iter(_generated(specs))
        counts = {spec["name"]: spec["count"] for spec in specs}
        placed = []
        for order, (name, count) in enumerate(counts.items()):
            for number in range(count):
                # evenly through the mix, so that any beginning of it has all data sets
                placed.append(((number + 0.5) / count, order, self._row(name, next(tasks))))
        return [row for _, _, row in sorted(placed, key=lambda each: each[:2])]

    def _shares(self, total: int) -> dict[str, int]:
        """Divide `total` tasks by the weights. A larger total gives no data set fewer."""
        weights, reached, before, shares = sum(each.weight for each in self.datasets.values()), 0.0, 0, {}
        for name, each in self.datasets.items():
            reached += each.weight
            until = round(total * reached / weights)
            shares[name], before = until - before, until
        return shares

    def _row(self, name: str, task: dict[str, Any]) -> dict[str, Any]:
        question = task["question"] if self.instruction is None else f"{task['question']}\n\n{self.instruction}"
        return {**task, "question": question, "source": name}


def _generated(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    process = KillableProcess("-m", PROCESS, variables=VARIABLES)
    try:
        process.send({"rows": specs})
        tasks: list[dict[str, Any]] = []
        while True:
            told = process.receive()
            if told is None:
                at = len(tasks)
                name = next(spec["name"] for spec in specs if (at := at - spec["count"]) < 0)
                raise SettingError(
                    f"reasoning_gym.datasets.{name}",
                    "a task took longer than 60 s to generate, or more than 4 GiB",
                    "choose easier options or a lower level",
                )
            if "field" in told:
                raise SettingError(f"reasoning_gym.datasets.{told['field']}", told["problem"], told["fix"])
            if "end" in told:
                return tasks
            tasks.append(told)
    finally:
        process.end()
