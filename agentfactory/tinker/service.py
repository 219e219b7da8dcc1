"""The HTTP routes of the Tinker API, with sessions, models and sampling sessions by their ids.

The event loop answers; one thread computes passes, steps and files, in the order in which requests get their turn, so
that heartbeats and samples never wait for it."""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from agentfactory.tinker import bodies
from agentfactory.tinker.checkpoints import SAMPLER_KIND, WEIGHTS_KIND, CheckpointPath, Checkpoints, Saved, remove
from agentfactory.tinker.futures import Answer, Futures, Turns, Work
from agentfactory.tinker.messages import PROTOBUF, PassRequest, RequestError
from agentfactory.tinker.samplers import Samplers
from agentfactory.tinker.training import Model, Trainer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handler = Callable[..., Awaitable[Any]]

_POST: dict[str, type[Struct]] = {
    "create_model": bodies.CreateModel,
    "load_weights": bodies.LoadWeights,
    "create_sampling_session": bodies.CreateSampler,
    "asample": bodies.Asample,
}
"""Path -> its body; it is served by the method of its name."""
_IN_TURN: dict[str, type[Struct]] = {
    "optim_step": bodies.OptimStep,
    "save_weights": bodies.SaveWeights,
    "save_weights_for_sampler": bodies.SaveForSampler,
}
"""The same of requests that take their turn among those of a model, and return a future."""
_CHECKPOINT = "training_runs/{model_id}/checkpoints/{kind}/{name}"
_SHORT = {
    ("POST", "create_session"): "create_session",
    ("POST", "session_heartbeat"): "session_heartbeat",
    ("POST", "sessions/{session_id}/finish"): "finish_session",
    ("POST", "get_info"): "get_info",
    ("POST", "retrieve_future"): "retrieve_future",
    ("GET", "samplers/{sampling_session_id}"): "describe_sampler",
    ("GET", "sessions"): "list_sessions",
    ("GET", "sessions/{session_id}"): "describe_session",
    ("POST", "weights_info"): "weights_info",
    ("GET", "training_runs"): "list_runs",
    ("GET", "training_runs/{model_id}"): "describe_run",
    ("GET", "training_runs/{model_id}/checkpoints"): "list_checkpoints_of_run",
    ("GET", "checkpoints"): "list_checkpoints",
    ("DELETE", _CHECKPOINT): "delete_checkpoint",
    ("PUT", f"{_CHECKPOINT}/ttl"): "set_lifetime",
}
"""Requests with bodies.Short -> a method here or of Checkpoints, which is called on another thread."""
_OFF = "parallel_fwdbwd_chunks", "proto_compress_fwdbwd", "custom_loss_server_side", "sample_use_retrieve_futures"
_FIXED: dict[tuple[str, str], Answer] = {
    ("POST", "client/config"): dict.fromkeys((*_OFF, "sample_join_sampling_session"), False),
    ("POST", "telemetry"): {"status": "accepted"},
    ("GET", "healthz"): {"status": "ok"},
}
_POLL_SECONDS = 25.0
"""Time until a poll without an answer ends; the SDK's own timeout is 45 s."""
_MOST_BYTES = 1 << 26
_MOST_MODELS = 16
_SESSION_SECONDS, _SILENT_SECONDS, _SNAPSHOT_SECONDS = 900.0, 120.0, 1800.0
"""Time without a heartbeat after which a session ends; the same while a new model finds no room; and time without a
request after which a nameless snapshot ends."""


@dataclass
class _Session:
    metadata: bodies.Metadata | None
    seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class _Sampler:
    """A sampling session: a snapshot (None: the base), which ends with it unless it has a `path`."""

    saved: Saved | None
    path: str | None
    used: float = field(default_factory=time.monotonic)


class Base(NamedTuple):
    """The base model: its folder, or name on the hub, the service's name of it, and others that clients may use."""

    folder: str
    name: str
    others: frozenset[str]
    context: int
    architecture: str


class Service:
    """The service for all clients that send `key`."""

    def __init__(self, base: Base, trainer: Trainer, samplers: Samplers, checkpoints: Checkpoints, key: str) -> None:
        self._base, self._trainer, self._samplers, self._checkpoints = base, trainer, samplers, checkpoints
        self._key = key.encode()
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._futures = Futures()
        self._sessions: dict[str, _Session] = {}
        self._models: dict[str, Model] = {}
        self._turns: dict[str, Turns] = {}
        self._sampling: dict[str, _Sampler] = {}

    def application(self) -> web.Application:
        known = {"max_context_length": self._base.context, "trainable": True, "sampleable": True}
        capabilities = {"supported_models": [{"model_name": self._base.name, **known}]}
        routes: dict[tuple[str, str], Handler] = {("POST", "forward_backward"): self.forward_backward}
        for name, kind in _POST.items():
            routes["POST", name] = partial(self._decoded, getattr(self, name), kind)
        for name, kind in _IN_TURN.items():
            routes["POST", name] = partial(self._decoded_in_turn, getattr(self, name), kind)
        for place, name in _SHORT.items():
            here = getattr(self, name, None) or partial(asyncio.to_thread, getattr(self._checkpoints, name))
            routes[place] = partial(self._decoded, here, bodies.Short)
        for place, answer in {**_FIXED, ("GET", "get_server_capabilities"): capabilities}.items():
            routes[place] = partial(_fixed, answer)
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._respond])
        app.add_routes([web.route(method, f"/api/v1/{path}", handler) for (method, path), handler in routes.items()])
        return app

    async def _decoded(self, handler: Handler, kind: type[Struct], request: web.Request) -> Any:
        query: Mapping[str, str] = request.query if request.method == "GET" else {}
        return await handler(bodies.decode(await request.read(), kind, {**query, **request.match_info}))

    async def _decoded_in_turn(self, work: Handler, kind: type[Struct], request: web.Request) -> Answer:
        """A wrong body takes its turn, too: those after it would wait for ever."""
        content = await request.read()

        async def decoded(model: Model) -> Answer:
            answer: Answer = await work(model, bodies.decode(content, kind))
            return answer

        return self._in_turn(bodies.decode(content, bodies.Turn), decoded)

    @web.middleware
    async def _respond(self, request: web.Request, handler: Handler) -> web.Response:
        given = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._key):
            refusal = _json({"error": "set TINKER_API_KEY as the service has printed it"}, 401)
            refusal.force_close()
            return refusal
        try:
            found = await handler(request)
        except RequestError as error:
            return _json({"error": str(error), "category": "user"}, error.status)
        except web.HTTPRequestEntityTooLarge:
            return _json({"error": f"the body has more than {_MOST_BYTES:,} bytes; send fewer data at a time"}, 413)
        except web.HTTPException as error:
            return _json({"error": f"{request.method} {request.path} is not a part of this service"}, error.status)
        if found is None:
            return web.Response(status=204)
        return found if isinstance(found, web.Response) else _json(found)

    def _compute(self, function: Callable[..., Result], *args: Any, **named: Any) -> Awaitable[Result]:
        """Call a function on the thread that computes."""
        return asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **named))

    def _future(self, name: str, work: Work, **further: Any) -> Answer:
        self._futures.begin(name, work)
        return {"request_id": name, **further}

    async def retrieve_future(self, body: bodies.Short) -> Answer | web.Response:
        task = self._futures[body.request_id]
        await asyncio.wait([task], timeout=_POLL_SECONDS)
        if not task.done():
            return _json({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
        answer = task.result()
        return answer if isinstance(answer, dict) else web.Response(body=answer, content_type=PROTOBUF)

    # ---- sessions

    async def create_session(self, body: bodies.Short) -> Answer:
        name = uuid.uuid4().hex
        self._sessions[name] = _Session(body.user_metadata)
        return {"type": "create_session", "session_id": name}

    def _session(self, name: str) -> _Session:
        if (found := self._sessions.get(name)) is None:
            raise RequestError(f"session_id: {name!r:.80} has ended, or its service was restarted; create another", 410)
        found.seen = time.monotonic()
        return found

    async def session_heartbeat(self, body: bodies.Short) -> Answer:
        self._session(body.session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, body: bodies.Short) -> Answer:
        if body.session_id in self._sessions:
            await self._end_session(body.session_id, "its session has ended")
        return {"status": "finished"}

    async def _end_session(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name)
        for model_id in session.models:
            self._turns.pop(model_id).close(f"model_id: {model_id}: {reason}")
            await self._compute(self._trainer.drop, self._models.pop(model_id))
        for sampler in session.samplers:
            await self._end_sampler(sampler)

    async def _end_sampler(self, name: str) -> None:
        found = self._sampling.pop(name, None)
        if found is not None and found.path is None and found.saved is not None:
            await self._forget(found.saved)

    async def _forget(self, saved: Saved) -> None:
        await self._samplers.forget(saved)
        await asyncio.to_thread(remove, saved.folder)

    async def sweep(self, silent: float = _SESSION_SECONDS) -> None:
        """End sessions without a heartbeat for `silent` seconds, and unused snapshots; first save unsaved steps."""
        now = time.monotonic()
        for name in [name for name, session in self._sessions.items() if now - session.seen > silent]:
            told = f"its session sent no heartbeat for {silent:.0f} s"
            logger.warning("session %s ends: %s", name, told)
            await self._save_unsaved(self._sessions[name].models)
            await self._end_session(name, told)
        for name in [name for name, sampler in self._sampling.items() if now - sampler.used > _SNAPSHOT_SECONDS]:
            await self._end_sampler(name)

    async def _save_unsaved(self, models: list[str]) -> list[str]:
        """Save the models that have made steps since their last checkpoints; return the paths."""
        paths = {CheckpointPath(name, WEIGHTS_KIND, "unsaved"): self._models[name] for name in models}
        unsaved = {path: model for path, model in paths.items() if model.steps > model.saved}
        for path, model in unsaved.items():
            await self._compute(self._checkpoints.save, path, model, self._trainer, overwrite=True)
        return [str(path) for path in unsaved]

    async def close(self) -> list[str]:
        """Wait for the pass that is computed, and save what is not; return the paths."""
        for model_id, turns in self._turns.items():
            turns.close(f"model_id: {model_id}: the service is ending")
        paths = await self._save_unsaved(list(self._models))
        self._thread.shutdown()
        return paths

    async def list_sessions(self, body: bodies.Short) -> Answer:
        return {"sessions": body.page(list(self._sessions))[0]}

    async def describe_session(self, body: bodies.Short) -> Answer:
        if (session := self._sessions.get(body.session_id)) is None:
            raise RequestError(f"there is no session {body.session_id!r:.80}", 404)
        told = {"training_run_ids": session.models, "sampler_ids": session.samplers}
        return {**told, "user_metadata": session.metadata}

    # ---- models

    def _check(self, base_model: str | None, optimizer: bodies.Optimizer) -> None:
        if base_model not in (None, self._base.name, *self._base.others):
            problem = f"base_model: got {base_model!r:.200}, and this service has {self._base.name!r}"
            raise RequestError(f"{problem}; use that, or start the service with the other as model.path")
        if optimizer.type != "adamw":
            raise RequestError(f"optimizer: got {optimizer.type!r:.80}; this service has adamw")

    async def create_model(self, body: bodies.CreateModel) -> Answer:
        model_id = f"{body.session_id}:train:{body.model_seq_id}"

        async def work() -> Answer:
            self._check(body.base_model, body.optimizer_config)
            await self._begin(model_id, body.lora_config, body.user_metadata)
            return {"type": "create_model", "model_id": model_id}

        self._session(body.session_id)
        return self._future(f"{model_id}:0", work)

    async def _begin(self, model_id: str, config: bodies.Lora, metadata: bodies.Metadata | None) -> Model:
        """Create a model. Raises RequestError if there are too many, or the server does not serve such an adapter."""
        if len(self._models) >= _MOST_MODELS:
            await self.sweep(_SILENT_SECONDS)
        if len(self._models) >= _MOST_MODELS:
            problem = f"the service has {_MOST_MODELS} models in training, which is its limit"
            raise RequestError(f"{problem}; end a session that is not needed (ServiceClient.close)")
        model = await self._compute(self._trainer.create, model_id.replace(":", "_"), config)
        try:
            await self._compute(self._checkpoints.begin, model_id, config, metadata)
            # servers refuse adapters of some modules, as vLLM does those of a few heads
            path = CheckpointPath(model_id, SAMPLER_KIND, "_new")
            saved = await self._compute(self._checkpoints.save, path, model, self._trainer)
            await self._samplers.prove(saved)
            await self._forget(saved)
            self._session(model_id.partition(":")[0]).models.append(model_id)
        except BaseException:
            await self._compute(self._trainer.drop, model)
            raise
        self._models[model_id], self._turns[model_id] = model, Turns()
        return model

    def _model(self, model_id: str) -> Model:
        if (found := self._models.get(model_id)) is None:
            told = f"model_id: {model_id!r:.120} is not in training here; create it, or load its weights"
            raise RequestError(told, 404)
        self._session(model_id.partition(":")[0])
        return found

    async def get_info(self, body: bodies.Short) -> Answer:
        model_id, base, rank = body.model_id, self._base, self._model(body.model_id).config.rank
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.folder}
        return {"model_id": model_id, "model_data": data, "model_name": base.name, "is_lora": True, "lora_rank": rank}

    def _in_turn(self, turn: bodies.Turn | PassRequest, work: Callable[[Model], Awaitable[Answer]]) -> Answer:
        """Return the future of a model's request; that of the first time, if it was sent before."""
        name, model = f"{turn.model_id}:{turn.seq_id}", self._model(turn.model_id)
        if name in self._futures:
            return {"request_id": name}
        return self._future(name, self._turns[turn.model_id].wait_for(turn.seq_id, lambda: work(model)))

    async def forward_backward(self, request: web.Request) -> Answer:
        if (kind := request.content_type) != PROTOBUF or "Content-Encoding" in request.headers:
            raise RequestError(f"Content-Type: got {kind!r:.80}; send {PROTOBUF} uncompressed, as SDKs since 0.25 do")
        body = PassRequest(await request.read())
        return self._in_turn(body, lambda model: self._compute(self._trainer.run_pass, model, body))

    async def optim_step(self, model: Model, body: bodies.OptimStep) -> Answer:
        self._check(None, body.optimizer_params)
        return await self._compute(self._trainer.step, model, body.adam_params)

    # ---- checkpoints

    def _save(self, body: bodies.SaveWeights, model: Model, path: CheckpointPath) -> Awaitable[Saved]:
        save = partial(self._checkpoints.save, path, model, self._trainer, body.ttl_seconds, body.user_metadata)
        return self._compute(save, body.overwrite)

    async def save_weights(self, model: Model, body: bodies.SaveWeights) -> Answer:
        path = CheckpointPath(body.model_id, WEIGHTS_KIND, body.path or f"{body.seq_id:06d}")
        await self._save(body, model, path)
        return {"type": "save_weights", "path": str(path)}

    async def load_weights(self, body: bodies.LoadWeights) -> Answer:
        async def load(model_id: str, model: Model | None = None) -> Answer:
            self._check(body.base_model, body.optimizer_config)
            saved = await asyncio.to_thread(self._checkpoints.find, CheckpointPath.of(body.path))
            if body.optimizer and not saved.optimizer.is_file():
                raise RequestError(f"optimizer: {body.path} has no optimizer's state; load a path of save_weights")
            model = model or await self._begin(model_id, saved.info.lora, body.user_metadata)
            await self._compute(self._trainer.load, model, saved.adapter, saved.optimizer if body.optimizer else None)
            return {"type": "load_weights", "path": body.path, "model_id": model_id}

        if body.model_id is not None and body.seq_id is not None:
            return self._in_turn(bodies.Turn(body.model_id, body.seq_id), partial(load, body.model_id))
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("session_id: missing; give session_id and model_seq_id, or model_id and seq_id")
        self._session(body.session_id)
        created = f"{body.session_id}:train:{body.model_seq_id}"
        return self._future(f"{created}:0", partial(load, created))

    async def save_weights_for_sampler(self, model: Model, body: bodies.SaveForSampler) -> Answer:
        if body.kind != "snapshot":
            raise RequestError(f"kind: got {body.kind!r:.80}; samplers are frozen here: use snapshot")
        number = body.sampling_session_seq_id
        # a name with _ is nobody's: the snapshot ends with its sampling session
        name = body.path or (f"{body.seq_id:06d}" if number is None else f"_{number}")
        path = CheckpointPath(body.model_id, SAMPLER_KIND, name)
        saved = await self._save(body, model, path)
        await self._samplers.prove(saved)
        if number is None:
            return {"type": "save_weights_for_sampler", "path": str(path)}
        session = f"{body.model_id.partition(':')[0]}:sample:{number}"
        self._add_sampler(session, _Sampler(saved, str(path) if body.path else None))
        return {"type": "save_weights_for_sampler", "sampling_session_id": session}

    # ---- samples

    def _add_sampler(self, name: str, sampler: _Sampler) -> None:
        session = self._session(name.partition(":")[0])
        if self._sampling.setdefault(name, sampler) is sampler:
            session.samplers.append(name)

    async def create_sampling_session(self, body: bodies.CreateSampler) -> Answer:
        self._check(body.base_model, bodies.Optimizer())
        name, saved = f"{body.session_id}:sample:{body.sampling_session_seq_id}", None
        if body.model_path is not None:
            saved = await asyncio.to_thread(self._checkpoints.find, CheckpointPath.of(body.model_path))
        elif body.base_model is None:
            raise RequestError("base_model: missing; give it, or a model_path")
        self._add_sampler(name, _Sampler(saved, body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sampler(self, name: str) -> _Sampler:
        if (found := self._sampling.get(name)) is None:
            told = f"sampling_session_id: {name!r:.120} is not here, or was unused for long; save again"
            raise RequestError(told, 404)
        found.used = time.monotonic()
        return found

    async def describe_sampler(self, body: bodies.Short) -> Answer:
        name = body.sampling_session_id
        return {"sampler_id": name, "base_model": self._base.name, "model_path": self._sampler(name).path}

    async def asample(self, body: bodies.Asample) -> Answer:
        sampler, name = self._sampler(body.sampling_session_id), f"{body.sampling_session_id}:{body.seq_id}"
        each = [f"{name}:{number}" for number in range(body.num_samples)]
        return self._future(name, lambda: self._samplers.sample(sampler.saved, body), sample_sequence_ids=each)


async def _fixed(answer: Answer, request: web.Request) -> Answer:
    return answer


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
