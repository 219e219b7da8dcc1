"""Choice of the devices of trainer and server from their needs and the devices' memory."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from agentfactory.base.errors import SettingError
from agentfactory.placement.machine import MARGIN, Gpu, Machine
from agentfactory.placement.server_memory import ServerMemory
from agentfactory.placement.trainer_memory import local_processes
from agentfactory.recipe.schema import Recipe
from agentfactory.trainers.sync.backends import backend_of

GIB = 2**30

STAYS_ON_GPU = ("graphs", "context")
"""Rows of a server or trainer that stay on its GPU while it sleeps or is offloaded."""

OFFLOADED = ("weights", "adapter", "reference", "teacher", "critic", "optimizer")
"""Rows of a trainer that are moved elsewhere while it is offloaded; the others are empty between updates."""

_LAST_ROWS = ("workspace", "graphs", "KV cache", "transfer", "context")


@dataclass(frozen=True)
class Need:
    """The memory that a recipe's processes need, in bytes."""

    trainer: Mapping[str, int]
    """Bytes by row of one trainer process; empty if none is planned."""
    server: ServerMemory | None
    """Memory on each of the server's devices; None if no server is planned."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sum:
    """The terms that are in one memory at the same time, in bytes, and the room in that memory."""

    where: str
    terms: Mapping[str, int]
    room: int | None
    """None for the memory of another machine."""

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def short(self) -> float:
        """Missing bytes; if negative, the bytes left."""
        return -math.inf if self.room is None else self.total - self.room

    def __str__(self) -> str:
        terms = " + ".join(f"{name} {gib(size)}" for name, size in self.terms.items())
        return f"{terms} = {gib(self.total)}{self.of} {self.where}"

    @property
    def of(self) -> str:
        return " GiB" if self.room is None else f" of {gib(self.room)} GiB"


@dataclass(frozen=True)
class Plan:
    """The devices of a recipe's processes, and the memory that they take there."""

    mode: str
    devices: str
    need: Need
    cache: int
    """Bytes of the server's KV cache on each of its devices."""
    sums: tuple[Sum, ...]
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
        alone = self.need.server is None or not self.need.trainer
        return self.devices if alone else f"{self.mode}: {self.devices}"

    @property
    def fits(self) -> bool:
        return all(part.short <= 0 for part in self.least)

    @property
    def worst(self) -> Sum:
        """The sum of `least` that exceeds its room most, or is closest to it."""
        return max(self.least, key=lambda part: part.short)


def gib(size: float) -> str:
    """Format bytes as GiB; small values with as many digits as they need."""
    value = size / GIB
    return f"{value:.2f}" if value >= 0.095 or value == 0 else f"{value:.2g}"


def rows(plan: Plan) -> dict[str, dict[str, int]]:
    """Return bytes by process and row, including the server's cache."""
    columns = {"trainer": dict(plan.need.trainer)} if plan.need.trainer else {}
    if plan.need.server is not None:
        arriving = {"transfer": plan.transfer} if plan.transfer else {}
        columns["server"] = {**plan.need.server.parts, "KV cache": plan.cache, **arriving}
    return columns


def table(plan: Plan, recipe: Recipe) -> str:
    """Format the plan as text: a row per use of memory, a column per process, the sums below."""
    columns = rows(plan)
    # each name once, those that both processes have at the end
    seen = [*dict.fromkeys(name for column in columns.values() for name in column)]
    names = [name for name in seen if name not in _LAST_ROWS] + [name for name in _LAST_ROWS if name in seen]
    labels = {name: name for name in (*names, "total")}
    if "activations" in labels:
        labels["activations"] += f" ({recipe.train.token_budget:,} tokens)"
    width = max(map(len, labels.values()))
    lines = [f"memory by estimate, {plan.title}", "  ".join([f"{'GiB':{width}}", *(f"{name:>8}" for name in columns)])]
    for name in names:
        cells = [f"{gib(column[name]) if name in column else '':>8}" for column in columns.values()]
        note = _cache_note(plan, recipe) if name == "KV cache" else ""
        lines.append("  ".join([f"{labels[name]:{width}}", *cells]).rstrip() + note)
    totals = [f"{gib(sum(column.values())):>8}" for column in columns.values()]
    total = "  ".join([f"{'total':{width}}", *totals])
    return "\n".join([*lines, total, *map(str, plan.sums), *plan.need.notes])


def _cache_note(plan: Plan, recipe: Recipe) -> str:
    server, size = plan.need.server, recipe.rollout.max_total_tokens
    assert server is not None
    chain = size * server.cache_per_token + server.cache_per_sequence
    return f"  ({plan.cache * size // chain:,} tokens: {plan.cache / chain:.1f} chains of {size:,})" if chain else ""


VLLM_SHARE = 0.92
"""Share of a GPU that vLLM 0.32 and 0.33 take if gpu_memory_utilization is not set."""

Device = Literal["cuda", "cpu"]
Estimate = Callable[[Recipe, Device, int | None], Need]
"""(recipe, kind of device, bytes of a GPU or None) -> the memory that it needs."""


@dataclass(frozen=True)
class _Room:
    """A device, in bytes: its total, the part available for planning, and the total that vLLM's share refers to."""

    total: int
    free: int
    shared: int

    @property
    def margin(self) -> int:
        return int(MARGIN * self.total)


def device_of(recipe: Recipe, machine: Machine) -> Device:
    return "cuda" if machine.gpus or recipe.placement.gpu_memory_gib else "cpu"


def choose(recipe: Recipe, machine: Machine, estimate: Estimate) -> list[Plan]:
    """Return the plans that were tried; only the last may fit. Raises SettingError if there are too few devices."""
    device, asked = device_of(recipe, machine), recipe.placement.gpu_memory_gib
    memory = max((gpu.total for gpu in machine.gpus), default=int(asked * GIB) if asked else None)
    need = estimate(recipe, device, memory)
    tried: list[Plan] = []
    for mode in _modes(recipe, machine, need):
        lay_out = _on_cpu if device == "cpu" else _separate if mode == "separate" else _on_one_gpu
        tried.append(lay_out(recipe, machine, need, mode))
        if tried[-1].fits:
            break
    return tried


def _processes(recipe: Recipe, machine: Machine) -> int:
    """Return the trainer's processes on this machine."""
    train, gpus = recipe.train, len(machine.gpus)
    return -(-train.processes // machine.peers) if machine.peers > 1 else local_processes(train, gpus)


def _modes(recipe: Recipe, machine: Machine, need: Need) -> list[str]:
    mode, server = recipe.placement.mode, recipe.server
    for_trainer = _processes(recipe, machine) if need.trainer else 0
    for_server = server.devices if need.server else 0
    here, both = len(machine.gpus), bool(for_trainer and for_server)
    if device_of(recipe, machine) == "cpu":
        return ["separate" if mode == "auto" or not both else mode]
    if not both:
        needed = for_trainer or for_server
        if here and needed > here:
            field = "train.processes" if for_trainer else "server.options.tensor_parallel_size"
            fix = "use fewer, or several machines (docs/multi-node.md)"
            raise SettingError(field, f"needs {needed} GPUs, but there are {here} here", fix)
        return ["separate"]
    if mode in ("split", "time_share"):
        return [mode]
    if server.engine == "sglang" and here == 1:
        problem = "got 'sglang', which does not share a GPU with the trainer here, and there is one"
        fix = "use vllm, or another machine's server (server.options.attach)"
        raise SettingError("server.engine", problem, fix)
    alone, backend = for_trainer == for_server == 1, backend_of(recipe)
    enough = here >= for_trainer + for_server if here else not alone
    if enough or (mode == "separate" and not here):
        if backend.devices == "one":
            problem = f"got {backend.name!r}, but trainer and server have separate GPUs"
            raise SettingError("sync.backend", problem, "use auto, or set placement.mode=split or time_share")
        return ["separate"]
    if mode == "separate" or not alone:
        problem = f"the trainer needs {for_trainer} and the server {for_server} separate GPUs"
        fix = "use fewer processes (train.processes), another machine, or a server elsewhere (server.url)"
        fix = "set auto, split or time_share" if alone else fix
        raise SettingError("placement.mode", f"{problem}, but there are {here} here", fix)
    if backend.devices == "apart":
        problem = f"got {backend.name!r}, which needs separate GPUs, but there is one"
        raise SettingError("sync.backend", problem, "use auto, ipc or file")
    return ["split", "time_share"] if recipe.rollout.max_staleness == 0 else ["split"]


def _room(recipe: Recipe, *gpus: Gpu) -> _Room:
    """Return the least room of these GPUs; without any, that of the GPU that the recipe plans for."""
    asked = recipe.placement.gpu_memory_gib
    if not gpus:
        assert asked is not None
        return _Room(*(int(asked * GIB),) * 3)
    total = min(gpu.total for gpu in gpus)
    planned = min(total, int(asked * GIB)) if asked else total
    return _Room(planned, min(planned, *(gpu.free for gpu in gpus)), total)


def _on_cpu(recipe: Recipe, machine: Machine, need: Need, mode: str) -> Plan:
    """Plan for one memory; offloaded and sleeping parts stay in it, except a sleeping server's cache."""
    processes = _processes(recipe, machine)
    trainer = processes * sum(need.trainer.values())
    offloaded = processes * sum(size for name, size in need.trainer.items() if name in (*OFFLOADED, "context"))
    parts = _parts(need.server)
    share = recipe.server.vllm.gpu_memory_utilization
    cache = need.server.least_cache if need.server else 0
    if need.server and recipe.server.engine == "vllm":
        # rollout/inference/vllm/vllm_server.py sets this cache on a CPU
        cache = GIB if share is None else max(0, int(share * machine.ram) - parts)
    terms = {"trainer": trainer} if need.trainer else {}
    terms |= {"server": parts + cache} if need.server else {}
    by_phase = {"together": terms}
    if mode == "time_share":
        by_phase = {"while training": {"trainer": trainer, "sleeping server": parts}}
        by_phase["while acting"] = {"server": parts + cache, "offloaded trainer": offloaded}
    free, margin = machine.ram_free, {"margin": int(MARGIN * machine.ram)}
    sums = tuple(Sum(phase, {**terms, **margin}, free) for phase, terms in by_phase.items())
    devices = f"this machine's {machine.ram / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free"
    return Plan(mode, devices, need, cache, sums, sums)


def _separate(recipe: Recipe, machine: Machine, need: Need, mode: str) -> Plan:
    """Give the first GPUs to the trainer, and the last to the server."""
    server, count = recipe.server, len(machine.gpus)
    for_server = server.devices if need.server else 0
    own = range(_processes(recipe, machine) if need.trainer else 0)
    others = range(count - for_server, count) if need.trainer else range(for_server)
    sums: list[Sum] = []
    devices: list[str] = []
    if need.trainer:
        room = _room(recipe, *(machine.gpus[gpu] for gpu in own if machine.gpus))
        if recipe.placement.mode == "time_share":
            # the server already runs, and will sleep
            room = replace(room, free=room.total)
        terms = {"trainer": sum(need.trainer.values()), "margin": room.margin}
        sums.append(Sum("on each GPU of the trainer", terms, room.free))
        devices.append(f"{_gpus(len(own), room)} for the trainer")
    least, cache, utilization = [*sums], 0, None
    both = bool(machine.gpus and need.trainer and need.server)
    by_nccl = both and recipe.model.lora is None and server.engine == "vllm" and machine.has_vllm
    sync = "nccl" if by_nccl and recipe.sync.backend == "auto" else None
    transfer = need.server.by_nccl if need.server and (sync or backend_of(recipe).name) == "nccl" else 0
    if need.server:
        room = _room(recipe, *(machine.gpus[gpu] for gpu in others if machine.gpus))
        usable, margin, context = 0, room.margin, need.server.parts.get("context", 0)
        if server.engine == "vllm":
            usable = min(int(VLLM_SHARE * room.total) + context, room.free - room.margin - transfer)
            if server.vllm.gpu_memory_utilization is not None:
                usable = int(server.vllm.gpu_memory_utilization * room.shared) + context
            margin = max(0, room.free - usable - transfer)
        cache, utilization = _fill(recipe, need.server, usable, room, bool(machine.gpus))
        # None: vLLM's own
        utilization = None if usable == int(VLLM_SHARE * room.shared) + context else utilization
        where = "on each GPU of the server"
        for made, size in ((sums, cache), (least, _least_cache(recipe, need.server, cache))):
            made.append(Sum(where, {"server": _parts(need.server) + size + transfer, "margin": margin}, room.free))
        devices.append(f"{_gpus(for_server, room)} for the server")
    gpus = (tuple(own), tuple(others)) if both else ((), ())
    return Plan(mode, ", ".join(devices), need, cache, tuple(sums), tuple(least), utilization, *gpus, sync, transfer)


def _gpus(count: int, room: _Room) -> str:
    return f"{count} GPUs of {room.total / GIB:.1f} GiB" if count > 1 else f"a GPU of {room.total / GIB:.1f} GiB"


def _on_one_gpu(recipe: Recipe, machine: Machine, need: Need, mode: str) -> Plan:
    server = need.server
    assert server is not None
    place = max(range(len(machine.gpus)), key=lambda index: machine.gpus[index].free, default=None)
    room = _room(recipe, *(() if place is None else (machine.gpus[place],)))
    trainer, parts = sum(need.trainer.values()), _parts(server)
    left = sum(need.trainer.get(name, 0) for name in STAYS_ON_GPU)
    # bytes for the server beside a trainer, or beside the part of an offloaded trainer that stays on the GPU
    usable = room.free - room.margin - (trainer if mode == "split" else left)
    if recipe.server.vllm.gpu_memory_utilization is not None:
        usable = int(recipe.server.vllm.gpu_memory_utilization * room.shared) + server.parts.get("context", 0)
    cache, utilization = _fill(recipe, server, usable, room, bool(machine.gpus))
    least = _least_cache(recipe, server, cache)

    def sums(cache: int) -> tuple[Sum, ...]:
        if mode == "split":
            return (Sum("together", {"trainer": trainer, "server": parts + cache, "margin": room.margin}, room.free),)
        sleeping = sum(server.parts.get(name, 0) for name in STAYS_ON_GPU)
        offloaded = sum(size for name, size in need.trainer.items() if name in OFFLOADED)
        aside = {"offloaded trainer": offloaded, "sleeping server": server.backup}
        return (
            Sum("while training", {"trainer": trainer, "sleeping server": sleeping, "margin": room.margin}, room.free),
            Sum("while acting", {"server": parts + cache, "offloaded trainer": left, "margin": room.margin}, room.free),
            # the GPU may be in another machine
            Sum("in the machine's memory", aside, machine.ram_free if machine.gpus else None),
        )

    devices = _gpus(1, room) + ("" if room.free == room.total else f", {room.free / GIB:.1f} GiB of it free")
    gpus = () if place is None else (place,)
    sync = "ipc" if recipe.model.lora is None and recipe.sync.backend == "auto" else None
    return Plan(mode, devices, need, cache, sums(cache), sums(least), utilization, gpus, gpus, sync)


def _parts(server: ServerMemory | None) -> int:
    return sum(server.parts.values()) if server else 0


def _least_cache(recipe: Recipe, server: ServerMemory, cache: int) -> int:
    # vLLM takes its configured share, whether needed or not
    return cache if recipe.server.vllm.gpu_memory_utilization is not None else server.least_cache


def _fill(recipe: Recipe, server: ServerMemory, usable: int, room: _Room, is_real: bool) -> tuple[int, float | None]:
    """Return the cache of a server that may use `usable` bytes, and the utilization to set for vLLM."""
    if recipe.server.engine != "vllm":
        return server.least_cache, None
    share, context = recipe.server.vllm.gpu_memory_utilization, server.parts.get("context", 0)
    least = _parts(server) + server.least_cache
    if share is not None and usable < least:
        problem = f"got {share:g}, which is {gib(usable - context)} GiB, but with the smallest cache the server needs "
        fix = "raise it, or remove it: placement sets what fits"
        raise SettingError("server.options.gpu_memory_utilization", f"{problem}{gib(least - context)} GiB", fix)
    cache = max(usable - _parts(server), server.least_cache)
    # round down: vLLM refuses to start if a byte is missing. If it exceeds the free memory, try less
    told = min(_parts(server) + cache, room.free) - context
    return cache, int(told / room.shared * 1e4) / 1e4 if is_real and share is None else None
