"""`agentfactory machine`: one machine's part of a run. The first machine is the launcher: it prepares, runs the stages
and tells the other machines through torch's store which stage begins and ends."""

import argparse
import hashlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agentfactory.base.errors import Fault, SettingError
from agentfactory.base.http.loopback import is_loopback
from agentfactory.recipe.composition import COMMAND_LINE

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from agentfactory.launching.child_processes import Children
    from agentfactory.launching.launch_plan import Machines, StagePlan
    from agentfactory.recipe.schema import Recipe, StagedRecipe

ABOUT = "one machine's part of a run on several; the files of `agentfactory launch` call it"
EXAMPLES = ["machine recipe.yaml --trainers 1 --rank 0 --machines 10.0.0.1,10.0.0.2"]
_POLL_SECONDS = 0.5
_HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)
_START_SECONDS = 1800.0  # seconds within which the first machine must start
_LEAVE_SECONDS = 60.0  # seconds that the first machine waits for the others to end


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the recipe")
    about = "names or addresses of all machines, trainers first, with commas"
    command.add_argument("--machines", required=True, type=lambda text: text.split(","), help=about)
    command.add_argument("--trainers", required=True, type=int, help="how many of them train")
    about = "the number of this machine, from 0 (default: $SLURM_PROCID)"
    command.add_argument("--rank", type=int, default=os.environ.get("SLURM_PROCID"), help=about)
    about = "count --rank among machines of this role"
    command.add_argument("--role", choices=("trainer", "server"), help=about)
    command.add_argument("--port", type=int, default=29500, help="of accelerate's launchers; the next one is also used")
    command.add_argument("--server-port", type=int, default=8000, help="of the inference servers")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run this machine's part of every stage. Raises SettingError, and as `agentfactory train`."""
    from agentfactory.base.run_notices import heard
    from agentfactory.cluster.description import KEY
    from agentfactory.recipe.checks import check_recipe
    from agentfactory.recipe.load import load_recipe

    rank = -1 if options.rank is None else options.rank + options.trainers * (options.role == "server")
    for fault in _faults(options, rank):
        raise SettingError(*fault, source=COMMAND_LINE)
    if len(options.machines) > options.trainers and not os.environ.get(KEY):
        fix = "export the same secret text on all machines"
        raise SettingError(f"${KEY}", "is not set: the servers' key", fix, source="environment")
    recipe = load_recipe(options.recipe, options.overrides)
    machine = _Machine(options, rank, say)
    given = machine.with_servers(recipe)
    # a trainer's machine needs no vLLM, and a server's no tools
    if rank < options.trainers:
        check_recipe(given, "train")
    else:
        check_recipe(recipe, "serve")
    # torch would write a stack of C++ whenever a machine has not started, or has ended
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with heard(say):
        return machine.run(given)


def _faults(options: argparse.Namespace, rank: int) -> Iterator[Fault]:
    names, trainers = options.machines, options.trainers
    if not 0 <= rank < len(names) or not 0 < trainers <= len(names):
        yield "--rank", f"got {options.rank} of {len(names)} machines, of which {trainers} train", "count from 0"
    for kind in (names[:trainers], names[trainers:]):
        if len({*kind}) < len(kind) or not all(map(_HOST.fullmatch, kind)):
            yield "--machines", f"got {','.join(kind)!r}", "name each machine once, by its host name or IPv4 address"
    if not 1024 <= min(port := options.port, serving := options.server_port) <= max(port, serving) < 65535:
        yield "--port, --server-port", f"got {port}, {serving}", "use 1024 to 65534"


class _Machine:
    def __init__(self, options: argparse.Namespace, rank: int, say: Callable[[str], None]) -> None:
        self._options, self._rank, self._say = options, rank, say
        self._first = options.machines[0]
        servers = options.machines[options.trainers :]
        self._urls = [f"http://{host}:{options.server_port}" for host in servers]
        self._store: TCPStore
        self._number = 0
        """Stages that have begun since this process started."""

    def run(self, recipe: "Recipe | StagedRecipe") -> int:
        from torch.distributed import DistNetworkError, TCPStore

        from agentfactory.base.run_notices import doing
        from agentfactory.launching.child_processes import ChildFailed
        from agentfactory.launching.reach_early import wait_for_listener
        from agentfactory.rollout.inference.server_command_line import port_fault

        lead = self._rank == 0
        place = ("127.0.0.1" if lead else self._first, self._options.port + 1)
        _name_interface(self._options.machines)
        if lead and (fault := port_fault(place[1], "--port")) is not None:
            raise fault
        with doing(f"waiting for the first machine, {self._first}"):
            # TCPStore waits, too, but no signal ends that
            if not lead and (why := wait_for_listener(place, time.monotonic() + _START_SECONDS)):
                raise SettingError("--machines", f"nothing listens at {place}: {why}", "start the first machine")
            # a store listens on all interfaces; it holds names of stages only, and runs nothing
            self._store = TCPStore(*place, is_master=lead, wait_for_workers=False)
        self._store.set_timeout(timedelta(seconds=60))
        try:
            return self._lead(recipe) if lead else self._follow(recipe)
        except DistNetworkError as error:
            raise ChildFailed(f"the first machine, {self._first}, ended before the run: {error}") from error

    # ---- the first machine

    def _lead(self, recipe: "Recipe | StagedRecipe") -> int:
        from agentfactory.launching import launcher
        from agentfactory.launching.launch_plan import AUTO
        from agentfactory.launching.run_folder import RunFolder, is_run
        from agentfactory.recipe.schema import stages_of

        last = stages_of(recipe)[-1]
        begun = is_run(recipe.output) or (recipe.output / last.name).exists()
        summary = RunFolder(last.output).read_summary() if begun and RunFolder(last.output).summary.exists() else {}
        if summary.get("status") == "completed" and summary["steps"] >= last.train.steps:
            self._say(f"{recipe.output} is completed, with {summary['steps']} steps")
        else:
            machines = replace(self._machines(), during=self._stage)
            launcher.train(recipe, False, AUTO if begun else None, self._say, machines)
        self._store.set(str(self._number + 1), "")
        limit = time.monotonic() + _LEAVE_SECONDS
        while self._store.add("left", 0) < len(self._options.machines) - 1 and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        return 0

    def with_servers(self, recipe: "Recipe | StagedRecipe") -> "Recipe | StagedRecipe":
        """Return `recipe` with the addresses of the run's servers in each stage that runs chains."""
        from agentfactory.cluster.description import KEY
        from agentfactory.recipe.checks import runs_chains
        from agentfactory.recipe.schema import StagedRecipe, updated

        if isinstance(recipe, StagedRecipe):
            return recipe.model_copy(update={"stages": [self.with_servers(stage) for stage in recipe.stages]})
        return updated(recipe, "server", url=self._urls, api_key_env=KEY) if runs_chains(recipe, "train") else recipe

    def _machines(self) -> "Machines":
        from agentfactory.launching.launch_plan import Machines

        count = self._options.trainers
        if count == 1:
            return Machines()
        # --num_processes counts all machines'
        place = ("--main_process_ip", self._first, "--main_process_port", str(self._options.port))
        return Machines(count, ("--num_machines", str(count), "--machine_rank", str(self._rank), *place))

    @contextmanager
    def _stage(self, stage: "StagePlan") -> Iterator[None]:
        self._number += 1
        # with a digest, because a network file system may show the others an earlier attempt's file
        self._store.set(str(self._number), f"{stage.recipe.name} {_digest(stage.folder.assignment)}")
        try:
            yield
        finally:
            self._store.set(f"end {self._number}", "")

    # ---- the other machines

    def _follow(self, recipe: "Recipe | StagedRecipe") -> int:
        from agentfactory.launching.child_processes import Children
        from agentfactory.recipe.schema import stages_of

        stages = {stage.name: stage for stage in stages_of(recipe)}
        with Children(self._say) as children:
            number = 1
            while told := self._told(str(number), f"waiting for stage {number}"):
                name, digest = told.split(" ")
                if self._rank < self._options.trainers:
                    self._train(stages[name], digest, children)
                elif stages[name].server.url is not None:
                    if len(stages) > 1:
                        # an earlier stage made its model
                        stages[name] = _as_assigned(stages[name], digest)
                    self._serve(stages[name], recipe.output, children, f"end {number}")
                number += 1
        self._store.add("left", 1)
        return 0

    def _told(self, key: str, what: str, check: Callable[[], None] = lambda: None) -> str:
        from agentfactory.base.run_notices import doing

        with doing(what):
            while not self._store.check([key]):
                check()
                time.sleep(_POLL_SECONDS)
        return self._store.get(key).decode()

    def _train(self, stage: "Recipe", digest: str, children: "Children") -> None:
        from agentfactory.base.processes.devices import may_have_gpu
        from agentfactory.launching.launch_plan import trainer_command
        from agentfactory.launching.launcher import first_rank_that_failed
        from agentfactory.launching.placement import Placement
        from agentfactory.launching.run_folder import RunFolder

        folder = RunFolder(stage.output)
        _await(folder.assignment, digest)
        command = trainer_command(stage, folder, Placement(on_gpu=may_have_gpu()), self._machines())
        log, finishing = folder.logs / f"train-machine-{self._rank}.log", folder.is_finishing
        options = {"explain": first_rank_that_failed, "is_finishing": finishing, "show": True}
        trainer = children.start("trainer", command.arguments, log, env=command.env, **options)
        while trainer.process.poll() is None:
            # raises if the first machine is gone, which NCCL notices only after minutes
            self._store.check(["left"])
            time.sleep(_POLL_SECONDS)
        children.wait(trainer)

    def _serve(self, stage: "Recipe", output: Path, children: "Children", end: str) -> None:
        """Serve the stage's model until the store has the key `end`."""
        from agentfactory.base.processes.devices import may_have_gpu
        from agentfactory.launching.placement import Placement, place
        from agentfactory.launching.start_server import begin_server, wait_for_server
        from agentfactory.recipe.schema import updated

        # the trainers need this server while they finish their step
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._say("a signal to end: serves until the trainers have ended"))
        own = updated(stage, "server", url=None, host="0.0.0.0", port=self._options.server_port)
        planned = place([own], "serve")[0] or Placement(on_gpu=may_have_gpu())
        if (refusal := planned.refusal(own)) is not None:
            raise refusal
        command = planned.server_command(own, weight_transfer=replace(planned, sync=None).weight_transfer(own))
        log = output.with_name(f"{output.name}-launch") / f"server-{self._rank}.log"
        server = begin_server(own, command, children, log, self._say, env=planned.environment("server"))
        wait_for_server(own, server, children, self._say)
        self._told(end, "serving", partial(children.check, server))
        children.stop(server)


def _name_interface(machines: Sequence[str]) -> None:
    """Let gloo use the interface that reaches the other machines, unless the user names one: by default it takes that
    of the host's name, which on Debian is loopback's."""
    own = socket.gethostname()
    with suppress(OSError, StopIteration), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # sends nothing
        probe.connect((next(name for name in reversed(machines) if name.split(".")[0] != own), 9))
        address = probe.getsockname()[0]
        for interface, known in psutil.net_if_addrs().items():
            if any(entry.address == address for entry in known) and not is_loopback(address):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _as_assigned(stage: "Recipe", digest: str) -> "Recipe":
    from agentfactory.launching.launch_plan import Assignment
    from agentfactory.launching.run_folder import RunFolder

    file = RunFolder(stage.output).assignment
    _await(file, digest)
    return stage.with_model(Assignment.read(file).recipe.model.path)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _await(file: Path, digest: str) -> None:
    """Wait until the file that the first machine wrote is seen here."""
    from agentfactory.base.run_notices import doing

    with doing(f"waiting for {file}, which all machines must see"):
        while True:
            with suppress(FileNotFoundError):
                if _digest(file) == digest:
                    return
            time.sleep(_POLL_SECONDS)
