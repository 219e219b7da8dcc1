"""The description of a cluster's machines, of which each scheduler's file is written."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from agentfactory.base.config import PositiveInt, Section, leaves
from agentfactory.base.errors import Fault, SettingError
from agentfactory.recipe.checks import check_recipe, runs_chains
from agentfactory.recipe.composition import COMMAND_LINE, display, parse_overrides, read_mapping
from agentfactory.recipe.field_errors import setting_error
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of
from agentfactory.rollout.model_hub import is_hub_name
from agentfactory.trainers.sync.backends import backend_of

KEY = "AGENTFACTORY_SERVER_KEY"
"""The variable with the key that all inference servers of a run require."""
PREFIX = "cluster."
"""Overrides with this prefix are of the description, all others of the recipe."""


Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


class Images(Section):
    """Container images, built from the Dockerfiles that `agentfactory launch` writes."""

    trainer: str
    server: str


class Cluster(Section):
    """Machines of one kind: the first `trainers` train, and each of the others runs one inference server."""

    trainers: PositiveInt = 1
    servers: int = Field(default=1, ge=0)
    gpus: int = Field(default=8, ge=0)
    """GPUs per machine, with a trainer process on each; 0: one process per machine, on the CPU."""
    gpu: str | None = Field(default=None, pattern="^[A-Za-z0-9_.-]+$")
    """The scheduler's name of this kind of GPU, such as H100."""
    cpus: PositiveInt | None = None
    """Cores per machine; null: all of a machine under SLURM, elsewhere the scheduler's default."""
    memory_gib: PositiveInt | None = None
    """Memory per machine; null: as `cpus`."""
    hours: float = Field(default=24.0, gt=0)
    """Time limit of the job."""
    grace_seconds: int = Field(default=600, ge=30, le=65535)
    """Seconds from the scheduler's signal to its kill, in which a step ends and a checkpoint is written."""
    shared: Path | None = None
    """The folder that all machines see under this path, for the run, its model and its data. null: under SLURM the
    current folder, elsewhere none: then one machine trains, and weights go by sync.backend=nccl."""
    volume: str | None = None
    """The storage behind `shared`: a PersistentVolumeClaim (Kubernetes), or a bucket such as s3://NAME (SkyPilot)."""
    images: Images | None = None
    """Required by Kubernetes; SkyPilot uses `trainer` on all machines."""
    python: str | None = None
    """The Python on the machines that has AgentFactory; null: under SLURM the one that runs this command, elsewhere
    `python`."""
    secrets: list[Variable] = []
    """Environment variables with keys, such as WANDB_API_KEY: taken from yours, and written into no file."""
    env: dict[Variable, str] = {}
    """Other environment variables of all processes."""
    sandbox: bool = True
    """Kubernetes: let trainers' pods create user namespaces, which code_interpreter and shell need."""
    port: int = Field(default=29500, ge=1024, le=65534)
    """The launchers' port on the first machine; the next one is that of `agentfactory machine`."""
    server_port: int = Field(default=8000, ge=1024, le=65535)
    slurm: list[Annotated[str, Field(pattern="^-[^\\r\\n]+$")]] = []
    """Further options of sbatch, such as --partition=gpu."""
    kubernetes: dict[str, Any] = {}
    """Further fields of the pods' specification, such as nodeSelector."""
    skypilot: dict[str, Any] = {}
    """Further fields of the task's resources, such as infra."""

    def _faults(self) -> Iterator[Fault]:
        for name in self.env.keys() & {KEY, *self.secrets}:
            yield f"env.{name}", "is a key, which no file may contain", "remove it, and export it where you launch"
        for name in self.kubernetes.keys() & {"containers", "volumes", "nodeSelector" if self.gpu else ""}:
            yield f"kubernetes.{name}", "is set by the job", "remove it (or gpu, which sets nodeSelector)"
        if self.hours * 3600 <= self.grace_seconds:
            yield "hours", f"got {self.hours}, within grace_seconds={self.grace_seconds}", "allow more time"
        if self.shared is not None and str(self.shared) != os.path.abspath(self.shared):
            yield "shared", f"got {self.shared}", "write an absolute path, without `..`"
        if self.server_port in (self.port, self.port + 1):
            yield "server_port", f"got {self.server_port}, which the trainers use", "choose another"

    @property
    def machines(self) -> int:
        return self.trainers + self.servers

    @property
    def processes(self) -> int:
        return self.trainers * max(1, self.gpus)


@dataclass(frozen=True)
class Job:
    """A run on a cluster: the checked recipe, and the words with which each machine loads it again."""

    cluster: Cluster
    recipe: Recipe | StagedRecipe
    arguments: tuple[str, ...]
    """The recipe's file, seen from the job's folder, and overrides."""

    @property
    def name(self) -> str:
        """A DNS label that begins with a letter, as names of Services must."""
        kept = re.sub("[^a-z0-9]+", "-", self.recipe.name.lower()).strip("-")[:40].strip("-")
        return kept if kept[:1].isalpha() else f"run-{kept}".strip("-")

    @property
    def folder(self) -> Path:
        """The folder of the job's files and logs; that of the run belongs to its first machine."""
        return self.recipe.output.with_name(f"{self.recipe.output.name}-launch")

    @property
    def env(self) -> dict[str, str]:
        cpu = {"ACCELERATE_USE_CPU": "true"} if self.cluster.gpus == 0 else {}
        # by default, torchrun kills its processes half a minute after SIGTERM; a step and a checkpoint take longer
        return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.cluster.grace_seconds), **cpu, **self.cluster.env}

    @property
    def secrets(self) -> list[str]:
        return [*dict.fromkeys([KEY, *self.cluster.secrets])]

    def machine(self, *options: str) -> list[str]:
        """Return the command of a machine; `options` say which one it is."""
        cluster = self.cluster
        ports = ("--trainers", str(cluster.trainers), "--port", str(cluster.port))
        own = (*ports, "--server-port", str(cluster.server_port), *options)
        return [cluster.python or "python", "-m", "agentfactory", "machine", *self.arguments, *own]


class _Plain(yaml.SafeDumper):
    """Writes no anchors, lines as lines, and quotes around what parsers of YAML 1.2 take for numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else '"' if re.match(r"[-+.]?\d|[yYnN]$", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Plain.add_representer(str, _text)


def as_yaml(*documents: Any) -> str:
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=1000)


def read_job(scheduler: str, recipe: str, overrides: Sequence[str], described: Path | None) -> Job:
    """Read and check recipe and description. Raises SettingError."""
    own = [override.removeprefix(PREFIX) for override in overrides if override.startswith(PREFIX)]
    others = [override for override in overrides if not override.startswith(PREFIX)]
    cluster = _read(described, own)
    if scheduler == "slurm":
        here = {"shared": cluster.shared or Path.cwd(), "python": cluster.python or sys.executable}
        cluster = cluster.model_copy(update=here)
    loaded = load_recipe(recipe, others)
    if scheduler != "slurm" and cluster.shared is not None:
        is_own = loaded.output.is_relative_to(cluster.shared) or any(text.startswith("output=") for text in others)
        # in full, because the machines' current folder is another
        others.append(f"output={json.dumps(str(loaded.output if is_own else cluster.shared / loaded.name))}")
    for stage in stages_of(loaded):
        prefix = f"{stage.name}." if isinstance(loaded, StagedRecipe) else ""
        others += [f"{prefix}train.processes={cluster.processes}"]
        if (cluster.processes == 1) != (stage.train.strategy == "single"):
            strategy = "single" if cluster.processes == 1 else "fsdp2" if stage.model.lora is None else "ddp"
            others += [f"{prefix}train.strategy={strategy}"]
    loaded = load_recipe(recipe, others)
    check_recipe(loaded, "train", [])
    for fault in _faults(scheduler, cluster, loaded):
        raise SettingError(*fault, source=display(described) if described else COMMAND_LINE)
    file = Path(os.path.abspath(Path(recipe).expanduser()))
    if scheduler != "slurm" and not file.is_relative_to(Path.cwd()):
        fix = "run this command in a folder that contains it: the machines get this folder"
        raise SettingError("RECIPE", f"{recipe} is not below the current folder", fix, source=COMMAND_LINE)
    place = f"./{file.relative_to(Path.cwd())}" if file.is_relative_to(Path.cwd()) else str(file)
    return Job(cluster, loaded, (place, *others))


def _read(described: Path | None, overrides: Sequence[str]) -> Cluster:
    data = {} if described is None else read_mapping(described, "", "--cluster")
    for name, value in parse_overrides(overrides):
        section, (*parents, last) = data, name.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise SettingError(f"{PREFIX}{name}", f"{parent} is not a section", "set it whole", source=COMMAND_LINE)
        section[last] = value
    try:
        return Cluster.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as errors:
        error = setting_error(errors, data, Cluster)
        raise error.at(f"{PREFIX}{error.field}", display(described) if described else COMMAND_LINE) from None


def _faults(scheduler: str, cluster: Cluster, recipe: Recipe | StagedRecipe) -> Iterator[Fault]:
    stages = stages_of(recipe)
    acting = [stage for stage in stages if runs_chains(stage, "train")]
    if acting and cluster.servers == 0:
        yield "cluster.servers", f"got 0, but chains run in {acting[0].name}", "give it at least 1"
    if not acting and cluster.servers:
        yield "cluster.servers", f"got {cluster.servers}, but no chains run", "cluster.servers=0"
    for stage in acting:
        if stage.server.url is not None:
            yield "server.url", f"got {stage.server.url}, but the job starts its servers", "server.url=null"
        if stage.placement.mode in ("split", "time_share"):
            yield "placement.mode", f"got {stage.placement.mode!r}, but servers have their own machines", "use separate"
        if (backend := backend_of(stage)).name == "ipc":
            yield "sync.backend", "got 'ipc', but servers have their own machines", "use auto, file or nccl"
        if cluster.shared is None and backend.name != "nccl":
            fix = "name a folder that all machines see (cluster.shared, cluster.volume), or use nccl, for full weights"
            yield "sync.backend", f"got {backend.name!r}, which sends weights through shared files", fix
    if scheduler == "slurm" and not f"{Path.cwd()}{recipe.output}".replace("\\", "\n").isprintable():
        yield "output", f"got {str(recipe.output)!r}", "use names without line breaks and backslashes"
    if cluster.shared is None and (cluster.trainers > 1 or len(stages) > 1):
        what = f"cluster.trainers={cluster.trainers}" if cluster.trainers > 1 else f"{len(stages)} stages"
        yield "cluster.shared", f"null, but {what} share checkpoints", "name a folder that all machines see"
    if scheduler != "slurm":
        if cluster.shared is not None and cluster.volume is None:
            kind = "a PersistentVolumeClaim" if scheduler == "kubernetes" else "a bucket, such as s3://NAME"
            yield "cluster.volume", f"null, but {cluster.shared} must be mounted", f"name {kind}"
        yield from _out_of_reach(cluster, recipe)
    if scheduler == "skypilot" and cluster.gpus and cluster.gpu is None:
        yield "cluster.gpu", f"null, but each machine has {cluster.gpus} GPUs", "name their kind, such as H100"
    if scheduler == "kubernetes" and cluster.images is None:
        fix = "build the two Dockerfiles that --dry-run prints, push the images, and name them (docs/multi-node.md)"
        yield "cluster.images", "missing", fix


def _out_of_reach(cluster: Cluster, recipe: Recipe | StagedRecipe) -> Iterator[Fault]:
    """Yield paths of this machine that the others do not get."""
    places = [Path.cwd(), recipe.output, *([cluster.shared] if cluster.shared is not None else [])]
    if cluster.shared is not None and not recipe.output.is_relative_to(cluster.shared):
        yield "output", f"{recipe.output} is not in {cluster.shared}", f"output={cluster.shared}/NAME"
    for stage in stages_of(recipe):
        for name, value in leaves(json.loads(stage.model_dump_json(exclude={"import_path", "output"}))).items():
            file = value.split(":")[0] if isinstance(value, str) else ""
            if file.startswith("/") and Path(file).exists() and not any(Path(file).is_relative_to(at) for at in places):
                yield name, f"{file} is on this machine only", "move it below the current folder, or to cluster.shared"
        model = stage.model.path
        if not is_hub_name(model) and not any(Path(model).is_relative_to(at) for at in places):
            yield "model.path", f"{model} is on this machine only", "use a hub name, or a folder in cluster.shared"
