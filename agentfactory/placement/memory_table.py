"""The memory of a placement: needs of trainer and server, sums per device and phase, and a table."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentfactory.placement.server_memory import ServerMemory
from agentfactory.recipe.schema import Recipe

GIB = 2**30

STAYS_ON_GPU = ("workspace", "context")
"""Rows of a server or trainer that stay on its GPU while it sleeps or is offloaded, because they belong to the
process."""

OFFLOADED = ("weights", "adapter", "reference", "teacher", "critic", "optimizer")
"""Rows of a trainer that are moved elsewhere while it is offloaded; the others are empty between updates."""

_LAST_ROWS = ("workspace", "KV cache", "transfer", "context")


@dataclass(frozen=True)
class Need:
    """The memory that a recipe's processes need, in bytes."""

    trainer: Mapping[str, int]
    """Bytes by row of one trainer process; empty if none is planned."""
    server: ServerMemory | None
    """Memory on each of the server's devices; None if no server is planned."""
    notes: tuple[str, ...] = ()
    """Notes on the sources of the values, and on omissions."""


@dataclass(frozen=True)
class Sum:
    """The terms that are in one memory at the same time, in bytes, and the room in that memory."""

    where: str
    terms: Mapping[str, int]
    room: int | None
    """None for the memory of another machine."""

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """True if there is room for all terms."""
        return self.short <= 0

    @property
    def short(self) -> float:
        """Missing bytes; if negative, the bytes left."""
        return -math.inf if self.room is None else self.total - self.room

    def __str__(self) -> str:
        terms = " + ".join(f"{name} {gib(size)}" for name, size in self.terms.items())
        return f"{terms} = {gib(self.total)}{self.of} {self.where}"

    @property
    def of(self) -> str:
        """The room as text."""
        return " GiB" if self.room is None else f" of {gib(self.room)} GiB"


@dataclass(frozen=True)
class Plan:
    """The devices of a recipe's processes, and the memory that they take there."""

    mode: str
    devices: str
    """The devices as text."""
    need: Need
    cache: int
    """Bytes of the server's KV cache on each of its devices."""
    sums: tuple[Sum, ...]
    """Sums with the whole cache."""
    least: tuple[Sum, ...]
    """Sums with the smallest cache that the server can work with."""
    utilization: float | None = None
    """gpu_memory_utilization for vLLM, if the recipe leaves it to the plan."""
    trainer_gpus: tuple[int, ...] = ()
    """Indices of visible GPUs; empty: all."""
    server_gpus: tuple[int, ...] = ()
    sync: str | None = None
    """The sync backend in place of auto; None: that of a machine without GPUs."""
    transfer: int = 0
    """Bytes that the server takes on each of its devices while weights arrive."""

    @property
    def title(self) -> str:
        """Mode and devices."""
        alone = self.need.server is None or not self.need.trainer
        return self.devices if alone else f"{self.mode}: {self.devices}"

    @property
    def fits(self) -> bool:
        """True if the sums of `least` fit."""
        return all(part.fits for part in self.least)

    @property
    def worst(self) -> Sum:
        """The sum of `least` that exceeds its room most, or is closest to it."""
        return max(self.least, key=lambda part: part.short)


@dataclass
class _Column:
    name: str
    rows: dict[str, int] = field(default_factory=dict)


def gib(size: float) -> str:
    """Format bytes as GiB; small values with as many digits as they need."""
    value = size / GIB
    return f"{value:.2f}" if value >= 0.095 or value == 0 else f"{value:.2g}"


def rows(plan: Plan) -> dict[str, dict[str, int]]:
    """Return bytes by process and row, including the server's cache."""
    columns = {}
    if plan.need.trainer:
        columns["trainer"] = dict(plan.need.trainer)
    if plan.need.server is not None:
        arriving = {"transfer": plan.transfer} if plan.transfer else {}
        columns["server"] = {**plan.need.server.parts, "KV cache": plan.cache, **arriving}
    return columns


def table(plan: Plan, recipe: Recipe) -> str:
    """Format the plan as text: a row per use of memory, a column per process, the sums below."""
    columns = rows(plan)
    names = _ordered(name for column in columns.values() for name in column)
    labels = {name: _label(name, recipe) for name in names} | {"total": "total"}
    width = max(map(len, labels.values()))
    lines = [
        f"memory by estimate, {plan.title}",
        "  ".join([f"{'GiB':{width}}", *(f"{name:>8}" for name in columns)]),
    ]
    for name in names:
        cells = [f"{gib(column[name]) if name in column else '':>8}" for column in columns.values()]
        note = _cache_note(plan, recipe) if name == "KV cache" else ""
        lines.append("  ".join([f"{labels[name]:{width}}", *cells]).rstrip() + note)
    totals = [f"{gib(sum(column.values())):>8}" for column in columns.values()]
    lines.append("  ".join([f"{'total':{width}}", *totals]))
    return "\n".join([*lines, *map(str, plan.sums), *plan.need.notes])


def _ordered(names: Iterable[str]) -> list[str]:
    """Return each name once, in order of appearance, with names that both processes have at the end."""
    seen = [*dict.fromkeys(names)]
    return [name for name in seen if name not in _LAST_ROWS] + [name for name in _LAST_ROWS if name in seen]


def _label(name: str, recipe: Recipe) -> str:
    return f"{name} ({recipe.train.token_budget:,} tokens)" if name == "activations" else name


def _cache_note(plan: Plan, recipe: Recipe) -> str:
    server, length = plan.need.server, recipe.rollout.max_total_tokens
    assert server is not None
    chain = length * server.cache_per_token + server.cache_per_sequence
    if not chain:
        return ""
    return f"  ({plan.cache * length // chain:,} tokens: {plan.cache / chain:.1f} chains of {length:,})"
