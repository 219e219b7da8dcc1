"""The HTTP routes of the Tinker API, with sessions, models and sampling sessions by their ids.

The event loop answers; one thread computes passes, steps and files, in the order in which requests get their turn, so
that heartbeats and samples never wait for it."""

import asyncio
import hmac
import logging
import shutil
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from agentfactory.base.http.connections import HEADER_SECONDS, ConnectionLimit, log_few, most_connections
from agentfactory.tinker import bodies
from agentfactory.tinker.checkpoints import SAMPLER_KIND, WEIGHTS_KIND, CheckpointPath, Checkpoints, Saved
from agentfactory.tinker.futures import Answer, Futures, Sequence, Work
from agentfactory.tinker.messages import PROTOBUF, PassRequest, RequestError
from agentfactory.tinker.samplers import Samplers
from agentfactory.tinker.training import Model, Trainer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_POLL_SECONDS = 25.0
"""Time until a poll without an answer ends; the SDK's own timeout is 45 s."""
_MOST_BYTES = 1 << 26
_MOST_MODELS = 16
_GONE_SECONDS = 900.0
"""Time without a heartbeat after which a session's models are dropped."""
_SNAPSHOT_SECONDS = 1800.0
"""Time without a request after which a snapshot without a name is deleted."""
_CONFIG = {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False, "custom_loss_server_side": False}
_CONFIG |= {"sample_use_retrieve_futures": False, "sample_join_sampling_session": False}


class _Gone(Exception):
    """A future, or something else, that was there and is no longer."""


class _Missing(Exception):
    """An id that the service does not know."""


@dataclass
class _Session:
    tags: list[str]
    metadata: bodies.Metadata | None
    seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class _Training:
    """A model in training, and the turns of its requests."""

    model: Model
    turns: Sequence


@dataclass
class _Sampler:
    """A sampling session: a snapshot (None: the base), which is deleted with it if it has no name."""

    saved: Saved | None
    path: str | None
    unnamed: bool = False
    used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Base:
    """The base model: its folder, the name that the service gives it, and other names that clients may use."""

    folder: str
    name: str
    names: frozenset[str]
    context: int
    architecture: str


class Service:
    """The service for all clients. `key` is the one that they send."""

    def __init__(self, base: Base, trainer: Trainer, samplers: Samplers, checkpoints: Checkpoints, key: str) -> None:
        self._base, self._trainer, self._samplers, self._checkpoints = base, trainer, samplers, checkpoints
        self._key = key.encode()
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._futures = Futures()
        self._sessions: dict[str, _Session] = {}
        self._training: dict[str, _Training] = {}
        self._creating: set[str] = set()
        self._sampling: dict[str, _Sampler] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._answer])
        posts: dict[str, Callable[[web.Request], Awaitable[Any]]] = {
            "client/config": self._config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{id}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampler,
            "asample": self._asample,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
            "telemetry": self._telemetry,
        }
        gets: dict[str, Callable[[web.Request], Awaitable[Any]]] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._sampler,
            "sessions": self._list_sessions,
            "sessions/{id}": self._session_info,
            "training_runs": self._list_runs,
            "training_runs/{id}": self._run,
            "training_runs/{id}/checkpoints": self._list_of_run,
            "checkpoints": self._list_checkpoints,
        }
        checkpoint = "training_runs/{id}/checkpoints/{kind}/{name}"
        app.add_routes([web.post(f"/api/v1/{path}", handler) for path, handler in posts.items()])
        app.add_routes([web.get(f"/api/v1/{path}", handler) for path, handler in gets.items()])
        app.add_routes([web.delete(f"/api/v1/{checkpoint}", self._delete), web.put(f"/api/v1/{checkpoint}/ttl", self._ttl)])
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> web.StreamResponse:
        given = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._key):
            refusal = _json({"error": "Unauthorized: set TINKER_API_KEY as the service printed it"}, 401)
            refusal.force_close()
            return refusal
        try:
            if request.headers.get("Content-Encoding", "identity") != "identity":
                raise RequestError("Content-Encoding: this service takes bodies as they are")
            found = await handler(request)
        except RequestError as error:
            return _json({"error": str(error), "category": "user"}, 400)
        except _Missing as error:
            return _json({"error": str(error), "category": "user"}, 404)
        except _Gone as error:
            return _json({"error": str(error), "category": "user"}, 410)
        except web.HTTPRequestEntityTooLarge:
            return _json({"error": f"the body has more than {_MOST_BYTES:,} bytes; send fewer data at a time"}, 413)
        except web.HTTPException as error:
            return _json({"error": f"{request.method} {request.path}: {error.reason}: not a part of this service"}, error.status)
        return found if isinstance(found, web.StreamResponse) else _json(found)

    def _compute(self, function: Callable[..., Result], *args: Any, **named: Any) -> Awaitable[Result]:
        """Call a function on the thread that computes."""
        return asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **named))

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    # ---- sessions

    async def _config(self, request: web.Request) -> Answer:
        return dict(_CONFIG)

    async def _health(self, request: web.Request) -> Answer:
        return {"status": "ok"}

    async def _telemetry(self, request: web.Request) -> Answer:
        return {"status": "accepted"}

    async def _capabilities(self, request: web.Request) -> Answer:
        known = {"max_context_length": self._base.context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": self._base.name, **known}]}

    async def _create_session(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.Session)
        name = uuid.uuid4().hex
        self._sessions[name] = _Session(body.tags, body.user_metadata)
        return {"type": "create_session", "session_id": name}

    def _session(self, name: str) -> _Session:
        if (found := self._sessions.get(name)) is None:
            raise _Gone(f"session_id: {name!r:.80} has ended, or is of a service that was restarted; create another")
        found.seen = time.monotonic()
        return found

    async def _heartbeat(self, request: web.Request) -> Answer:
        self._session(bodies.decode(await request.read(), bodies.OfSession).session_id)
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: web.Request) -> Answer:
        await self._end_session(request.match_info["id"], "its session has ended")
        return {"status": "finished"}

    async def _end_session(self, name: str, reason: str) -> None:
        if (session := self._sessions.pop(name, None)) is None:
            return
        for model_id in session.models:
            if (training := self._training.pop(model_id, None)) is not None:
                training.turns.close(f"model_id: {model_id}: {reason}")
                await self._compute(self._trainer.drop, training.model)
        for sampler in session.samplers:
            await self._end_sampler(sampler)

    async def _end_sampler(self, name: str) -> None:
        found = self._sampling.pop(name, None)
        if found is not None and found.unnamed and found.saved is not None:
            await self._samplers.forget(found.saved)
            await asyncio.to_thread(shutil.rmtree, found.saved.folder, ignore_errors=True)

    async def sweep(self) -> None:
        """End what nobody has used for long."""
        now = time.monotonic()
        for name in [name for name, session in self._sessions.items() if now - session.seen > _GONE_SECONDS]:
            logger.warning("session %s sent no heartbeat for %.0f s: its models are dropped", name, _GONE_SECONDS)
            await self._end_session(name, f"its session sent no heartbeat for {_GONE_SECONDS:.0f} s")
        for name, sampler in list(self._sampling.items()):
            if sampler.unnamed and now - sampler.used > _SNAPSHOT_SECONDS:
                await self._end_sampler(name)

    async def _list_sessions(self, request: web.Request) -> Answer:
        offset, limit = _page(request)
        return {"sessions": list(self._sessions)[offset : offset + limit]}

    async def _session_info(self, request: web.Request) -> Answer:
        if (session := self._sessions.get(request.match_info["id"])) is None:
            raise _Missing(f"there is no session {request.match_info['id']!r:.80}")
        told = {"training_run_ids": session.models, "sampler_ids": session.samplers}
        return {**told, "user_metadata": session.metadata}

    # ---- models

    def _check_base(self, name: str | None) -> None:
        if name is not None and name not in self._base.names:
            problem = f"base_model: got {name!r:.200}, and this service has {self._base.name!r}"
            raise RequestError(f"{problem}; use that, or start the service with the other as model.path")

    async def _create_model(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.CreateModel)
        config = body.lora_config or bodies.Lora()
        model_id = f"{body.session_id}:train:{body.model_seq_id}"

        async def work() -> Answer:
            self._check_base(body.base_model)
            _check_optimizer(body.optimizer_config.type)
            await self._begin(model_id, config, body.user_metadata, first=1)
            return {"type": "create_model", "model_id": model_id}

        self._session(body.session_id)
        return self._future((model_id, 0), work)

    async def _begin(self, model_id: str, config: bodies.Lora, metadata: bodies.Metadata | None, first: int) -> _Training:
        session = self._session(model_id.partition(":")[0])
        if len(self._training) + len(self._creating) >= _MOST_MODELS:
            problem = f"the service has {_MOST_MODELS} models in training"
            raise RequestError(f"{problem}; end a session that is not needed (ServiceClient.close)")
        self._creating.add(model_id)
        try:
            model = await self._compute(self._trainer.create, model_id.replace(":", "_"), config)
            await asyncio.to_thread(self._checkpoints.begin, model_id, config, metadata)
        finally:
            self._creating.discard(model_id)
        training = self._training[model_id] = _Training(model, Sequence(first))
        session.models.append(model_id)
        return training

    def _model(self, model_id: str) -> _Training:
        if (found := self._training.get(model_id)) is None:
            raise _Missing(f"model_id: {model_id!r:.120} is not in training here; create it, or load its weights")
        self._session(model_id.partition(":")[0])
        return found

    async def _get_info(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.OfModel)
        model, base = self._model(body.model_id).model, self._base
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.folder}
        told = {"type": "get_info", "model_id": body.model_id, "model_data": data, "model_name": base.name}
        return {**told, "is_lora": True, "lora_rank": model.config.rank, "optimizer_config": {"type": "adamw"}}

    def _future(self, key: tuple[str, int], work: Work, **further: Any) -> Answer:
        return {"request_id": self._futures.begin(key, work), **further}

    def _in_turn(self, model_id: str, seq_id: int, work: Callable[[Model], Awaitable[Answer]]) -> Answer:
        """Return the future of a model's request; the one of the first time, if it was sent before."""
        training = self._model(model_id)
        if self._futures.known((model_id, seq_id)) is None:
            if training.turns.is_past(seq_id):
                raise _Gone(f"seq_id: {seq_id} of {model_id} was answered long ago")
            return self._future((model_id, seq_id), training.turns.take(seq_id, lambda: work(training.model)))
        return self._future((model_id, seq_id), lambda: work(training.model))

    async def _forward_backward(self, request: web.Request) -> Answer:
        if request.content_type != PROTOBUF:
            raise RequestError(f"Content-Type: got {request.content_type!r:.80}; send {PROTOBUF}, as SDKs since 0.25 do")
        body = PassRequest(await request.read())
        return self._in_turn(body.model_id, body.seq_id, lambda model: self._compute(self._trainer.run_pass, model, body))

    async def _optim_step(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.OptimStep)

        async def work(model: Model) -> Answer:
            if body.optimizer_params is not None:
                _check_optimizer(body.optimizer_params.type)
            return await self._compute(self._trainer.step, model, body.adam_params or bodies.Adam())

        return self._in_turn(body.model_id, body.seq_id, work)

    # ---- checkpoints

    async def _save_weights(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.SaveWeights)
        path = CheckpointPath(body.model_id, WEIGHTS_KIND, body.path or f"{body.seq_id:06d}")

        async def work(model: Model) -> Answer:
            save = partial(self._checkpoints.save, path, model, self._trainer, body.ttl_seconds, body.user_metadata)
            await self._compute(save, overwrite=body.overwrite)
            return {"type": "save_weights", "path": str(path)}

        return self._in_turn(body.model_id, body.seq_id, work)

    async def _load_weights(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.LoadWeights)
        creates = body.session_id is not None and body.model_seq_id is not None
        if not creates and (body.model_id is None or body.seq_id is None):
            raise RequestError("session_id: missing; give session_id and model_seq_id, or model_id and seq_id")
        model_id = f"{body.session_id}:train:{body.model_seq_id}" if creates else str(body.model_id)

        async def load(model: Model | None) -> Answer:
            self._check_base(body.base_model)
            _check_optimizer("adamw" if body.optimizer_config is None else body.optimizer_config.type)
            saved = await asyncio.to_thread(self._checkpoints.find, CheckpointPath.of(body.path))
            if body.optimizer and not saved.optimizer.is_file():
                raise RequestError(f"optimizer: {body.path} has no optimizer's state; load a path of save_weights")
            if model is None:
                model = (await self._begin(model_id, saved.config, body.user_metadata, first=1)).model
            state = saved.optimizer if body.optimizer else None
            await self._compute(self._trainer.load, model, saved.adapter, state)
            return {"type": "load_weights", "path": body.path, "model_id": model_id}

        if creates:
            self._session(str(body.session_id))
            return self._future((model_id, 0), lambda: load(None))
        return self._in_turn(model_id, body.seq_id or 0, load)

    async def _save_for_sampler(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.SaveForSampler)
        number = body.sampling_session_seq_id
        session = f"{body.model_id.partition(':')[0]}:sample:{number}"
        name = body.path or (f"{body.seq_id:06d}" if number is None else f"unnamed-{number}")
        path = CheckpointPath(body.model_id, SAMPLER_KIND, name)

        async def work(model: Model) -> Answer:
            if body.kind != "snapshot":
                raise RequestError(f"kind: got {body.kind!r:.80}; samplers are frozen here: use snapshot")
            save = partial(self._checkpoints.save, path, model, self._trainer, body.ttl_seconds, body.user_metadata)
            saved = await self._compute(save)
            await self._samplers.prove(saved)
            if number is None:
                return {"type": "save_weights_for_sampler", "path": str(path)}
            self._add_sampler(session, _Sampler(saved, None, unnamed=body.path is None))
            return {"type": "save_weights_for_sampler", "sampling_session_id": session}

        return self._in_turn(body.model_id, body.seq_id, work)

    async def _weights_info(self, request: web.Request) -> Answer:
        path = CheckpointPath.of(bodies.decode(await request.read(), bodies.OfPath).tinker_path)
        config = msgspec.to_builtins((await asyncio.to_thread(self._checkpoints.find, path)).config)
        parts = {name: config[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": self._base.name, "is_lora": True, "lora_rank": config["rank"], **parts}

    async def _list_runs(self, request: web.Request) -> Answer:
        names = await asyncio.to_thread(lambda: list(self._checkpoints.models()))
        offset, limit = _page(request)
        runs = [await asyncio.to_thread(self._checkpoints.describe, name) for name in names[offset : offset + limit]]
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(names)}}

    async def _run(self, request: web.Request) -> Answer:
        return await asyncio.to_thread(self._checkpoints.describe, request.match_info["id"])

    async def _list_of_run(self, request: web.Request) -> Answer:
        return {"checkpoints": await asyncio.to_thread(self._described, [request.match_info["id"]])}

    async def _list_checkpoints(self, request: web.Request) -> Answer:
        found = await asyncio.to_thread(lambda: self._described(list(self._checkpoints.models())))
        offset, limit = _page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    def _described(self, models: list[str]) -> list[dict[str, Any]]:
        known = self._checkpoints.models()
        return [saved.describe() for model in models if model in known for saved in self._checkpoints.of_model(model)]

    async def _delete(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._checkpoints.remove, _path_in(request))
        return web.Response(status=204)

    async def _ttl(self, request: web.Request) -> web.Response:
        ttl = bodies.decode(await request.read(), bodies.Lifetime).ttl_seconds
        await asyncio.to_thread(self._checkpoints.set_lifetime, _path_in(request), ttl)
        return web.Response(status=204)

    # ---- samples

    def _add_sampler(self, name: str, sampler: _Sampler) -> None:
        session = self._session(name.partition(":")[0])
        if self._sampling.setdefault(name, sampler) is sampler:
            session.samplers.append(name)

    async def _create_sampler(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.CreateSampler)
        self._check_base(body.base_model)
        name, saved = f"{body.session_id}:sample:{body.sampling_session_seq_id}", None
        if name not in self._sampling:
            if body.model_path is not None:
                saved = await asyncio.to_thread(self._checkpoints.find, CheckpointPath.of(body.model_path))
            elif body.base_model is None:
                raise RequestError("base_model: missing; give it, or a model_path")
            self._add_sampler(name, _Sampler(saved, body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sampler_of(self, name: str | None) -> _Sampler:
        if (found := self._sampling.get(name or "")) is None:
            raise _Missing(f"sampling_session_id: {name!r:.120} is not here, or its snapshot was unused for long; save again")
        found.used = time.monotonic()
        return found

    async def _sampler(self, request: web.Request) -> Answer:
        found = self._sampler_of(request.match_info["id"])
        return {"sampler_id": request.match_info["id"], "base_model": self._base.name, "model_path": found.path}

    async def _asample(self, request: web.Request) -> Answer:
        body = bodies.decode(await request.read(), bodies.Asample)
        if body.sampling_session_id is None or body.seq_id is None:
            raise RequestError("sampling_session_id: missing; give it with a seq_id, as SDKs since 0.38 do")
        sampler = self._sampler_of(body.sampling_session_id)
        key = body.sampling_session_id, body.seq_id
        names = [f"{key[0]}:{key[1]}:{number}" for number in range(body.num_samples)]
        return self._future(key, lambda: self._samplers.sample(sampler.saved, body), sample_sequence_ids=names)

    async def _retrieve(self, request: web.Request) -> Answer | web.Response:
        name = bodies.decode(await request.read(), bodies.Retrieve).request_id
        if (future := self._futures.get(name)) is None:
            raise _Gone(f"request_id: {name!r:.120} is unknown, or was answered long ago")
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await future.done.wait()
        except TimeoutError:
            return _json({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        answer = future.answer
        return answer if isinstance(answer, dict) else web.Response(body=answer, content_type=PROTOBUF)


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise RequestError(f"optimizer: got {kind!r:.80}; this service has adamw")


def _page(request: web.Request) -> tuple[int, int]:
    given = [request.query.get("offset", "0"), request.query.get("limit", "20")]
    if not all(value.isdecimal() and len(value) < 10 for value in given):
        raise RequestError(f"offset and limit: got {given}; give whole numbers")
    offset, limit = map(int, given)
    return offset, min(limit, 1000)


def _path_in(request: web.Request) -> CheckpointPath:
    parts = request.match_info
    return CheckpointPath.of(f"tinker://{parts['id']}/{parts['kind']}/{parts['name']}")


async def listen(application: web.Application, listener: socket.socket) -> web.AppRunner:
    """Begin to answer requests; `cleanup` of the result ends it."""
    log_few(logging.getLogger("aiohttp.server"))
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=HEADER_SECONDS, auto_decompress=False)
    await runner.setup()
    assert runner.server is not None
    limit = ConnectionLimit(most_connections())
    loop = asyncio.get_running_loop()
    await loop.create_server(partial(limit.admit, runner.server), sock=listener, backlog=1024)  # type: ignore[arg-type]
    return runner
