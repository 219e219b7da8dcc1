"""The inference client over real sockets: what it tries again, where it goes, what it never accepts."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agentfactory.rollout.inference.http_transport import (
    ContextOverflowError,
    InferenceError,
    RefusedError,
    ServerUnreachableError,
)
from agentfactory.rollout.inference.inference_client import (
    GENERATE,
    NEEDED_ROUTES,
    Completion,
    EncodedIds,
    InferenceClient,
    _completion,
)
from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, REPLICA_HEADER, Load, write_load
from agentfactory.rollout.inference.weight_versions import Published
from tests.waiting import until

PROMPT = [1, 2, 3]
SAMPLING = {"max_tokens": 4}
Answer = Callable[[], Awaitable[web.Response] | web.Response]


def turn(version: str = "0", reason: str = "stop", **more: Any) -> web.Response:
    """One sampled token, as vLLM answers."""
    return web.json_response({"request_id": "r", "choices": [choice(version=version, reason=reason)], **more})


def choice(
    token: object = 7, logprob: object = -1.0, version: object = "0", ends: Any = (0, 1), reason: str = "stop"
) -> dict[str, Any]:
    logprobs = {"content": [{"token_id": token, "logprob": logprob}]}
    spans = [{"version": version, "start": ends[0], "end": ends[1]}]
    turn = {"index": 0, "finish_reason": reason, "token_ids": [token], "logprobs": logprobs}
    return {**turn, "weight_versions": spans}


async def hang() -> web.Response:
    await asyncio.sleep(3600)
    return turn()


def refuse(status: int, text: str = "no") -> Answer:
    return lambda: web.Response(status=status, text=text)


class Server:
    """A server that answers by `script`, one entry per request (the last one repeats), and counts requests."""

    def __init__(self, *script: Answer) -> None:
        self.script = list(script) or [turn]
        self.version = "0"
        self.held: str | None = None
        self.models = ["policy"]
        self.routes = list(NEEDED_ROUTES)
        self.prompts: list[list[int]] = []
        self.detokenized: list[bool] = []
        self.replicas = 1
        self.page: Callable[[], str] = self.idle_page
        self.asked_replicas: list[str | None] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def generate(self, request: web.Request) -> web.Response:
        self.prompts.append((body := await request.json())["token_ids"])
        self.detokenized.append(body["sampling_params"]["detokenize"])
        self.asked_replicas.append(request.headers.get(REPLICA_HEADER))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        made = answer()
        return made if isinstance(made, web.Response) else await made

    def idle_page(self) -> str:
        page = write_load(Load(0, 0, 0.0))
        return "".join(page.replace(" ", f'{{engine="{rank}"}} ') for rank in range(self.replicas))

    def cards(self) -> list[dict[str, Any]]:
        return [{"id": name, "parent": None if name == "policy" else "policy"} for name in self.models]

    async def guard(self, request: web.Request) -> web.Response | None:
        """The answer to a request that no route gets."""
        return None

    async def start(self) -> None:
        """Start on the previous port, if there was one."""
        answers: dict[str, Callable[[], Any]] = {
            "/openapi.json": lambda: {"paths": {route: {} for route in self.routes}},
            "/v1/models": lambda: {"data": self.cards()},
            "/health": lambda: {},
            "/is_paused": lambda: {"is_paused": self.held == "is_paused"},
            "/is_sleeping": lambda: {"is_sleeping": self.held == "is_sleeping"},
            "/weight_info": lambda: {"weight_version": self.version},
        }

        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self.guard(request) or await handler(request)

        async def answer(request: web.Request) -> web.Response:
            return web.json_response(answers[request.path]())

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self.page())

        app = web.Application(middlewares=[guarded])
        app.router.add_get(METRICS_ROUTE, metrics)
        app.router.add_post(GENERATE, self.generate)
        for route in answers:
            app.router.add_get(route, answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        await self.runner.cleanup()


@asynccontextmanager
async def connected(*servers: Server, retry_seconds: float = 5.0) -> AsyncIterator[InferenceClient]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        client = InferenceClient([server.url for server in servers], retry_seconds=retry_seconds)
        yield await stack.enter_async_context(client)


async def ask(client: InferenceClient, chain: str = "c", prompt: list[int] = PROMPT) -> Completion:
    return await client.generate(prompt, "policy", SAMPLING, chain=chain)


async def test_a_chain_names_its_replica_where_there_are_several() -> None:
    one, two = Server(), Server()
    two.replicas = 2
    async with connected(one, two) as client:
        await client.check_routes()
        for _ in range(2):
            await asyncio.gather(*(ask(client, f"c{n}", [n]) for n in range(6)))
        assert one.asked_replicas == [None] * 4
        assert sorted(map(str, two.asked_replicas)) == ["0"] * 4 + ["1"] * 4
        by_chain = dict(zip(map(tuple, two.prompts), two.asked_replicas, strict=True))
        assert all(by_chain[(*prompt,)] == rank for prompt, rank in zip(two.prompts, two.asked_replicas, strict=True))


@pytest.mark.parametrize(
    "fault", [refuse(500), refuse(429), refuse(503), lambda: turn(reason="abort")], ids=["500", "429", "503", "abort"]
)
async def test_what_can_heal_is_tried_again_from_the_same_ids(fault: Answer) -> None:
    server = Server(fault, fault, turn)
    async with connected(server) as client:
        assert (await ask(client)).token_ids == [7]
    assert server.prompts == [PROMPT] * 3


@pytest.mark.parametrize("status", [400, 401, 404])
@pytest.mark.parametrize(
    ("text", "kind"),
    [("never", RefusedError), ("This model's maximum context length is 8 tokens.", ContextOverflowError)],
)
async def test_a_permanent_refusal_is_not_tried_again(status: int, text: str, kind: type[Exception]) -> None:
    server = Server(refuse(status, text))
    async with connected(server) as client:
        with pytest.raises(kind if status == 400 else RefusedError):
            await ask(client)
    assert len(server.prompts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("state", ["is_paused", "is_sleeping"])
async def test_what_holds_requests_back_is_waited_for_beyond_the_limit(state: str) -> None:
    # before and after it, a turn has the usual time for retries
    server = Server(refuse(500), lambda: turn(reason="abort"), refuse(500), turn)
    server.held = state
    async with connected(server, retry_seconds=1.0) as client:
        asking = asyncio.create_task(ask(client))
        await until(lambda: len(server.prompts) == 2)
        await asyncio.sleep(1.2)
        assert server.prompts == [PROMPT] * 2, "nothing is sent meanwhile"
        server.held = None
        assert (await asking).token_ids == [7]
    assert server.prompts == [PROMPT] * 4


@pytest.mark.slow
async def test_a_request_that_always_fails_is_given_up_and_a_server_that_always_fails_stops_the_run() -> None:
    poison = [9]

    def judge() -> web.Response:
        return web.Response(status=500, text="NaN") if server.prompts[-1] == poison else turn()

    server = Server(judge)
    async with connected(server, retry_seconds=1.5) as client:

        async def others() -> None:
            while True:
                await ask(client)
                await asyncio.sleep(0.05)

        going_on = asyncio.create_task(others())
        with pytest.raises(InferenceError, match="500: NaN"):
            await ask(client, prompt=poison)
        going_on.cancel()
        with pytest.raises(ServerUnreachableError, match=r"no server completed a request for 1.5 s.*NaN"):
            await ask(client, prompt=poison)


async def test_a_dead_servers_requests_move_to_the_other() -> None:
    dying, other = Server(hang), Server()
    async with connected(dying, other) as client:
        lost = asyncio.create_task(ask(client, "c0"))
        await until(lambda: len(dying.prompts) == 1)
        await dying.stop()
        assert (await lost).token_ids == [7]
        assert other.prompts == [PROMPT], "sampled again from its ids, once"
        for i in range(4):
            await ask(client, f"d{i}", [i])
    assert len(dying.prompts) == 1


@pytest.mark.slow
async def test_a_server_that_comes_back_is_used_again_and_silence_ends_the_run() -> None:
    server = Server()
    async with connected(server, retry_seconds=2.0) as client:
        await ask(client)
        await server.stop()
        waiting = asyncio.create_task(ask(client))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await server.start()
        assert (await waiting).token_ids == [7]
        await server.stop()
        started = time.monotonic()
        with pytest.raises(ServerUnreachableError, match=r"no server answers at http://127.* for 2 s: .*[Cc]onnect"):
            await ask(client)
        assert 1.5 < time.monotonic() - started < 8


@asynccontextmanager
async def trained(*servers: Server, version: int) -> AsyncIterator[tuple[InferenceClient, list[str]]]:
    """A client of servers that a trainer keeps at `version`; the list says which it had to restore."""
    restored: list[str] = []
    async with connected(*servers) as client:
        by_url = {server.url: server for server in servers}

        async def restore(url: str) -> bool:
            await asyncio.sleep(0.05)
            restored.append(url)
            by_url[url].version = str(version)
            return True

        await client.check_routes()
        client.recovery.restore = restore
        client.recovery.published = Published(version, "policy", str(version))
        yield client, restored


@pytest.mark.parametrize("kept", [False, True], ids=["restarted", "the connection broke"])
async def test_a_server_that_was_lost_gets_no_request_before_it_has_its_weights(kept: bool) -> None:
    server = Server()
    server.script = [lambda: turn(server.version)]
    server.version = "5"
    async with trained(server, version=5) as (client, restored):
        await ask(client)
        await server.stop()
        waiting = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        # a version that only this run can have given it is no reason to restore it
        server.version = "5" if kept else "default"
        count = len(server.prompts)
        await server.start()
        assert (await waiting).versions[0].version == "5"
        assert restored == ([] if kept else [server.url])
        assert len(server.prompts) == count + 1


@pytest.mark.parametrize("label", ["4", "default", "other-1a2b-v5", "6-of-another", ""])
async def test_tokens_of_other_weights_never_pass(label: str) -> None:
    server = Server()
    server.version = label
    server.script = [lambda: turn(server.version)]
    async with trained(server, version=5) as (client, restored):
        assert (await ask(client)).versions[0].version == "5"
    assert restored == [server.url]
    assert len(server.prompts) == 2


async def test_an_update_under_a_turn_is_no_fault() -> None:
    server = Server(lambda: turn("6"))
    async with trained(server, version=5) as (client, restored):
        assert (await ask(client)).versions[0].version == "6", "newer than published: the trainer says so in a moment"
        late = asyncio.create_task(ask(client))
        client.recovery.published = Published(6, "policy", "6")
        await late
    assert restored == []


async def test_a_server_without_the_newest_adapter_is_restored() -> None:
    server = Server(refuse(404, "The model `run-v3` does not exist."), turn)
    async with trained(server, version=3) as (client, restored):
        client.recovery.published = Published(3, "run-v3", "run-v3")
        await client.generate(PROMPT, "run-v3", SAMPLING)
        assert restored == [server.url]
        server.script = [refuse(404, "The model `run-v1` does not exist.")]
        with pytest.raises(InferenceError, match="404"):
            await client.generate(PROMPT, "run-v1", SAMPLING)
        assert len(restored) == 1, "an adapter that was unloaded is no fault of the server"


async def test_routes_are_checked_on_every_server_and_the_switch_is_named() -> None:
    good, bad = Server(), Server()
    bad.routes = ["/health", "/v1/models"]
    async with connected(good, bad) as client:
        with pytest.raises(ServerUnreachableError, match=rf"{bad.url} lacks {GENERATE}; .*--enable-scale-out"):
            await client.check_routes()


def answered(*values: Any, **more: Any) -> str:
    """A turn of one token; values that JSON cannot hold are written in Python's notation."""
    return json.dumps({"choices": [choice(*values, **more)]})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *(
            (answered(logprob=value), "as the log-probability of token 7")
            for value in (math.nan, -math.inf, -1e39, 0.5)
        ),
        *((answered(value), "as a token id") for value in (-1, 1.5, True)),
        *((answered(ends=ends), "as the weight version of 1") for ends in ((0, 99), (-1, 1), (1, 0))),
        (answered(version=0), "as the weight version of 1 tokens"),
        ("<html>", "is not JSON"),
        ("[]", "the server's response is not a completion"),
        ('{"choices": [{"finish_reason": "stop", "token_ids": null}]}', "is not a completion"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_never_passes(text: str, problem: str) -> None:
    with pytest.raises(InferenceError, match=problem):
        _completion(text)


async def test_a_row_that_grows_is_encoded_once_and_sent_whole() -> None:
    server, encoded, row = Server(), EncodedIds(), [1, 151_643]
    async with connected(server) as client:
        for new in ([], [2], [], [0, 33]):
            row += new
            await client.generate(row, "base", {}, chain="c", encoded=encoded)
        assert server.prompts == [[1, 151_643], [1, 151_643, 2], [1, 151_643, 2], [1, 151_643, 2, 0, 33]]
        with pytest.raises(ValueError, match="the row must not shrink: it had 5 tokens, and now has 1"):
            await client.generate([1], "base", {}, chain="c", encoded=encoded)
        await client.generate(row, "base", {"stop": ["</answer>"]})
        assert server.detokenized == [False] * 4 + [True], "only the search for stop strings needs text"
