"""The stdio transport: a server's process, and its messages line by line, bounded while they arrive."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TextIO

import anyio
from anyio.abc import Process
from mcp import StdioServerParameters
from mcp.client._transport import TransportStreams
from mcp.client.stdio import get_default_environment
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

from agentfactory.base.run_notices import notify
from agentfactory.tools.calls.message_bounds import MessageFilter, id_of
from agentfactory.tools.mcp_servers.server_messages import Repairs, Tell

logger = logging.getLogger(__name__)

_END_SECONDS = 2.0
"""Seconds that a process may take to end after its stdin is closed, and again after SIGTERM."""
_POLL_SECONDS = 0.01
_MOST_REQUESTS = 1000
"""Maximum number of a server's own requests whose answers it has not read: each is a task of the SDK."""


@asynccontextmanager
async def stdio_transport(
    server: StdioServerParameters,
    errlog: TextIO,
    most: int,
    tell: Tell,
    on_end: Callable[[], None],
    on_start: Callable[[int], None] = lambda pid: None,
) -> AsyncIterator[TransportStreams]:
    """Start `server` and yield the streams of its messages, bounded to `most` and repaired; `on_start` gets its pid,
    `on_end` is called when its stdout ends. At exit its process group is ended. Raises OSError."""
    process = await anyio.open_process(
        [server.command, *server.args],
        env=get_default_environment() | (server.env or {}),
        stderr=errlog,
        cwd=server.cwd,
        start_new_session=True,
    )
    on_start(process.pid)
    incoming_end, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, outgoing_end = anyio.create_memory_object_stream[SessionMessage](0)
    written, repairs = anyio.Event(), Repairs(tell)
    open_requests = 0

    async def read() -> None:
        nonlocal open_requests
        async with incoming_end:
            told = False
            async for line in _lines(process, most):
                messages = messages_of(line, repairs)
                if isinstance(messages[0], Exception) and not told:
                    told, name = True, " ".join([server.command, *server.args])
                    notify(logger, f"garbage of {name}", f"a line on stdout of {name} is no message: {line[:200]!r}")
                open_requests += sum(isinstance(getattr(each, "message", None), JSONRPCRequest) for each in messages)
                if open_requests > _MOST_REQUESTS:
                    name, text = server.command, f"sent {_MOST_REQUESTS} requests and reads no answer: it is ended"
                    notify(logger, f"requests of {name}", f"the tool server {name} {text}; fix: correct it")
                    break
                try:
                    for message in messages:
                        await incoming_end.send(message)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    break  # the session is gone
        on_end()
        async for _ in _chunks(process):
            """Drain: a process that blocks on a full pipe cannot end."""

    async def write() -> None:
        nonlocal open_requests
        assert process.stdin is not None
        try:
            async with outgoing_end:
                async for sent in outgoing_end:
                    message = sent.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
                    repairs.sent(message)
                    await process.stdin.send(f"{json.dumps(message, ensure_ascii=False)}\n".encode())
                    open_requests -= isinstance(sent.message, JSONRPCResponse | JSONRPCError)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            await incoming_end.aclose()  # no answer can come any more
        finally:
            written.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield incoming, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                incoming.close()
                outgoing.close()
                with anyio.move_on_after(0.5):
                    await written.wait()
                await _end(process)
                for stream in (incoming, outgoing, incoming_end, outgoing_end):
                    await stream.aclose()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def collected_stderr(name: str, keep: Callable[[str], None]) -> AsyncIterator[TextIO]:
    """Provide a file for the stderr of the server `name`. Its lines go to this module's log, and its text to `keep`."""
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
    )

    async def collect() -> None:
        while chunk := await reader.read(65536):
            text = chunk.decode("utf-8", "replace")
            keep(text)
            for line in text.splitlines():
                logger.info("[%s] %s", name, line)

    collecting = asyncio.create_task(collect())
    try:
        with os.fdopen(write_end, "w") as errlog:
            yield errlog
    finally:
        # read a dead child's last output from the pipe, but do not wait for a grandchild that keeps it open
        await asyncio.wait({collecting}, timeout=0.5)
        collecting.cancel()
        pipe.close()


async def _chunks(process: Process) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
        while True:
            yield await process.stdout.receive()


async def _lines(process: Process, most: int) -> AsyncIterator[bytes]:
    messages = MessageFilter(most)
    async for chunk in _chunks(process):
        for line in messages.feed(chunk):
            if line.strip():
                yield line


def messages_of(line: bytes, repairs: Repairs) -> Sequence[SessionMessage | Exception]:
    """Return the messages of a line; an exception if it is none."""
    try:
        texts = repairs.repaired(line)
        return [SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False)) for text in texts]
    except ValueError as error:
        # answer the call that this belongs to, so that it does not wait for its time limit
        number = id_of(line)
        if number is None:
            return [error]
        repairs.forget(number)
        reason = " ".join(line.strip() for line in str(error).splitlines() if "further information" not in line)[:300]
        problem = ErrorData(code=PARSE_ERROR, message=f"The server's answer cannot be read: {reason}")
        return [SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=problem))]


async def _end(process: Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    if not await _has_ended(process):
        await terminate_posix_process_tree(process, _END_SECONDS)
        if not await _has_ended(process):
            logger.warning("process %d of a tool server still exists after SIGKILL", process.pid)
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdout.aclose()
    # asyncio would wait for a grandchild that holds the other end of a pipe; anyio has no public way to its transport
    with suppress(PermissionError):
        process._process._transport.close()  # type: ignore[attr-defined]


async def _has_ended(process: Process) -> bool:
    """Wait for the process, but not for the end of its pipes, which its children may have. Return if it has ended."""
    with anyio.move_on_after(_END_SECONDS):
        while process.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(_POLL_SECONDS)
    return process.returncode is not None
