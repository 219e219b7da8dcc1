"""The rollout worker, which rank 0 starts without CUDA, with the numbers of two descriptors as arguments."""

import asyncio
import gc
import logging
import os
import select
import selectors
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any

from agentfactory.base.files.disk import append
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.supervised import show_to
from agentfactory.base.run_notices import inform, notice_of, notify
from agentfactory.base.user_code import watch
from agentfactory.base.user_code.import_path import append_folders
from agentfactory.rollout.chains.chain_counts import COUNTS
from agentfactory.rollout.chains.chain_runner import ChainRunner, RolloutStoppedError
from agentfactory.rollout.config import Part, RolloutRecipe
from agentfactory.rollout.data import Share
from agentfactory.rollout.evaluation.advice import PAGE, Alarms, advise
from agentfactory.rollout.evaluation.evaluate import evaluate, looks_at, offer_of, open_sources
from agentfactory.rollout.evaluation.first_look import FirstGroups, Look, describe
from agentfactory.rollout.groups.group_files import Delivered, arrays_file, read_groups, train_file, train_files
from agentfactory.rollout.groups.producer import GroupProducer
from agentfactory.rollout.groups.resumed_positions import Resumed
from agentfactory.rollout.groups.staleness import Admission
from agentfactory.rollout.groups.teacher_context import TeacherContext
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.inference.teacher_client import TeacherClient, canary_file, open_teachers
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.sources import Source, load_all, mix_of, tell_shared_tasks
from agentfactory.rollout.text.templates import RenderError
from agentfactory.rollout.trajectory import Group
from agentfactory.rollout.workers.worker_socket import ALIVE_SECONDS, JOBS, connect, encode, encode_delivered, receive

# the module runs as __main__; under its real name, its notices are forwarded like those of other modules
logger = logging.getLogger("agentfactory.rollout.workers.rollout_worker")

# ---- an event loop whose timers stay punctual when thousands of responses arrive together

_EVENTS = 1
"""Number of sockets served between two checks of timers: four make timers thrice as late; one costs 1 to 12 % time."""


class _FewEvents(selectors.EpollSelector):
    """A selector that returns at most `_EVENTS` sockets per call. asyncio runs the callbacks of all ready sockets
    before it checks a timer: with 4,096 chains, a timeout of one second may fire five seconds late."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wait = -1.0 if timeout is None else max(timeout, 0.0)
        keys = self.get_map()
        ready = []
        for descriptor, event in self._selector.poll(wait, _EVENTS):  # type: ignore[attr-defined]
            mask = bool(event & ~select.EPOLLIN) * selectors.EVENT_WRITE
            mask |= bool(event & ~select.EPOLLOUT) * selectors.EVENT_READ
            if descriptor in keys:
                key = keys[descriptor]
                ready.append((key, mask & key.events))
        return ready


def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_FewEvents())


def collect_rarely() -> None:
    """Make Python's full garbage collections rarer: each visits every token of every chain, which took a quarter of the
    time of 256 chains with 16,000 tokens. Young garbage, which may hold large objects, is still collected soon."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_500, 60, 100)


class TrainerGoneError(Exception):
    """Rank 0 closed its end of the socket, so the worker must end."""


class _UnjudgedRecipe(RolloutRecipe):
    """The recipe of a run whose chains need no reward, because only a teacher trains the policy."""

    @property
    def needs_rewards(self) -> bool:
        return False


class Worker:
    """Production of groups in this process, and handling of rank 0's messages meanwhile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, start: dict[str, Any]):
        self.reader = reader
        self.writer = writer
        self.share = Share(*start["share"])
        self.job = job = JOBS.validate_python(start["job"])
        self.recipe = job.recipe if start["needs_rewards"] else _UnjudgedRecipe(**start["job"]["recipe"])
        append_folders(self.recipe.import_path)
        self._restored: dict[str, asyncio.Future[bool]] = {}
        self.parts = _parts(self.recipe.parts(), self.share)
        if not self.parts:
            raise ValueError("data: rollouts need tasks; name a file, such as data.path=tasks.jsonl")
        self.loaded = load_all(self.parts, tell=True)
        self.held_out = load_all(_parts(self.recipe.held_out_parts(), self.share), tell=True)
        if self.share.number == 0:
            tell_shared_tasks(self.loaded, self.held_out)
        self.order = mix_of(self.loaded, self.recipe.seed)

    async def run(self) -> None:
        """Serve until rank 0 closes the socket; then raise TrainerGoneError."""
        job, loaded = self.job, [*self.loaded, *self.held_out]
        patiently = partial(open_sources, routes_seconds=self.recipe.server.startup_seconds)
        opened = patiently(self.recipe, loaded, job.base, job.urls, processes=self.share.of, images=job.images)
        async with opened as every, self._open_teachers() as teachers:
            sources, held_out = every[: len(self.loaded)], every[len(self.loaded) :]
            for source in [*held_out, *sources]:
                await source.check()
            runner = sources[0].runner
            runner.places.workers = self.share.of
            sources = [replace(source, runner=source.watched()) for source in sources]
            held_out = [source.run_by(sources) for source in held_out]
            trained = [self._prepared(source, teachers.get(source.name)) for source in sources]
            renderer = runner.renderer
            await self._send("ready", renderer=renderer.info, chat_template=renderer.template.source)
            collect_rarely()
            messages = self._messages()
            if (first := await anext(messages, None)) is None:
                raise TrainerGoneError
            published = _published(first)
            version = published.version
            saved = job.trajectories / train_file(self.share.number)
            # created before the first line, because a checkpoint records the sizes of both files
            arrays_file(saved).touch()
            # each version consumed one batch, so a resumed run continues after `version` batches
            admission = Admission(
                job.batch_size, self.recipe.rollout.max_staleness, job.total, version, version * job.batch_size
            )
            runner.client.recovery.restore = self._restore
            runner.client.recovery.published = published
            resumed = self._resume(version)
            async with asyncio.TaskGroup() as tasks:
                # first, because grading many groups takes time
                tasks.create_task(self._live())
                if resumed is not None:
                    for name, teacher in teachers.items():
                        groups = (pending.group for pending in resumed.pending)
                        await teacher.grade_again([group for group in groups if group.source == name])
                producer = GroupProducer(
                    self.recipe.rollout,
                    trained,
                    self.order,
                    admission,
                    published,
                    saved,
                    partial(self._deliver, sources, set(teachers.values())),
                    resumed,
                    self.share,
                    self._watch(sources, first=version == 0),
                    dict(job.versions),
                    None if self.recipe.data is None else self.recipe.data.curriculum,
                )
                tasks.create_task(producer.run())
                async for message in messages:
                    match message["kind"]:
                        case "published":
                            published = _published(message)
                            runner.client.recovery.published = published
                            producer.publish(published)
                        case "evaluate":
                            tasks.create_task(self._evaluate(held_out, producer.published, producer.cache_salt()))
                        case "restored":
                            self._restored.pop(message["url"]).set_result(message["proven"])
                        case "acknowledge":
                            self._note_acknowledged(message["groups"])
                        case kind:
                            raise ValueError(f"unknown message {kind!r} from the trainer")
                raise TrainerGoneError

    def _prepared(self, source: Source[ChainRunner], teacher: TeacherClient | None) -> Source[ChainRunner]:
        if self.job.context is not None:
            context = TeacherContext(self.job.context, source.runner, source.tasks, self.job.base)
            source = replace(source, context=context)
        return source if teacher is None else replace(source, runner=source.runner.graded_by(teacher.grade))

    @asynccontextmanager
    async def _open_teachers(self) -> AsyncIterator[dict[str, TeacherClient]]:
        """Yield the clients of the teachers' servers by source, which have the weights that this run began with."""
        async with open_teachers(self.job.teachers, self.recipe) as found:
            files = {teacher: canary_file(teacher.server, source) for source, teacher in found.items()}
            for teacher, file in files.items():
                await teacher.check()
                await teacher.remember(self.job.trajectories / file, writes=self.share.number == 0)
            yield found

    async def _messages(self) -> AsyncIterator[dict[str, Any]]:
        while (message := await receive(self.reader)) is not None:
            yield message

    def _resume(self, version: int) -> Resumed | None:
        """Return what an earlier attempt had reached in this share by the checkpoint of `version`; None without one."""
        if not (files := train_files(self.job.trajectories)):
            return None
        if self.share.number == 0:
            # the file may name groups of later checkpoints, which this run does not resume from
            (self.job.trajectories / "acknowledged.txt").unlink(missing_ok=True)
            self._note_acknowledged(sorted(self.job.trained))
        saved = (group for file in files for group in read_groups(file))
        observes = self.recipe.data is not None and self.recipe.data.curriculum is not None
        configs = {part.name: part.recipe.rollout for part in self.parts}
        of_run = self.job.trained, self.job.versions, version, self.recipe.rollout
        resumed = Resumed.from_saved(saved, *of_run, observes, self.share, configs)
        told = "resuming after version %d: %d positions are settled, %d groups wait to be trained"
        logger.info(told, version, len(resumed.done), len(resumed.pending))
        return resumed

    def _watch(self, sources: Sequence[Source[ChainRunner]], first: bool) -> Callable[[Group], None]:
        """Return a function that receives each complete group, and gives alarms. If the run begins (`first`) without
        held-out tasks, it also shows the look of the first batch, and of the first group of other sources."""
        batch = self.share.part(self.job.batch_size)
        named = {source.name: source for source in sources}
        alarms = {name: Alarms(offer_of(source.runner), batch) for name, source in named.items()}
        unseen = named if first and not self.held_out and self.share.number == 0 else ()
        begun = FirstGroups(batch, unseen)

        def note(group: Group) -> None:
            if groups := begun.take(group):
                self._show(looks_at(groups, sources))
            for advice in alarms[group.source].note(group):
                of = f"source {group.source}: " if group.source else ""
                notify(logger, f"{of}{advice.topic}", f"{of}{advice}", times=0, see=PAGE)

        return note

    def _show(self, looks: dict[str, Look]) -> None:
        """Show the first look at the model, by source, which was taken while the first batches ran."""
        for name, look in looks.items():
            of = f" on source {name}" if name else ""
            inform(logger, "\n  ".join([f"first look at the model{of}:", *describe(look)]), see=PAGE)
            for advice in advise(look):
                notify(logger, f"first look{of}: {advice.topic}", f"first look{of}: {advice}", times=0, see=PAGE)

    def _note_acknowledged(self, groups: list[str]) -> None:
        append(self.job.trajectories / "acknowledged.txt", "".join(f"{group}\n" for group in groups))

    async def _live(self) -> None:
        while True:
            await self._send("alive", counts=astuple(COUNTS))
            await asyncio.sleep(ALIVE_SECONDS)

    async def _evaluate(
        self, held_out: Sequence[Source[ChainRunner]], published: Published, cache_salt: str | None
    ) -> None:
        name, folder = f"{published.version:06d}", self.job.trajectories / "eval"
        metrics, failures, looks = await evaluate(held_out, self.recipe, published.model, folder, name, cache_salt)
        if published.version == 0:
            self._show(looks)
        for mode, failure in failures.items():
            notify(logger, f"held-out tasks, {mode}", failure)
        await self._send("evaluation", figures=metrics)

    async def _restore(self, url: str) -> bool:
        """Request that rank 0 load the published weights at `url`. Return whether the server has proven them."""
        restored = self._restored[url] = asyncio.get_running_loop().create_future()
        await self._send("restore", url=url)
        return await restored

    async def _deliver(
        self,
        sources: Sequence[Source[ChainRunner]],
        teachers: Collection[TeacherClient],
        batch: list[Delivered],
        figures: dict[str, float],
    ) -> None:
        for source in sources:
            source.runner.setup.tool_errors.report()
        for teacher in teachers:
            # its grades since the last batch are from the same weights
            await teacher.check_weights()
        for delivered in batch:
            for part in encode_delivered(delivered):
                self.writer.write(part)
            await self.writer.drain()
        runner = sources[0].runner
        figures = {**figures, **await runner.places.take_figures(runner.client)}
        await self._send("batch", figures=figures, counts=astuple(COUNTS))

    async def _send(self, kind: str, **fields: Any) -> None:
        self.writer.write(encode(kind, **fields))
        await self.writer.drain()


def _parts(parts: Sequence[Part[RolloutRecipe]], share: Share) -> list[Part[RolloutRecipe]]:
    return [replace(part, recipe=_shared(part.recipe, share)) for part in parts]


def _shared(recipe: RolloutRecipe, share: Share) -> RolloutRecipe:
    """Return one worker's recipe, with its share of the limits on chains, instances and calls, which are totals."""
    rollout, server, limits = recipe.rollout, recipe.server, recipe.limits
    most = rollout.concurrency if rollout.concurrency == "auto" else share.part(rollout.concurrency)
    rates = {tool: rate / share.of for tool, rate in limits.calls_per_second.items()}
    servers = {}
    for name, config in recipe.mcp_servers.items():
        capacity = config.pool.capacity and share.part(config.pool.capacity)
        servers[name] = config.model_copy(update={"pool": config.pool.model_copy(update={"capacity": capacity})})
    return recipe.model_copy(
        update={
            "rollout": rollout.model_copy(update={"concurrency": most}),
            "server": server.model_copy(update={"max_num_seqs": share.part(server.max_num_seqs)}),
            "limits": limits.model_copy(update={"calls_per_second": rates}),
            "mcp_servers": servers,
        }
    )


def _published(message: dict[str, Any]) -> Published:
    return Published(message["version"], message["model"], message["label"])


class _Forward(logging.Handler):
    """A log handler that sends this process's notices to rank 0, which shows them to the user."""

    def __init__(self, writer: asyncio.StreamWriter):
        super().__init__(logging.INFO)
        self._writer = writer
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        if (notice := notice_of(record)) is None:
            return
        message = encode("notice", **asdict(notice))
        if threading.current_thread() is threading.main_thread():
            self._writer.write(message)
        else:  # the thread of a tool or a reward
            self._loop.call_soon_threadsafe(self._writer.write, message)


EXPECTED = (ServerUnreachableError, RolloutStoppedError, ToolInfrastructureError, ValueError, OSError)
"""Errors caused by the recipe or a dead peer, reported in one line. All others are bugs, reported with their type."""


async def main(descriptor: int, stacks: int) -> int:
    """Connect to rank 0 through its socket and work. On failure, send rank 0 the reason. Return the exit status.
    `stacks` is the descriptor of the pipe through which rank 0 sees this process while user code holds it up."""
    parent_watch.follow_parent()
    os.set_inheritable(stacks, False)
    watch.say_by(logger.info)
    show_to(stacks)
    reader, writer = await connect(descriptor)
    logging.getLogger("agentfactory").addHandler(_Forward(writer))
    # Ctrl-C in a terminal reaches the whole process group, but the trainer decides when the worker ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    start = await receive(reader)
    if start is None:
        return 0
    try:
        await Worker(reader, writer, start).run()
    except asyncio.CancelledError:
        return 0
    except Exception as error:
        cause = _first(error)
        if isinstance(cause, TrainerGoneError):
            return 0
        logger.error("stopped", exc_info=error)
        reason = str(cause) if isinstance(cause, EXPECTED) else f"{type(cause).__name__}: {cause} (a bug; see the log)"
        if isinstance(cause, MemoryError):
            reason = f"memory ran out: {cause or 'MemoryError'}; fix: free memory, or lower rollout.concurrency"
        # an unusable template is detected before any rollout
        told = reason if isinstance(cause, RenderError) else f"rollouts stopped: {reason}"
        writer.write(encode("stopped", reason=told))
        await writer.drain()
        return 1
    return 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=event_loop) as loop:
        sys.exit(loop.run(main(*map(int, sys.argv[1:]))))
