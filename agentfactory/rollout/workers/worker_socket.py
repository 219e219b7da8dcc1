"""The connection between trainer rank 0 and a rollout worker: a socket pair that carries messages. A message consists
of the lengths of its parts (_LENGTHS), then the parts: JSON and, for a group, the saved bytes. Rank 0 starts the worker
with one end of the pair, to which no other process can connect, and sends `start`. The worker answers `ready`, then
sends the groups of each batch, followed by `batch`. It sends a batch only once the weights that the batch will train
are live, so that its tokens do not become staler in between. Each end detects the other's death by a closed socket."""

import asyncio
import json
import logging
import os
import re
import select
import socket
import struct
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from agentfactory.base.processes import environment, parent_watch
from agentfactory.base.processes.supervised import HOLDS_LOCK, Inside, ended_by
from agentfactory.base.run_notices import Notice, doing, inform, log, notify
from agentfactory.base.user_code.import_path import own_python
from agentfactory.base.user_code.watch import BLOCKS_LOOP, QUIET_SECONDS
from agentfactory.rollout.chains.chain_counts import ChainCounts, describe_progress
from agentfactory.rollout.config import EqualRewards, RolloutRecipe
from agentfactory.rollout.config.server import TeacherServer
from agentfactory.rollout.data import Share
from agentfactory.rollout.groups.group_files import Delivered, decode_group
from agentfactory.rollout.inference.stalls import STALL_SECONDS
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.trajectory import Group

logger = logging.getLogger(__name__)

ALIVE_SECONDS = 5.0
_LOOK_SECONDS = 5.0
END_SECONDS = 5.0
"""Seconds that a worker gets to end its chains and close its tools."""
_LOG_BYTES = 1 << 16
_UNCAUGHT = re.compile(r"^Traceback \(most recent call last\):\n(?: .*\n)+(\w.*)\s*\Z", re.MULTILINE)
_LENGTHS = struct.Struct("<3Q")
"""Lengths in bytes of a message's parts: its JSON, its group's line and its group's record."""
_LONGEST = 1 << 36
"""Maximum length of a message in bytes. A group of long chains takes megabytes."""


class WorkerDiedError(Exception):
    """The rollout worker ended or failed; the message gives the reason or the path of its log."""


def encode(kind: str, line: int = 0, record: int = 0, **fields: Any) -> bytes:
    """Encode the JSON of a message, which a group's line and record of these lengths follow."""
    # replace lone surrogates, as in the line of a group
    head = json.dumps({"kind": kind, **fields}, ensure_ascii=False).encode("utf-8", "replace")
    return _LENGTHS.pack(len(head), line, record) + head


def encode_delivered(delivered: Delivered) -> list[bytes]:
    """Return the parts of the message that carries a group. Send them without other messages in between."""
    line, record = delivered.group.line, delivered.group.record
    return [encode("group", len(line), len(record), chains=delivered.chains), line, record]


def _decode(head: bytes, line: bytes, record: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(head)
    if message["kind"] == "group":
        group, counting = decode_group(line, record), set(message["chains"])
        group.trajectories = [chain for chain in group.trajectories if chain.id in counting]
        message["group"] = group
    return message


class Messages:
    def __init__(self, source: socket.socket) -> None:
        self.source = source
        self.ended = False
        self._expect(_LENGTHS.size)

    def _expect(self, size: int, lengths: tuple[int, ...] = ()) -> None:
        """Prepare to read the parts of a message, which have these `lengths`; if empty, the lengths themselves."""
        self._lengths = lengths
        self._buffer = bytearray(size)
        self._filled = 0

    def receive(self) -> None:
        """Wait for a piece of a message, or the end; only while `has_message` is False. Raise WorkerDiedError."""
        try:
            count = self.source.recv_into(memoryview(self._buffer)[self._filled :])
        except ConnectionError:
            count = 0
        self.ended = count == 0
        self._filled += count
        if not self._lengths and self._filled == len(self._buffer):
            lengths = _LENGTHS.unpack(self._buffer)
            if not 0 < lengths[0] <= sum(lengths) <= _LONGEST:
                raise WorkerDiedError("the rollout worker sent bytes that are not a message")
            self._expect(sum(lengths), lengths)

    @property
    def has_message(self) -> bool:
        return bool(self._lengths) and self._filled == len(self._buffer)

    def take(self) -> dict[str, Any] | None:
        """Return the next message, with its group as `group`; None if it has not arrived completely."""
        if not self.has_message:
            return None
        whole, (head, line, _) = memoryview(self._buffer), self._lengths
        self._expect(_LENGTHS.size)
        return _decode(bytes(whole[:head]), bytes(whole[head : head + line]), bytes(whole[head + line :]))


async def connect(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open the worker's end of the pair, which rank 0 passed as this file descriptor."""
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    return await asyncio.open_unix_connection(sock=end)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return rank 0's next message; None if rank 0 has closed the socket."""
    try:
        lengths = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        return _decode(*[await reader.readexactly(length) for length in lengths])
    except asyncio.IncompleteReadError:
        return None


@dataclass(frozen=True)
class Job:
    """The job of a run's workers, or one worker's share. `batch_size` and `total` count groups. For a resumed run,
    `trained` has the ids of the groups already trained, and `versions` maps the labels in the spans of saved groups to
    policy versions. `teachers` are the teachers behind servers, by source, `context` the recipe's teacher.context."""

    recipe: RolloutRecipe
    base: Path
    urls: list[str]
    trajectories: Path
    images: Path
    batch_size: int
    total: int
    teachers: Mapping[str, TeacherServer] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    versions: Mapping[str, int] = field(default_factory=dict)
    context: str | None = None


JOBS = TypeAdapter(Job)


@dataclass(frozen=True)
class Ready:
    """A worker's answer to `start`: what is known of the chosen renderer, and the template's Jinja source."""

    renderer: dict[str, Any]
    chat_template: str


class WorkerProcess:
    """Rank 0's handle of one worker process, which does `share` of the job. Its methods raise WorkerDiedError. If a
    server restarts without the published weights, `restore(address)` loads and proves them."""

    def __init__(self, job: Job, share: Share, log_file: Path, restore: Callable[[str], bool]) -> None:
        """Start the process; call `wait_until_ready` next."""
        self.log_file = log_file
        self._restore = restore
        self._may_be_short = job.recipe.rollout.equal_rewards is EqualRewards.DROP
        self._delivered = set(job.trained)
        self.started = False
        """True once the first weights are published, so that chains run."""
        self.counts = ChainCounts()
        self._groups: list[Group] = []
        self.batches: deque[tuple[list[Group], dict[str, float]]] = deque()
        """Batches not yet taken, with the worker's metrics of their production by name."""
        self.evaluations: deque[dict[str, float]] = deque()
        self._longest_call = job.recipe.longest_call()
        ours, theirs = socket.socketpair()
        reader, stacks = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with theirs, log_file.open("ab") as log:
            self._process = subprocess.Popen(
                own_python("-m", "agentfactory.rollout.workers.rollout_worker", str(theirs.fileno()), str(stacks)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment.for_chains(
                    job.recipe.variables(), {**parent_watch.environment(), "CUDA_VISIBLE_DEVICES": ""}
                ),
                # a launcher's signals to the trainer's process group must not reach the worker, which the trainer ends
                start_new_session=True,
                pass_fds=[theirs.fileno(), stacks],
            )
        os.close(stacks)
        self._inside = Inside(self._process.pid, reader)
        self.messages = Messages(ours)
        own = replace(job, batch_size=job.batch_size // share.of, total=job.total // share.of)
        dumped = JOBS.dump_python(own, mode="json")
        self.send("start", job=dumped, needs_rewards=job.recipe.needs_rewards, share=[share.number, share.of])

    def wait_until_ready(self) -> Ready:
        began, due = time.monotonic(), QUIET_SECONDS
        while True:
            if select.select([self.messages.source], [], [], max(0.0, began + due - time.monotonic()))[0]:
                message = self._receive()
                if message["kind"] == "ready":
                    return Ready(message["renderer"], message["chat_template"])
                self._take(message)
                continue
            if (held := self.held_by()) is not None:
                text = f"the rollout worker is not ready after {due:.0f} s: {held[0]}"
                inform(logger, text, see=str(self.log_file))
            due *= 3

    def held_by(self) -> tuple[str, str] | None:
        """Return the user code that holds up the silent worker, and the fix; None if there is none."""
        beats = self._inside.beats()
        if (where := self._inside.place(main_only=beats)) is None:
            return None
        does, fix = ("blocks its event loop", BLOCKS_LOOP) if beats else ("holds Python's lock", HOLDS_LOCK)
        return f"{where}, {does}", fix

    def end_if_held(self, seconds: float) -> None:
        """Kill the worker, and raise WorkerDiedError, if user code held it up for longer than the longest call."""
        longest, setting = self._longest_call
        if seconds > longest and (held := self.held_by()) is not None:
            self._process.kill()
            problem = f"{held[0]}, for longer than {setting}={longest:g}; fix: {held[1]}"
            raise WorkerDiedError(f"the rollout worker was killed: {problem}; its log: {self.log_file}")

    def take_batch(self, groups: int) -> tuple[list[Group], dict[str, float]]:
        """Return the next of `batches`, of `groups` groups, or fewer if the recipe drops groups with equal rewards."""
        batch, figures = self.batches.popleft()
        if len(batch) > groups or len(batch) < (1 if self._may_be_short else groups):
            raise WorkerDiedError(f"the worker sent a batch of {len(batch)} groups, expected {groups}")
        ids = [group.id for group in batch]
        if len(set(ids)) < len(ids) or not self._delivered.isdisjoint(ids):
            raise WorkerDiedError(f"the worker sent a group that was already delivered, one of {', '.join(ids)}")
        self._delivered.update(ids)
        return batch, figures

    def send(self, kind: str, **fields: Any) -> None:
        try:
            self.messages.source.sendall(encode(kind, **fields))
        except ConnectionError:
            raise self._death() from None

    def hear(self) -> None:
        self._take(self._receive())

    def _take(self, message: dict[str, Any]) -> None:
        if "counts" in message:
            self.counts = ChainCounts(*message["counts"])
        if message["kind"] == "group":
            self._groups.append(message["group"])
        elif message["kind"] == "batch":
            self.batches.append((self._groups, message["figures"]))
            self._groups = []
        elif message["kind"] == "restore":
            # restores the weights published last: rank 0 receives messages only between updates
            url = message["url"]
            self.send("restored", url=url, proven=self._restore(url))
        elif message["kind"] == "evaluation":
            self.evaluations.append(message["figures"])
        elif message["kind"] == "notice":
            # the worker's own output goes only to its log; ours reaches the user
            notice = Notice(**{name: value for name, value in message.items() if name != "kind"})
            log(logger, replace(notice, see=notice.see or str(self.log_file)))
        elif message["kind"] != "alive":
            raise WorkerDiedError(f"the worker sent an unknown message {message['kind']!r}")

    def close(self) -> None:
        try:
            self.messages.source.shutdown(socket.SHUT_WR)
            self._process.wait(timeout=END_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            if isinstance(error, subprocess.TimeoutExpired):
                text = f"the rollout worker had not ended after {END_SECONDS:g} s, and was killed: user code still ran,"
                text += " such as the release() or close() of an environment, or the machine is busy"
                notify(logger, "end of the rollout worker", text, see=str(self.log_file))
            self._process.kill()
            self._process.wait()
        self.messages.source.close()
        self._inside.close()

    def _receive(self) -> dict[str, Any]:
        while (message := self.messages.take()) is None:
            if self.messages.ended:
                raise self._death()
            self.messages.receive()
        if message["kind"] == "stopped":
            raise WorkerDiedError(message["reason"])
        return message

    def _death(self) -> WorkerDiedError:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"the rollout worker closed its socket but still runs; its log: {self.log_file}")
        raised = self._raised() if status == 1 else ""  # the status after an exception that nothing caught
        return WorkerDiedError(f"the rollout worker {ended_by(status, raised=raised)}; its log: {self.log_file}")

    def _raised(self) -> str:
        """Return the exception whose traceback ends the worker's log; "" if it ends otherwise."""
        with self.log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            found = _UNCAUGHT.search(file.read().decode(errors="replace"))
        return found[1][:500] if found else ""


class RolloutWorkers:
    """A pool of `rollout.workers` processes, each of which produces an equal share of every batch. Its methods block,
    and raise WorkerDiedError. For `restore` see WorkerProcess. The workers log to `logs`."""

    def __init__(self, job: Job, logs: Path, restore: Callable[[str], bool]) -> None:
        count = job.recipe.rollout.workers
        self._evaluates = job.recipe.eval.data is not None
        self._rollout = job.recipe.rollout
        self._figures: dict[str, float] = {}
        self._workers: list[WorkerProcess] = []
        for number in range(count):
            log = logs / (f"worker-{number}.log" if number else "worker.log")
            self._workers.append(WorkerProcess(job, Share(number, count), log, restore))

    @cached_property
    def ready(self) -> Ready:
        """The first worker's answer, once all are ready."""
        with doing("the rollout worker opens its tools"):
            first, *_ = [worker.wait_until_ready() for worker in self._workers]
        return first

    def next_batch(self, groups: int) -> list[Group]:
        """Wait for the next batch: `groups` groups, or fewer if the recipe drops groups with equal rewards."""
        with doing(describe_progress(self._counts, self._rollout)):
            self._hear_until(lambda: all(worker.batches for worker in self._workers))
        batch: list[Group] = []
        figures: Counter[str] = Counter()
        for worker in self._workers:
            own, counted = worker.take_batch(groups // len(self._workers))
            batch += own
            figures.update(counted)
        self._figures = dict(figures)
        return batch

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last batch's production, summed over workers, by name."""
        return self._figures

    def published(self, published: Published) -> None:
        """Notify the workers of the live weights; the first call starts generation."""
        _ = self.ready
        for worker in self._workers:
            worker.started = True
            worker.send("published", **asdict(published))

    def acknowledge(self, group_ids: list[str]) -> None:
        """Record that a durable checkpoint includes the training on these groups."""
        self._workers[0].send("acknowledge", groups=group_ids)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the published weights. Return the metrics as `eval/...`; empty if there are no held-out tasks."""
        if not self._evaluates:
            return {}
        first = self._workers[0]
        first.send("evaluate")
        with doing(describe_progress(self._counts, self._rollout)):
            self._hear_until(lambda: bool(first.evaluations))
        return {f"eval/{name}": value for name, value in first.evaluations.popleft().items()}

    def _counts(self) -> ChainCounts:
        return sum((worker.counts for worker in self._workers), ChainCounts())

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _hear_until(self, done: Callable[[], bool]) -> None:
        """Process messages until `done`. Notify of workers silent for STALL_SECONDS; end those held up too long."""
        since = time.monotonic()
        by_socket = {worker.messages.source.fileno(): worker for worker in self._workers}
        sockets = select.poll()
        for number in by_socket:
            sockets.register(number, select.POLLIN)
        silent = {worker: since for worker in self._workers if worker.started}
        """Worker -> time of its last message."""
        told: set[WorkerProcess] = set()
        while not done():
            spoken = [worker for worker in self._workers if worker.messages.has_message or worker.messages.ended]
            if spoken:
                for worker in spoken:
                    worker.hear()
                continue
            for number, _ in sockets.poll(1000 * min(STALL_SECONDS, _LOOK_SECONDS) if silent else None):
                worker = by_socket[number]
                worker.messages.receive()
                if worker.started:
                    silent[worker] = time.monotonic()
            for worker, quiet_since in silent.items():
                seconds = time.monotonic() - quiet_since
                if seconds < STALL_SECONDS:
                    continue
                if worker not in told:
                    told.add(worker)
                    text = f"the rollout worker has sent no message for {STALL_SECONDS:g} s: "
                    held = worker.held_by()
                    text += "; fix: ".join(held) if held else "its process is stopped, or code blocks its event loop"
                    notify(logger, f"{worker.log_file.name} stands still", text, see=str(worker.log_file))
                worker.end_if_held(seconds)
