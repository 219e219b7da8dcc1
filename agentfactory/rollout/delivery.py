"""Connection between trainer rank 0 and the rollout worker: one loopback socket that carries JSON lines.

Rank 0 listens, starts the worker and sends `start`. The worker answers `ready`, then sends the groups of each batch,
followed by `batch`. It sends a batch when the weights that will train it are live, so that no tokens age in between.
Each end detects the other's death by the end of the socket.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentfactory.rollout.config import EqualRewards, RolloutRecipe
from agentfactory.rollout.stalls import STALL_SECONDS
from agentfactory.rollout.trajectory import Group
from agentfactory.rollout.weight_versions import Published
from agentfactory.tools import parent_watch
from agentfactory.tools.import_path import own_python
from agentfactory.tools.notices import tell

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENTFACTORY_WORKER_TOKEN"
ALIVE_SECONDS = 5.0
"""Time between two messages by which the worker says that it runs."""
LINE_LIMIT = 1 << 30
"""Maximum length of a line in bytes; a group of long chains takes megabytes."""


class WorkerDiedError(Exception):
    """The rollout worker ended or gave up; the message gives the reason or the path of its log."""


def encode(kind: str, **fields: Any) -> bytes:
    """Encode one message as a line."""
    return json.dumps({"kind": kind, **fields}, ensure_ascii=False).encode() + b"\n"


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect from the worker to rank 0 at `host:port` and prove to be its child."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_LIMIT)
    writer.write(encode("hello", token=os.environ[TOKEN_VARIABLE]))
    return reader, writer


class WorkerProcess:
    """Rank 0's end: starts the worker and receives its groups. Its methods block, and raise WorkerDiedError.

    `total` is the total number of groups that training will take. `restore` loads the published weights into the server
    at the given address after it came back without them, and returns whether the server has proven that it has them. A
    resumed run passes the ids of the groups that it has `trained`, and the `versions` behind the labels in the spans of
    saved groups.
    """

    def __init__(
        self,
        recipe: RolloutRecipe,
        base: Path,
        urls: list[str],
        trajectories: Path,
        log_file: Path,
        batch_size: int,
        total: int,
        restore: Callable[[str], bool],
        trained: Collection[str] = (),
        versions: Mapping[str, int] | None = None,
    ):
        self._log_file = log_file
        self._restore = restore
        self._evaluates = recipe.eval.data is not None
        self._may_be_short = recipe.rollout.equal_rewards is EqualRewards.DROP
        self._delivered = set(trained)
        self._started = False
        self._groups: list[Group] = []
        self._batches: deque[tuple[list[Group], dict[str, float]]] = deque()
        self._figures: dict[str, float] = {}
        self._evaluations: deque[dict[str, float]] = deque()
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as listener, log_file.open("ab") as log:
            port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                own_python("-m", "agentfactory.rollout.worker", f"127.0.0.1:{port}"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **parent_watch.environment(), TOKEN_VARIABLE: token, "CUDA_VISIBLE_DEVICES": ""},
                # signals that a launcher sends to the trainer's process group must not reach the worker: the trainer
                # ends it
                start_new_session=True,
            )
            self._socket = self._accept(listener)
        self._lines = self._socket.makefile("rb")
        if self._receive() != {"kind": "hello", "token": token}:
            raise WorkerDiedError("something else than our worker connected to the delivery socket")
        self._send(
            "start",
            recipe=recipe.model_dump(mode="json", include=set(RolloutRecipe.model_fields)),
            base=str(base),
            urls=urls,
            trajectories=str(trajectories),
            batch_size=batch_size,
            total=total,
            trained=sorted(trained),
            versions=dict(versions or {}),
        )
        self.renderer_info: dict[str, Any] = self._expect("ready")["renderer"]
        """The renderer that the worker chose, the reason, and the template's hash."""

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(1.0)
        while True:
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._death() from None

    def next_batch(self, groups: int) -> list[Group]:
        """Wait for the batch that the published weights will train: `groups` groups, or fewer if the recipe drops
        groups with equal rewards."""
        while not self._batches:
            self._take_one()
        batch, self._figures = self._batches.popleft()
        if len(batch) > groups or len(batch) < (1 if self._may_be_short else groups):
            raise WorkerDiedError(f"the worker sent a batch of {len(batch)} groups where {groups} were due")
        ids = [group.id for group in batch]
        if len(set(ids)) < len(ids) or not self._delivered.isdisjoint(ids):
            raise WorkerDiedError(f"the worker sent groups again that are trained already, among {', '.join(ids)}")
        self._delivered.update(ids)
        return batch

    def figures(self) -> dict[str, float]:
        """What the worker counted while producing the last batch, by metric name."""
        return self._figures

    def published(self, published: Published) -> None:
        """Tell the worker which weights are live; the first call starts generation."""
        self._started = True
        self._send("published", **asdict(published))

    def acknowledge(self, group_ids: list[str]) -> None:
        """Tell the worker that a durable checkpoint includes the training on these groups."""
        self._send("acknowledge", groups=group_ids)

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the published weights on the held-out tasks, as `eval/...`; empty if there are none."""
        if not self._evaluates:
            return {}
        self._send("evaluate")
        while not self._evaluations:
            self._take_one()
        return {f"eval/{name}": value for name, value in self._evaluations.popleft().items()}

    def close(self) -> None:
        """End the worker after it has processed all messages."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._lines.close()
        self._socket.close()

    def _send(self, kind: str, **fields: Any) -> None:
        try:
            self._socket.sendall(encode(kind, **fields))
        except ConnectionError:
            raise self._death() from None

    def _receive(self) -> dict[str, Any]:
        """Return the next message to rank 0; tell the person of notices, and of a worker that stands still."""
        while (message := self._read())["kind"] in ("notice", "alive"):
            if message["kind"] == "notice":
                # the worker's own output goes only to its log; ours reaches the person
                see = message["see"] or str(self._log_file)
                tell(logger, message["topic"], message["text"], see=see, times=message["times"])
        if message["kind"] == "stopped":
            raise WorkerDiedError(message["reason"])
        return message

    def _read(self) -> dict[str, Any]:
        text = f"the rollout worker has said nothing for {STALL_SECONDS:g} s: it is stopped, or its code blocks it"
        late = threading.Timer(STALL_SECONDS, tell, (logger, "the worker stands still", text))
        late.daemon = True
        if self._started:
            late.start()
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = b""
        finally:
            late.cancel()
        if not line.endswith(b"\n"):
            raise self._death()
        message: dict[str, Any] = json.loads(line)
        return message

    def _expect(self, kind: str) -> dict[str, Any]:
        message = self._receive()
        if message["kind"] != kind:
            raise WorkerDiedError(f"the worker sent {message['kind']!r} where {kind!r} was due")
        return message

    def _take_one(self) -> None:
        message = self._receive()
        if message["kind"] == "group":
            self._groups.append(Group.from_dict(message["group"]))
        elif message["kind"] == "batch":
            self._batches.append((self._groups, message["figures"]))
            self._groups = []
        elif message["kind"] == "restore":
            # these are the weights published last: rank 0 listens only between updates
            url = message["url"]
            self._send("restored", url=url, proven=self._restore(url))
        elif message["kind"] == "evaluation":
            self._evaluations.append(message["figures"])
        else:
            raise WorkerDiedError(f"the worker sent an unknown message {message['kind']!r}")

    def _death(self) -> WorkerDiedError:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"the rollout worker closed its socket but lives on; its log: {self._log_file}")
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return WorkerDiedError(f"the rollout worker {how}; its log: {self._log_file}")
