"""The worker's event loop serves a few sockets per iteration, and all of them in turn."""

import asyncio
import contextlib
import socket

from agentfactory.rollout.workers.rollout_worker import event_loop

SOCKETS = 60


def test_sockets_that_are_ready_together_are_served_in_turn_and_timers_between() -> None:
    order: list[str] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(SOCKETS)]
            ready = [stack.enter_context(first) for first, _ in pairs]
            for number, (reader, writer) in enumerate(pairs):
                stack.enter_context(writer)
                writer.send(b"x")
                # not read, so it stays ready, like a socket on which a server keeps sending
                loop.add_reader(reader, order.append, f"{number}")
            loop.call_soon(order.append, "timer")
            while not {str(number) for number in range(SOCKETS)} <= set(order):
                loop.call_later(0, order.append, "timer")
                await asyncio.sleep(0)
            for reader in ready:
                loop.remove_reader(reader)

    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(asyncio.wait_for(serve(), 30))
    rounds = " ".join(order).split("timer")
    assert max(len(served.split()) for served in rounds) <= 2
    first = order.index("0")
    assert len([name for name in order[first:] if name == "0"]) <= 2, "no socket is served twice before the others"
