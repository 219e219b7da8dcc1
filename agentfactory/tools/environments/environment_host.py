"""The instances of one Environment class, and the chains that use them."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from agentfactory.base.config import PoolConfig
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes.threads import run_in_thread, run_on_loop
from agentfactory.base.run_notices import notify
from agentfactory.base.user_code.extension import check_types
from agentfactory.tools.environments.environment import Environment, overrides
from agentfactory.tools.environments.pool import Lease, Pool

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
ANCHOR = "anchor"

Then = Callable[[Any, "Held"], Any]
"""Converts a method's return value before the instance's next call begins."""


class NoState(Exception):
    """A call for a chain that has no instance."""


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a user's function runs on the event loop; any other may block and runs in a thread."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


@dataclass(eq=False)
class Held:
    """One environment; the lock prevents its calls from overlapping, even if a caller abandoned a call."""

    environment: Environment
    running: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(
        self, method: Callable[..., Any], arguments: dict[str, Any], then: Then = lambda value, held: value
    ) -> Any:
        await self.lock.acquire()
        self.running = method.__name__
        if is_async(method):
            try:
                return then(await run_on_loop(method(**arguments)), self)
            finally:
                self.lock.release()
        result = run_in_thread(lambda: then(method(**arguments), self))
        result.add_done_callback(self._release)
        # cancelling the call does not stop the thread: the lock is held until the method has returned
        return await asyncio.shield(result)

    def _release(self, result: "asyncio.Future[Any]") -> None:
        self.lock.release()
        if not result.cancelled():
            result.exception()  # retrieved, so that asyncio does not report the error of an abandoned call


@dataclass(eq=False)
class _Chain:
    """The state of a chain: it has no lease while it waits for one."""

    touched: float
    """Loop time at which one of its calls last began or ended."""
    lease: Lease[Held] | None = None
    broken: bool = False


class EnvironmentHost:
    """Pools instances of `environment` with `options`, and leases them to chains by their keys, until `release` or
    `idle_seconds` without a call. Raises TypeError or SettingError for wrong options."""

    def __init__(
        self,
        environment: type[Environment],
        name: str,
        pool: PoolConfig,
        options: dict[str, Any],
        idle_seconds: float | None,
    ) -> None:
        label = environment.__name__
        parameters = inspect.signature(environment).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        known = {p.name for p in named}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters) and (unknown := options.keys() - known):
            takes = f"takes {', '.join(p.name for p in named)}" if named else "takes none"
            raise TypeError(f"options.{min(unknown)}: {label} has no such argument; it {takes}")
        if missing := [p.name for p in named if p.default is p.empty and p.name not in options]:
            fix = "set it under `options:` (serve: --option), or make a field of the task a parameter of reset()"
            raise TypeError(f"options.{missing[0]}: {label} requires it; {fix}")
        check_types(options, environment.__init__, "options")
        self.kind = environment
        self._name = name
        self._options = options
        self._idle_seconds = idle_seconds
        forgets = overrides(environment, "reset") or overrides(environment, "release")
        self._config = pool if forgets else pool.model_copy(update={"max_uses": 1})
        self._pool: Pool[Held] | None = None
        self._last: Environment | None = None
        self._openings = self._creating = 0
        self._held: set[Held] = set()
        self._chains: dict[str, _Chain] = {}
        self._farewells: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the pool open; it is closed when the last context exits."""
        if self._pool is None:
            label = self.kind.__name__
            methods = {"make": "", "reset": ".release", "healthy": ".healthy", "retire": ".close"}
            labels = {kind: f"{label}{method}()" for kind, method in methods.items()}
            cares: dict[str, Any] = {"reset": self._forget, "healthy": self._healthy, "retire": self._retire}
            self._pool = Pool(self._name, self._make, self._config, **cares, labels=labels)
            self._pool.advance()
        self._openings += 1
        try:
            yield
        finally:
            self._openings -= 1
            if self._openings == 0:
                pool, self._pool = self._pool, None
                self._chains.clear()
                with anyio.move_on_after(_CLOSE_SECONDS, shield=True) as limit:
                    await pool.close()
                # another method that hangs was reported when its call was cut
                if limit.cancelled_caught and any(held.running == "close" for held in self._held):
                    text = f"{self.kind.__name__}.close() did not return within {_CLOSE_SECONDS:g} s at the end"
                    notify(logger, f"close of {self._name}", f"{self._name}: {text}; fix: correct it")

    async def reset(self, key: str, task: dict[str, Any], then: Then, seconds: float | None = None) -> Any:
        """Lease an instance to the chain `key`, begin `task` on it within `seconds`, and return `then(result,
        environment)`. Raises ToolInfrastructureError, or NoState for a released chain, which then has no instance."""
        assert self._pool is not None
        await self.release(key)
        chain = self._chains[key] = _Chain(_now())
        try:
            chain.lease = await self._pool.acquire()
        except BaseException:
            if self._chains.get(key) is chain:
                del self._chains[key]
            raise
        if self._chains.get(key) is not chain:
            chain.lease.give_back()
            raise NoState(f"{self._name}: the chain was released while it waited for an instance")
        chain.touched = _now()
        if self._idle_seconds is not None:
            self._expire_if_idle(key, chain, self._idle_seconds)
        chain.broken = True  # also if the reset is cancelled
        try:
            async with asyncio.timeout(seconds) as limit:
                opening = await self.call(key, "reset", task, then)
        except Exception as error:
            await self.release(key)
            if isinstance(error, TimeoutError) and limit.expired():
                told = f"{self.kind.__name__}.{chain.lease.value.running}() did not return within {seconds:g} s"
                fix = f"correct it, or raise mcp_servers.{self._name}.timeout_seconds"
                raise ToolInfrastructureError(f"{told}; fix: {fix}") from None
            raise
        chain.broken = False
        return opening

    async def call(self, key: str, attribute: str, arguments: dict[str, Any], then: Then) -> Any:
        """Call a method of the chain's instance; return `then(result, environment)`. Raises NoState without an
        instance, and all that the method raises; a ToolInfrastructureError breaks the instance."""
        chain = self._chains.get(key)
        if chain is None or chain.lease is None:
            idle = f", or it made no call for {self._idle_seconds:g} s" if self._idle_seconds else ""
            raise NoState(f"{self._name} holds no state of this chain: reset was not called{idle}")
        instance = chain.lease.value
        chain.touched = _now()
        try:
            return await instance.run(getattr(instance.environment, attribute), arguments, then)
        except ToolInfrastructureError:
            chain.broken = True
            raise
        finally:
            chain.touched = _now()

    def activity(self, key: str) -> str:
        """Return what the chain's reset, or its last call, waits for, such as "Hall.reset()"."""
        if (method := self.running(key)) is not None:
            return f"{self.kind.__name__}.{method}()"
        return f"{self.kind.__name__}()" if self._creating else "the wait for an instance"

    def running(self, key: str) -> str | None:
        """Return the method of the chain's instance that was called last; None if it has no instance."""
        chain = self._chains.get(key)
        return chain.lease.value.running if chain is not None and chain.lease is not None else None

    async def release(self, key: str) -> None:
        """Release the chain's instance, if it has one. It serves other chains as soon as no call is running."""
        chain = self._chains.pop(key, None)
        if chain is not None and chain.lease is not None:
            await chain.lease.release(chain.broken)

    def gauges(self) -> dict[str, float]:
        assert self._pool is not None
        own = {} if self._last is None else self._last.gauges()
        return {**own, **self._pool.gauges()}

    def _expire_if_idle(self, key: str, chain: _Chain, limit: float) -> None:
        if self._chains.get(key) is not chain:
            return
        left = chain.touched + limit - _now()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._expire_if_idle, key, chain, limit)
            return
        logger.warning("%s: a chain made no call for %g s; its instance now serves others", self._name, limit)
        self._in_background(self.release(key))

    async def _make(self) -> Held:
        making = run_in_thread(partial(self.kind, **self._options))
        self._creating += 1
        try:
            environment: Environment = await asyncio.shield(making)
            self._last = environment
            self._held.add(held := Held(environment))
            return held
        except asyncio.CancelledError:
            making.add_done_callback(self._close_late)
            raise
        finally:
            self._creating -= 1

    def _close_late(self, making: "asyncio.Future[Any]") -> None:
        if making.exception() is None:
            self._in_background(self._retire(Held(making.result())))

    async def _forget(self, instance: Held) -> None:
        if overrides(self.kind, "release"):
            await instance.run(instance.environment.release, {})
        else:
            async with instance.lock:  # an abandoned call has returned
                pass

    async def _healthy(self, instance: Held) -> bool:
        return not overrides(self.kind, "healthy") or bool(await instance.run(instance.environment.healthy, {}))

    async def _retire(self, instance: Held) -> None:
        if overrides(self.kind, "close"):
            await instance.run(instance.environment.close, {})
        self._held.discard(instance)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)


def _now() -> float:
    return asyncio.get_running_loop().time()
