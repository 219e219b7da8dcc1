"""`Reader`: documents become text in processes of their own, which are ended if they take too long."""

import json
import os
import subprocess
import threading
from contextlib import suppress
from typing import Any

from agentfactory.tools import parent_watch
from agentfactory.tools.import_path import own_python
from agentfactory.tools.messages import ToolInfrastructureError
from agentfactory.tools.threads import run_in_thread
from agentfactory.tools.web.documents import Document, PageError, Text

_PROCESSES = 2
"""Documents that are read at a time."""


class Reader:
    """Turns documents into text. One object serves all chains of a process; processes start when they are needed.

    Args:
        seconds: Time for one document.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(_PROCESSES)
        self._idle: list[_Process] = []

    async def read(self, document: Document) -> Text:
        """Return a document as text.

        Raises:
            PageError: it cannot be read, or takes too long; the message is for the model.
            ToolInfrastructureError: no process started.
        """
        return await run_in_thread(lambda: self._read(document))

    def close(self) -> None:
        """End the processes that read nothing; the next document starts new ones."""
        while self._idle:
            self._idle.pop().end()

    def _read(self, document: Document) -> Text:
        with self._places:
            process = self._idle.pop() if self._idle else _Process()
            try:
                answer = process.ask(document, self._seconds)
            finally:
                if process.waits:
                    self._idle.append(process)
                else:
                    process.end()
        if answer is None:
            raise PageError(f"{document.url} takes too much time or memory to be read.")
        if "error" in answer:
            raise PageError(answer["error"])
        return Text(answer["title"], answer["text"], tuple(answer["links"]))


class _Process:
    """One `read_process`; `waits` says whether it can take a request."""

    def __init__(self) -> None:
        command = own_python("-m", "agentfactory.tools.web.read_process")
        # a separate session, so that Ctrl-C in a terminal does not reach it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **parent_watch.environment()},
            start_new_session=True,
        )
        self.waits = self._answer() is not None
        if not self.waits:
            self.end()
            raise ToolInfrastructureError("the process that reads pages did not start; what it said is in the log")

    def ask(self, document: Document, seconds: float) -> dict[str, Any] | None:
        """Return the process's answer; None if it ended."""
        self.waits = False
        request: dict[str, Any] = {"url": document.url, "type": document.type, "charset": document.charset}
        request |= {"bytes": len(document.content), "seconds": seconds}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n" + document.content)
            self._process.stdin.flush()
        answer = self._answer()
        self.waits = answer is not None
        return answer

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
