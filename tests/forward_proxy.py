"""A forward proxy, HTTP and SOCKS5, as companies run them; it resolves every host name to this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class ForwardProxy:
    """A proxy on a free loopback port. `asked` are the `host:port` that clients requested; all lead to loopback."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                first = await reader.readexactly(1)
                await (self._socks(reader, writer) if first == b"\x05" else self._http(first, reader, writer))
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _http(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = first + await reader.readuntil(b"\r\n\r\n")
        method, target, rest = head.split(b" ", 2)
        if method == b"CONNECT":
            host = target.decode()
        else:
            host, _, path = target.removeprefix(b"http://").decode().partition("/")
        self.asked.append(host)
        inside, out = await asyncio.open_connection("127.0.0.1", int(host.rpartition(":")[2]))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            out.write(b" ".join((method, f"/{path}".encode(), rest)))
        await self._pipe(reader, writer, inside, out)

    async def _socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly((await reader.readexactly(1))[0])  # methods
        writer.write(b"\x05\x00")
        assert (await reader.readexactly(4))[3] == 3, "the name is resolved by the client"
        name = await reader.readexactly((await reader.readexactly(1))[0])
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.asked.append(f"{name.decode()}:{port}")
        inside, out = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        await self._pipe(reader, writer, inside, out)

    async def _pipe(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        inside: asyncio.StreamReader,
        out: asyncio.StreamWriter,
    ) -> None:
        async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while piece := await source.read(65536):
                to.write(piece)
                await to.drain()
            to.close()

        back = asyncio.ensure_future(copy(inside, writer))
        try:
            await copy(reader, out)
        finally:
            back.cancel()
            out.close()

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def forward_proxy() -> AsyncIterator[ForwardProxy]:
    """Run a proxy."""
    proxy = ForwardProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
