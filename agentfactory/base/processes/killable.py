"""Worker processes for libraries that can hang or crash on hostile input, and are then killed and restarted."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from agentfactory.base.processes import environment, parent_watch
from agentfactory.base.processes.memory import ENDS
from agentfactory.base.user_code.import_path import own_python


class KillableProcesses:
    """A pool of at most `count` processes `python -m MODULE`, started on demand and reused; borrowers wait. The module
    writes a line of JSON when it is ready and per answer, and ends itself if one takes too long."""

    def __init__(self, module: str, count: int, **options: Any) -> None:
        """`options` are those of KillableProcess."""
        self._create = partial(KillableProcess, "-m", module, **options)
        self._places = threading.BoundedSemaphore(count)
        self._idle: list[KillableProcess] = []

    @contextmanager
    def borrowed(self) -> Iterator["KillableProcess"]:
        """Yield a ready process, and kill it afterwards unless `answered` is set. Raises ChildProcessError."""
        with self._places:
            process = self._idle.pop() if self._idle else self._create()
            if not process.running:  # killed for its memory, perhaps
                process.end()
                process = self._create()
            process.answered = False
            try:
                yield process
            finally:
                if process.answered and not process.ends:
                    self._idle.append(process)
                else:
                    process.end()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


class KillableProcess:
    """A process that runs this Python, or `executable`, with `arguments`. The caller sets `answered` after the last
    answer to a request. Raises ChildProcessError if it does not start."""

    def __init__(
        self,
        *arguments: str,
        executable: str | None = None,
        variables: Mapping[str, str] | None = None,
        start: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
    ) -> None:
        # a separate session, so that Ctrl-C in a terminal does not reach it
        self._process = start(
            own_python(*arguments, executable=executable),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment.for_others({**parent_watch.environment(), **(variables or {})}),
            start_new_session=True,
        )
        self.answered = self.ends = False
        if self.receive() is None:
            self.end()
            raise ChildProcessError(f"{arguments[-1]} did not start; its output is in the log")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, request: dict[str, Any], content: bytes = b"") -> None:
        """Send a line of JSON, and bytes that follow it. A process that has ended gives no answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n" + content)
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer; None if the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return None
        answer: dict[str, Any] = json.loads(line)
        self.ends = answer.pop(ENDS, False)
        return answer

    def exit_status(self) -> int:
        """Wait for the end of a process that gives no more answers; return its status, -N if signal N ended it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        return self._process.wait()

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
