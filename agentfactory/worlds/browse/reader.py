"""`Reader`: converts documents to text in subprocesses, which are killed if they take too long."""

from typing import Any

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes.killable import KillableProcesses
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.tools.sandbox.program import start_confined
from agentfactory.worlds.browse.documents import Document, PageError, Text

_PROCESSES = 2
"""Documents read concurrently."""


class Reader:
    """A converter of documents to text. One object serves all chains of a process; subprocesses start on demand.

    Args:
        seconds: Time limit per document.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._processes = KillableProcesses("agentfactory.worlds.browse.read_process", _PROCESSES, start=start_confined)

    async def read(self, document: Document) -> Text:
        """Convert a document to text.

        Raises:
            PageError: it cannot be read, or takes too long; the message is shown to the model.
            ToolInfrastructureError: no subprocess could be started.
        """
        return await run_in_thread(lambda: self._read(document))

    def close(self) -> None:
        """End the idle subprocesses; the next document starts new ones."""
        self._processes.close()

    def _read(self, document: Document) -> Text:
        request: dict[str, Any] = {"url": document.url, "type": document.type, "charset": document.charset}
        request |= {"bytes": len(document.content), "seconds": self._seconds}
        try:
            with self._processes.borrowed() as process:
                process.send(request, document.content)
                answer = process.receive()
                process.answered = answer is not None
        except ChildProcessError as error:
            raise ToolInfrastructureError(str(error)) from error
        if answer is None:
            raise PageError(f"{document.url} takes too much time or memory to be read.")
        if "error" in answer:
            raise PageError(answer["error"])
        return Text(answer["title"], answer["text"], tuple(answer["links"]))
