"""Assignment of requests to servers, and recovery of servers that are lost or have lost their weights."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from agentfactory.base.http.retries import Retries
from agentfactory.rollout.inference.http_transport import Connection, LostError, ServerUnreachableError
from agentfactory.rollout.inference.routing import Replica, Router, ServerState
from agentfactory.rollout.inference.weight_versions import Published
from agentfactory.rollout.token_row import Span

logger = logging.getLogger(__name__)


class Recovery:
    """An assigner of requests to servers with the published weights, which recovers the other servers."""

    def __init__(self, connection: Connection, router: Router, retry_seconds: float):
        """`take` raises ServerUnreachableError when no server has answered for `retry_seconds`."""
        self.restore: Callable[[str], Awaitable[bool]] | None = None
        """Callback that loads the current weights into a server that lacks them, and returns False if the server has
        gone meanwhile. None if no weights are published."""
        self.base_models: set[str] = set()
        """Names of base weights; any other model is an adapter."""
        self.published: Published | None = None
        """The last published weights; None if there are none."""
        self._connection = connection
        self._router = router
        self._limit = retry_seconds
        self._returning: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._last_words = "it refused the connection"
        self._closed = False

    async def close(self) -> None:
        """Stop waiting for servers. Connections that end from now on no longer count as lost."""
        self._closed = True
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)

    def is_published(self, model: str) -> bool:
        """Return whether every server should know `model`."""
        return self.published is not None and model == self.published.model

    def is_current(self, versions: Sequence[Span], model: str, oldest: Published | None) -> bool:
        """Return whether the base weights of a turn are `oldest` or newer ones of the same run. Always True for turns
        with an adapter, because each version of an adapter has its own name."""
        if oldest is None or model not in self.base_models:
            return True
        return all(_is_at_least(span.version, oldest) for span in versions)

    async def count_replicas(self, url: str) -> None:
        """Query how many replicas answer at `url`. Raises ValueError if the server does not report them."""
        self._router.has_replicas(url, len(await self._connection.loads(url)))

    async def take(self, chain: str, prompt: Sequence[int], avoid: set[str]) -> Replica:
        """Return the replica for a request; wait while no server is serving. Raises ServerUnreachableError if the wait
        exceeds the limit."""
        while True:
            if self._failure is not None:
                raise self._failure
            replica = self._router.choose(chain, prompt, avoid)
            if replica is not None:
                return replica
            silent = self._router.silent_since
            left = None if silent is None else silent + self._limit - time.monotonic()
            if left is not None and left <= 0:
                raise ServerUnreachableError(
                    f"no server answers at {', '.join(self._router.states)} for {self._limit:g} s: {self._last_words}"
                )
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def held_back(self, url: str) -> bool:
        """Wait while the server is paused or asleep; return whether it was. The caller must not send a turn meanwhile:
        vLLM would queue it, with an adapter that it may lose during sleep."""
        tries = 0
        try:
            while await self._connection.holds_requests(url):
                tries += 1
                await asyncio.sleep(Retries.pause(tries))
        except LostError as error:
            self.lose(url, str(error))
        return tries > 0

    def lose(self, url: str, problem: str) -> None:
        """Note that the connection to `url` failed, and start to bring the server back."""
        self._last_words = problem
        if self._router.states[url] is ServerState.SERVING and not self._closed:
            logger.warning("server %s is lost: %s", url, problem)
            self._router.lost(url, time.monotonic())
            self._bring_back(url)

    def distrust(self, url: str, problem: str) -> None:
        """Note that `url` answers with weights other than the published ones, and start to bring it back."""
        if self._router.states[url] is ServerState.SERVING:
            logger.warning("server %s lost its weights: %s; requesting them", url, problem)
            self._router.answers(url)
            self._bring_back(url)

    def _bring_back(self, url: str) -> None:
        self._changed.set()
        task = asyncio.create_task(self._return(url))
        self._returning.add(task)
        task.add_done_callback(self._returned)

    def _returned(self, task: asyncio.Task[None]) -> None:
        self._returning.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # all requests that wait for a server raise it
            self._failure = task.exception()
            self._changed.set()

    async def _return(self, url: str) -> None:
        """Poll until the server answers, and mark it as serving once it has proven its weights."""
        tries = 0
        while True:
            tries += 1
            try:
                if await self._connection.is_healthy(url):
                    self._router.answers(url)
                    self._changed.set()
                    with suppress(ValueError):  # the client has reported it
                        await self.count_replicas(url)
                    if await self._has_weights(url) or self.restore is None or await self.restore(url):
                        break
                    self._router.lost(url, time.monotonic())
            except LostError as error:
                self._last_words = str(error)
                self._router.lost(url, time.monotonic())
            await asyncio.sleep(Retries.pause(tries))
        logger.warning("server %s is back", url)
        self._router.proven(url)
        self._changed.set()

    async def _has_weights(self, url: str) -> bool:
        """Return whether the server's process is still the one that loaded the published weights."""
        if self.published is None:
            return self.restore is None
        if self.published.model not in self.base_models:
            return any(card["id"] == self.published.model for card in await self._connection.models(url))
        return _is_at_least(await self._connection.weight_version(url), self.published)


def _is_at_least(label: str, oldest: Published) -> bool:
    """Return whether the base weights called `label` are `oldest` or a newer version, which a server may use before it
    is published. A label ends with its version; all labels of a run share a prefix."""
    prefix = oldest.label.removesuffix(str(oldest.version))
    number = label.removeprefix(prefix)
    return label.startswith(prefix) and number.isdecimal() and int(number) >= oldest.version
