"""A proxy that cuts connections, by a seed: within a request, after it, before its answer, and within the answer."""

import asyncio
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

KINDS = ("within the request", "after the request", "before the answer", "within the answer")
SHARE = 0.4
"""Of the requests, those that are cut."""


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Read one request or answer of HTTP/1.1; raise EOFError at the end of a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    assert length or b"chunked" not in head.lower(), head
    return head + await reader.readexactly(int(length[1]) if length else 0)


class CuttingProxy:
    """Forwards to a port of loopback. `cuts` counts what it has cut, until it has cut `most` connections."""

    def __init__(self, target: int, most: int) -> None:
        self.target, self.most, self.port = target, most, 0
        self.cuts: Counter[str] = Counter()
        self._random = random.Random(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the requests of one connection until it ends or is cut."""
        inside, out = await asyncio.open_connection("127.0.0.1", self.target)
        with suppress(OSError, EOFError):
            while not await self._forward(await _message(reader), inside, out, writer):
                pass
        for end in (writer, out):
            end.transport.abort()

    async def _forward(
        self, request: bytes, inside: asyncio.StreamReader, out: asyncio.StreamWriter, writer: asyncio.StreamWriter
    ) -> bool:
        """Forward a request and its answer; return True to cut the connection."""
        cut = ""
        if self.cuts.total() < self.most and self._random.random() < SHARE:
            cut = self._random.choice(KINDS)
            self.cuts[cut] += 1
        out.write(request[: self._random.randrange(1, len(request))] if cut == KINDS[0] else request)
        await out.drain()
        if cut in KINDS[:2]:
            return True
        answer = await _message(inside)
        if cut != KINDS[2]:
            writer.write(answer[: self._random.randrange(1, len(answer))] if cut else answer)
            await writer.drain()
        return bool(cut)


@contextmanager
def cutting_proxy(target: int, most: int) -> Iterator[CuttingProxy]:
    """Run a proxy in a thread."""
    proxy, loop = CuttingProxy(target, most), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(proxy.serve, "127.0.0.1", 0))
    proxy.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
